"""The rules between layers and packages, held over the syntax trees of the code."""

import ast
import collections
import functools
import re
import sys
from pathlib import Path

from tests.programs.syntax_trees import LAYERS, ROOT, nodes, trees

# Not imported by their `__init__`: documented, and what only our own layers use, beside torch.
PUBLIC_MODULES = {"communicator": {"compile"}, "coordinator": {"torch_private"}}

# A line may import itself and the lines before it. `base` is the layer's modules that are not named
# elsewhere; a layer's own `__init__` may import all of it.
ORDER = {
    "launcher": (
        "base records system trace authentication",
        "registry detection",
        "runtime external local",
        "backends launch_job launch_handle",
        "doctor",
        "cli __main__",
    ),
    "coordinator": (
        "base",
        "control",
        "failure",
        "store transport",
        "collectives coordinator work_outcome",
    ),
    "communicator": (
        "base",
        "backends",
        "p2p",
        "conformance torch_interop",
        "cli backend_info __main__ torch_backend compile",
    ),
    "drumline": (
        "base contact",
        "core",
        "planner checkpoint",
        "offload kv_cache weight_formats",
        "tensor_parallel compile_once",
        "stages",
        "pipeline",
        "strategies",
        "serving engines",
        "cli __main__",
    ),
}


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _modules() -> frozenset[str]:
    return frozenset(map(_module, trees()))


def _imports(tree: ast.AST, is_top_level: bool = False, with_types: bool = False) -> list[str]:
    """Every module that the tree imports, as dotted names; those of type checkers if asked for."""
    names = []
    ordinary = tree.body if is_top_level else _walk_without_types(tree)  # type: ignore[attr-defined]
    for node in nodes(tree) if with_types else ordinary:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import"
            module = node.module or ""
            submodules = [f"{module}.{alias.name}" for alias in node.names]
            names += [name if name in _modules() else module for name in submodules]
    return names


def _walk_without_types(tree: ast.AST):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _walk_without_types(node)


def _rank_in_order(layer: str, module: str) -> int:
    """The line of the layer's table that the module stands in."""
    part = (module.split(".") + [""])[1]
    for number, line in enumerate(ORDER[layer]):
        if part in line.split():
            return number
    return 0  # base


def _names(tree: ast.AST) -> set[str]:
    """Every identifier and attribute of the tree, comments and strings left out."""
    names = {node.id for node in nodes(tree) if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes(tree) if isinstance(node, ast.Attribute)}


def test_a_layer_imports_only_lower_layers_and_only_their_public_names():
    """A command line may also build on the command lines of the layers below."""
    wrong = []
    for path, tree in trees().items():
        layer = path.parts[0]
        for node in nodes(tree):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            froms = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules = froms or [alias.name for alias in node.names]
            for module in modules:
                top = module.split(".")[0]
                if top not in LAYERS or top == layer:
                    continue
                names = {alias.name for alias in node.names} if froms else set()
                is_lower = LAYERS.index(top) < LAYERS.index(layer)
                is_command_line = module == f"{top}.cli" and "cli" in path.with_suffix("").parts
                is_name = module == top and names <= _public(top)
                is_public = is_command_line or is_name
                if not is_lower or not is_public:
                    wrong.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []


