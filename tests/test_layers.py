"""The rules between the floors, held over the syntax trees of the packages."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ("launcher", "coordinator", "communicator", "drumline")
FILES = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _imports(path: Path) -> list[str]:
    """Every module that the file imports, wherever in it, as dotted names."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(path.parent.name if node.level else node.module or "")
    return found


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_a_floor_imports_only_lower_floors_and_only_their_public_names(path):
    """A command line may also build on the command lines of the layers below."""
    floor = path.relative_to(ROOT).parts[0]
    lower = FLOORS[: FLOORS.index(floor)]
    for module in _imports(path):
        top = module.split(".")[0]
        if top in FLOORS and top != floor:
            assert top in lower, f"{_name(path)} imports {module}, a higher floor"
            is_entry_point = module == f"{top}.cli" and "cli" in (path.stem, path.parent.name)
            assert module == top or is_entry_point, f"{_name(path)} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_public_names_are_the_only_ones_taken(path):
    """`from launcher import x` takes only what launcher.__all__ offers."""
    floor = path.relative_to(ROOT).parts[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in FLOORS and node.module != floor:
            offered = _public(node.module)
            taken = {alias.name for alias in node.names}
            assert taken <= offered, f"{_name(path)} takes {taken - offered} of {node.module}"


def _public(floor: str) -> set[str]:
    tree = ast.parse((ROOT / floor / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


STANDARD = {*sys.stdlib_module_names, "launcher"}
# What the launcher may use if it is there: each is imported inside the one function that needs it.
LAZY = {"ray", "mpi4py", "pynvml", "rich", "torch", "matplotlib"}


def _top_level_imports(path: Path) -> list[str]:
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "launcher").rglob("*.py")), ids=_name)
def test_the_launcher_loads_the_standard_library_alone(path):
    assert {module.split(".")[0] for module in _top_level_imports(path)} <= STANDARD
    assert {module.split(".")[0] for module in _imports(path)} <= STANDARD | LAZY


def _names(path: Path) -> set[str]:
    """Every identifier and attribute in the file, comments and strings left out."""
    tree = ast.parse(path.read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_nothing_is_ever_unpickled(path):
    modules = {module.split(".")[0] for module in _imports(path)}
    assert not modules & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    assert not _names(path) & {"broadcast_object_list", "all_gather_object", "recv_object_list"}


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_only_the_launcher_reads_the_environment(path):
    if path.relative_to(ROOT).parts[0] != "launcher":
        assert not _names(path) & {"environ", "getenv", "putenv"}


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_no_library_exits_and_none_listens_everywhere(path):
    text = path.read_text()
    assert "0.0.0.0" not in text and "tcp://*" not in text
    if path.relative_to(ROOT).parts[0] != "launcher" and path.name != "__main__.py":
        assert not _names(path) & {"_exit", "exit", "quit"}


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_no_floor_writes_cuda_visible_devices(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign):
            assert "CUDA_VISIBLE_DEVICES" not in ast.unparse(node.targets[0])
