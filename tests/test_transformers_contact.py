"""transformers is touched in one module, which says of every name why, and where it was read."""

import ast
from pathlib import Path

from drumline.contact import transformers_api
from tests.programs.syntax_trees import nodes, trees

CONTACT = Path("drumline/contact/transformers_api.py")

STILL_TO_MOVE = {
    "drumline/checkpoint/config_files.py",
    "drumline/checkpoint/empty_model.py",
    "drumline/checkpoint/source.py",
    "drumline/checkpoint/weight_map.py",
    "drumline/cli/bench.py",
    "drumline/cli/generate.py",
    "drumline/cli/run_script.py",
    "drumline/core/consistency.py",
    "drumline/core/meta_init.py",
    "drumline/pipeline/master_model.py",
    "drumline/pipeline/unsupported.py",
    "drumline/planner/load_options.py",
    "drumline/planner/model_profile.py",
    "drumline/serving/sampling.py",
    "drumline/serving/scheduler.py",
    "drumline/tensor_parallel/sharded_model.py",
    "drumline/tensor_parallel/synced_generation.py",
    "drumline/weight_formats/gguf_file.py",
}
"""Files that import transformers themselves: this shrinks to nothing."""


def imported(tree: ast.Module) -> set[str]:
    """The names of transformers that a module takes, by import or as attributes of it."""
    names, modules = set(), set()
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            ours = [a for a in node.names if a.name.split(".")[0] == "transformers"]
            modules |= {alias.asname or alias.name for alias in ours}
    used = [node for node in nodes(tree) if isinstance(node, ast.Attribute)]
    return names | {node.attr for node in used if ast.unparse(node.value) in modules} | modules


def test_one_module_imports_transformers():
    found = {str(path) for path, tree in trees().items() if imported(tree)}
    assert found == {str(CONTACT)} | STILL_TO_MOVE


def test_only_verbs_of_the_contact_package_build_on_that_module():
    for path, tree in trees().items():
        if path.parent != CONTACT.parent:
            imports = [n for n in nodes(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
            assert "transformers_api" not in " ".join(map(ast.unparse, imports)), path


def test_each_name_has_a_reason_and_releases_that_were_read():
    taken = imported(trees()[CONTACT]) - {"transformers"}
    assert taken == set(transformers_api.NAMES)
    for name, (reason, releases) in transformers_api.NAMES.items():
        assert len(reason.split()) > 3 and "5.2" in releases, name
    assert not [name for name in taken if name.startswith("_")]
    assert len(taken) <= 30