@functools.cache
def _public(layer: str) -> set[str]:
    stub = ast.parse((ROOT / layer / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imports for alias in node.names}
    return names | PUBLIC_MODULES.get(layer, set())


def test_a_package_imports_only_those_before_it_in_the_table():
    wrong = []
    for path, tree in trees().items():
        layer, module = path.parts[0], _module(path)
        if module == layer:
            continue
        for imported in _imports(tree, is_top_level=True):
            is_ours = imported.split(".")[0] == layer and imported != layer
            if is_ours and _rank_in_order(layer, imported) > _rank_in_order(layer, module):
                wrong.append(f"{module} imports {imported}")
    assert wrong == []


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """The modules that importing this one may import, inside of functions too."""
    reached: set[str] = set()
    ahead = [start]
    while ahead:
        new = graph[ahead.pop()] - reached
        reached |= new
        ahead += new
    return reached


def test_no_modules_import_each_other_in_a_circle():
    """Imports for type checkers count, and those inside of functions."""
    graph = {
        _module(path): {name for name in _imports(tree, with_types=True) if name not in LAYERS}
        & _modules()
        for path, tree in trees().items()
    }  # a layer's `__init__` gathers what its modules have made
    reached = {module: _reachable(graph, module) for module in graph}
    cycles = {
        " ".join(sorted(other for other in reached[module] if module in reached[other]))
        for module in graph
        if module in reached[module]
    }
    assert cycles == set()


def test_every_folder_is_small_enough_to_read():
    folders = collections.Counter(path.parent for path in trees() if path.name != "__init__.py")
    sources = (path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    folders.update(path.relative_to(ROOT).parent for path in sources)
    assert {str(folder): n for folder, n in folders.items() if n > 12} == {}


def test_every_file_is_short_enough_to_read():
    """Several had grown to 800 lines: each held more than one idea."""
    files = [ROOT / path for path in trees()] + [*(ROOT / "csrc").rglob("*.*")]
    lengths = {str(f.relative_to(ROOT)): f.read_bytes().count(b"\n") for f in files}
    assert {name: length for name, length in lengths.items() if length > 500} == {}


def test_folders_of_tests_are_those_of_the_packages():
    """Beside them lie programs that tests run, and the tests of what is not Python."""
    others = {"programs", "native"}
    packages = {path.parent for path in trees()}
    for layer in LAYERS:
        for path in (ROOT / "tests" / layer).rglob("test_*.py"):
            folder = path.parent.relative_to(ROOT / "tests")
            assert folder in packages or folder.name in others, path


def test_every_package_is_on_the_map():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    folders = {path.parent for path in trees()} | {
        path.relative_to(ROOT).parent for path in (ROOT / "csrc").rglob("*.cpp")
    }
    assert [str(folder) for folder in sorted(folders) if f"`{folder}/`" not in text] == []


def test_a_module_name_stands_for_one_module():
    repeated = {"errors", "cli", "mpi", "timings", "__main__"}
    stems = collections.defaultdict(list)
    for path in trees():
        module = _module(path)
        if path.name != "__init__.py":
            stems[module.split(".")[-1]].append(module)
    assert {s: m for s, m in stems.items() if len(m) > 1 and s not in repeated} == {}


def test_a_class_name_stands_for_one_class():
    """In C++ too, but for the same thing as one language and the other have it."""
    shared = {"CallSite", "DtypeInfo", "Kernels", "NcclLibrary", "PeerStatus", "RegisteredMemory"}
    places = collections.defaultdict(list)
    for path, tree in trees().items():
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
    classes = set()
    for path in (ROOT / "csrc").rglob("*.*"):
        classes |= set(
            re.findall(r"^(?:struct|class) (?:alignas\(\w+\) )?(\w+)", path.read_text(), re.M)
        )
    assert classes & places.keys() == shared


STANDARD = {*sys.stdlib_module_names, "launcher"}
# What the launcher may use if it is there: each is imported inside the function that needs it.
LAZY = {"ray", "mpi4py", "pynvml", "rich", "torch", "matplotlib", "argcomplete"}


def test_the_launcher_loads_the_standard_library_alone():
    for path, tree in trees().items():
        if path.parts[0] == "launcher":
            top_level = {name.split(".")[0] for name in _imports(tree, is_top_level=True)}
            assert top_level <= STANDARD, path
            assert {name.split(".")[0] for name in _imports(tree)} <= STANDARD | LAZY, path


def test_nothing_is_ever_unpickled():
    for path, tree in trees().items():
        modules = {name.split(".")[0] for name in _imports(tree)}
        assert not modules & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, path
        unpickling = {"broadcast_object_list", "all_gather_object", "recv_object_list"}
        assert not _names(tree) & unpickling, path


def test_only_the_launcher_reads_the_environment():
    for path, tree in trees().items():
        if path.parts[0] != "launcher":
            assert not _names(tree) & {"environ", "getenv", "putenv"}, path


def test_no_library_exits_and_none_listens_everywhere():
    for path, tree in trees().items():
        text = (ROOT / path).read_text()
        assert "0.0.0.0" not in text and "tcp://*" not in text, path
        if path.parts[0] != "launcher" and path.name != "__main__.py":
            assert not _names(tree) & {"_exit", "exit", "quit"}, path


def test_proc_is_read_in_one_module():
    """Three others open the memory of another process, which has no other name."""
    opened = {"stack_dump.py", "joining.py", "heartbeat.py"}
    for path, tree in trees().items():
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docstrings = {
            id(node.body[0].value)
            for node in nodes(tree)
            if isinstance(node, documented) and ast.get_docstring(node)
        }
        for node in nodes(tree):
            if isinstance(node, ast.Constant) and id(node) not in docstrings:
                is_path = isinstance(node.value, str) and node.value.startswith("/proc/")
                assert not is_path or path.name in {"linux.py", *opened}, (path, node.lineno)


def test_nothing_writes_cuda_visible_devices():
    for path, tree in trees().items():
        for node in nodes(tree):
            if isinstance(node, ast.Assign):
                assert "CUDA_VISIBLE_DEVICES" not in ast.unparse(node.targets[0]), path
