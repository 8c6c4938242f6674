"""Each library that drumline wraps is imported by one module; a table says of every name why."""

import ast
from pathlib import Path

import pytest

from tests.programs.syntax_trees import loaded_by_name, nodes, trees
from tests.versions.taken_names import RELEASES, TAKEN

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
    names = [*loaded_by_name(tree)]
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    from uvicorn.config import Config",
        "import importlib\nx = importlib.import_module('uvicorn.config')",
        "from importlib import import_module as load\nx = load('uvicorn')",
        "x = __import__('uvicorn')",
        "import sys\nx = sys.modules['uvicorn'].Config",
        "from sys import modules\nx = modules.get('uvicorn')",
        "import pkgutil\nx = pkgutil.resolve_name('uvicorn:Config')",
    ],
)
def test_no_way_to_import_a_library_is_overlooked(code):
    """For transformers the import statement alone was looked for."""
    assert "uvicorn" in imported(ast.parse(code))


@pytest.mark.parametrize("library", sorted(IMPORTED_BY))
def test_one_module_imports_a_library(library):
    importers = {str(path) for path, tree in trees().items() if library in imported(tree)}
    assert importers == IMPORTED_BY[library]


@pytest.mark.parametrize("path", sorted(set().union(*IMPORTED_BY.values())))
def test_each_name_of_a_library_has_a_reason(path):
    names = {alias.name for node in nodes(trees()[Path(path)]) for alias in aliases(node)}
    assert names <= TAKEN[path].keys()
    for name, reason in TAKEN[path].items():
        assert len(reason.split()) > 2, name


def test_the_releases_that_were_read_are_known_of_each_library():
    assert IMPORTED_BY.keys() - {"tokenizers"} <= RELEASES.keys()
    assert all(release[0].isdigit() for read in RELEASES.values() for release in read)


def aliases(node):
    """What an import from a wrapped library names."""
    is_from = isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in IMPORTED_BY
    return node.names if is_from else []
