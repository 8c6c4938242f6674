"""Each library that drumline wraps is imported by one module, which says of every name why."""

import ast
import importlib
from pathlib import Path

import pytest

from tests.programs.syntax_trees import nodes, trees

IMPORTED_BY = {
    "accelerate": {"drumline/contact/accelerate_api.py"},
    "h11": {"drumline/contact/uvicorn_api.py"},
    "huggingface_hub": {"drumline/contact/loading/hub.py"},
    "safetensors": {"drumline/contact/safetensors_api.py"},
    "tokenizers": set(),  # transformers has the tokenizer
    "uvicorn": {"drumline/contact/uvicorn_api.py"},
}


def imported(tree):
    """The libraries that a module imports, also inside of functions and for types."""
    names = []
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names += [item.value for item in node.args if isinstance(item, ast.Constant)]
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("library", sorted(IMPORTED_BY))
def test_one_module_imports_a_library(library):
    importers = {str(path) for path, tree in trees().items() if library in imported(tree)}
    assert importers == IMPORTED_BY[library]


@pytest.mark.parametrize("path", sorted(set().union(*IMPORTED_BY.values())))
def test_each_name_of_a_library_has_a_reason_and_the_releases_that_were_read(path):
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(package, reason="runs after `pip install 'drumline[serve]'`")
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    names = {alias.name for node in nodes(trees()[Path(path)]) for alias in aliases(node)}
    assert names <= module.NAMES.keys()
    for name, (reason, releases) in module.NAMES.items():
        assert len(reason.split()) > 2 and releases[0].isdigit(), name


def aliases(node):
    """What an import from a wrapped library names."""
    is_from = isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in IMPORTED_BY
    return node.names if is_from else []
