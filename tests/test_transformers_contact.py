"""transformers is touched in one module, which says of every name why, and where it was read."""

import ast
from pathlib import Path

from drumline.contact import transformers_api
from drumline.contact.loading import weights
from tests.programs.syntax_trees import nodes, trees

CONTACT = Path("drumline/contact/transformers_api.py")

STILL_TO_MOVE = {
    "drumline/pipeline/master_model.py",
    "drumline/pipeline/unsupported.py",
    "drumline/tensor_parallel/synced_generation.py",
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
        if CONTACT.parent not in path.parents:
            imports = [n for n in nodes(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
            assert "transformers_api" not in " ".join(map(ast.unparse, imports)), path


def test_each_name_has_a_reason_and_releases_that_were_read():
    taken = imported(trees()[CONTACT]) - {"transformers"}
    assert taken == set(transformers_api.NAMES)
    for name, (reason, releases) in transformers_api.NAMES.items():
        assert len(reason.split()) > 3 and "5.2" in releases, name
    assert not [name for name in taken if name.startswith("_")]
    assert len(taken) <= 30


ALSO_OUTSIDE = {
    "_attn_implementation": {"drumline/pipeline/unsupported.py"},
}
"""Names with an underscore that are still used elsewhere: this shrinks to nothing."""


def spelled(tree: ast.Module) -> set[str]:
    """Attributes, keywords and texts of a module, docstrings and all."""
    attributes = {node.attr for node in nodes(tree) if isinstance(node, ast.Attribute)}
    constants = [node.value for node in nodes(tree) if isinstance(node, ast.Constant)]
    keywords = {node.arg for node in nodes(tree) if isinstance(node, ast.keyword)}
    return attributes | {value for value in constants if isinstance(value, str)} | keywords


def test_names_with_an_underscore_and_classes_as_text_stay_in_the_contact_package():
    """An import cannot miss them, so one that is renamed must be found in one place."""
    names = {*transformers_api.UNDERSCORES, *weights.OPERATIONS}
    inside = set()
    for path, tree in trees().items():
        here = spelled(tree) & names
        if CONTACT.parent not in path.parents:
            others = {name for name in here if str(path) not in ALSO_OUTSIDE.get(name, ())}
            assert not others, (path, others)
        elif path != CONTACT:
            inside |= here
    assert inside == names
    for reason, releases in transformers_api.UNDERSCORES.values():
        assert len(reason.split()) > 3 and "5.2" in releases, reason
