"""The declared dependencies are those that the packages import, and none is imported too early."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import drumline.cli
from drumline import model_packages
from drumline.contact import releases

ROOT = Path(__file__).parent.parent
PACKAGES = ("launcher", "coordinator", "communicator", "drumline")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
WITHOUT_MODELS = ("__init__", "errors", "model_packages", "timings", "torch_autoload")
MODULES_OF_EXTRAS = {
    "serve": {
        "drumline/contact/uvicorn_api.py",
        *(f"drumline/serving/{name}.py" for name in ("app", "connection", "metrics", "protocol")),
        *(f"drumline/serving/answers/{name}.py" for name in ("request_stream", "response_writer")),
    },
    "models": {
        name
        for name in (
            path.relative_to(ROOT).as_posix() for path in (ROOT / "drumline").rglob("*.py")
        )
        if not name.startswith("drumline/engines/")
        and name not in ("drumline/cli/__init__.py", "drumline/cli/command_options.py")
        and name not in {f"drumline/{module}.py" for module in WITHOUT_MODELS}
    },
}
"""Modules that only the commands of an extra import, and so may import its packages at the top."""
NOT_INSTALLED = {"ray": "ray", "mpi4py": "mpi4py", "cupy": "cupy-cuda12x"}
"""Distributions of packages that this machine may lack, so that their metadata cannot be asked."""
OF_CHECKPOINTS = {"compressed_tensors"}
"""Packages of quantized formats, which transformers asks for by name where a checkpoint has one."""
ENGINES = {"vllm"}
"""Packages that import our adapter in drumline/engines, not the other way: no extra has them."""


def _distribution(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", Requirement(requirement).name).lower()


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE = {_distribution(text) for text in PROJECT["dependencies"]}
EXTRAS = {
    name: {_distribution(text) for text in texts} - {"drumline"}
    for name, texts in PROJECT["optional-dependencies"].items()
}
OF_USERS = {name: EXTRAS[name] for name in EXTRAS if name not in ("test", "bench", "docs", "lint")}


@cache
def _imports(path: Path) -> list[tuple[str, bool]]:
    """The third-party packages that a file imports, and whether when it is imported itself."""
    tree = ast.parse(path.read_text())
    host = {"engines": ENGINES, "checkpoint": OF_CHECKPOINTS}.get(path.parent.name, set())
    late = {
        node
        for outer in ast.walk(tree)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(outer)
    }
    return [
        (module.split(".")[0], node not in late)
        for node in ast.walk(tree)
        for module in _modules(node)
        if module.split(".")[0] not in {*sys.stdlib_module_names, *PACKAGES, *host}
    ]


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [node.module or ""]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        return [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    return []


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(metadata.packages_distributions())


@cache
def _distributions_of(package: str) -> set[str]:
    names = _distributions().get(package) or [NOT_INSTALLED.get(package, package)]
    return {_distribution(name) for name in names}


def test_every_imported_package_is_a_declared_dependency():
    declared = CORE.union(*OF_USERS.values())
    undeclared = {
        (path.relative_to(ROOT).as_posix(), package)
        for path in FILES
        for package, _ in _imports(path)
        if not _distributions_of(package) & declared
    }
    assert not undeclared


def test_a_package_of_an_extra_is_imported_in_functions_or_by_the_modules_of_the_extra():
    early = set()
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        allowed = CORE.union(
            *(OF_USERS[e] for e, files in MODULES_OF_EXTRAS.items() if name in files)
        )
        for package, is_early in _imports(path):
            if is_early and not _distributions_of(package) & allowed:
                early.add((name, package))
    assert not early


def test_no_dependency_is_declared_that_nothing_imports():
    """numpy is the one that only torch imports."""
    used = {
        name
        for path in FILES
        for package, _ in _imports(path)
        for name in _distributions_of(package)
    }
    assert used >= CORE - {"numpy"} and used >= EXTRAS["models"]


IMPORT_ALL = """
import importlib, sys
undeclared = set(sys.argv[2:])

class OnlyDeclared:
    '''A finder that does not find packages that are not declared.'''
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in undeclared:
            return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(OnlyDeclared, sys.meta_path)
try:
    import pytest
except ModuleNotFoundError:
    module = importlib.import_module(sys.argv[1])
    for name in module.__all__:
        getattr(module, name)
    print("imported", sys.argv[1])
"""


def _closure(distributions: set[str]) -> set[str]:
    """Distributions with all that they require, as far as they are installed."""
    todo, closure = set(distributions), set()
    while todo:
        name = todo.pop()
        closure.add(name)
        try:
            requirements = [Requirement(text) for text in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:
            continue
        needed = {r.name for r in requirements if not r.marker or r.marker.evaluate({"extra": ""})}
        todo |= {re.sub(r"[-_.]+", "-", name).lower() for name in needed} - closure
    return closure


def _lowest(requirements: list[str]) -> dict[str, str]:
    """The lowest version that each promises."""
    return {
        requirement.name: specifier.version
        for requirement in map(Requirement, requirements)
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }


def test_the_lowest_versions_that_are_tested_are_those_that_are_promised():
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    promised = _lowest([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["models"]])
    assert promised and tested.keys() == promised.keys()
    for name, floor in promised.items():
        assert f"{tested[name]}.".startswith(f"{floor}."), name


def test_what_the_two_commands_install_is_pinned_with_hashes():
    """transformers 5.24.0 came out, and 19 tests failed in a clone that had passed them."""
    hashes: dict[str, int] = {}
    pins: set[str] = set()
    for file in ("constraints.txt", "constraints-cuda.txt"):
        for line in (ROOT / file).read_text().splitlines():
            if match := re.match(r"([a-z][a-z0-9-]*)==[\w.]+(?= )", line):
                name = match[1]
                hashes[name] = 0
                pins.add(match[0])
            elif line.startswith("    --hash=sha256:"):
                hashes[name] += 1
    assert hashes["transformers"] and all(hashes.values())
    installed = _closure({*CORE, *EXTRAS["test"], *EXTRAS["lint"], *EXTRAS["serve"]})
    here = {d.metadata["Name"]: d.version.partition("+")[0] for d in metadata.distributions()}
    if f"torch=={here['torch']}" not in pins:
        pytest.skip("the newest torch is here, not the pinned one: it may need other libraries")
    assert installed - hashes.keys() == set()


def test_a_release_that_was_not_read_is_beyond_an_upper_bound():
    """Nothing in the project had changed when transformers 5.24.0 switched off its fast paths."""
    needed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["serve"]]
    needed += PROJECT["optional-dependencies"]["models"]
    bounds = {
        requirement.name: [s.version for s in requirement.specifier if s.operator == "<"]
        for requirement in map(Requirement, needed)
    }
    assert [name for name in bounds if not bounds[name]] == ["drumline"]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_layer_and_all_its_names_import_with_its_own_dependencies_alone(package):
    extra = EXTRAS["models"] if package == "drumline" else set()
    closure = _closure({*CORE, *extra, "drumline"})
    undeclared = {
        name
        for name, distributions in _distributions().items()
        if not {_distribution(distribution) for distribution in distributions} & closure
    }
    assert "pytest" in undeclared and not {"torch", *PACKAGES} & undeclared
    command = [sys.executable, "-c", IMPORT_ALL, package, *undeclared]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.stdout.strip() == f"imported {package}", done.stderr


def test_a_range_ends_with_the_newest_release_that_was_read():
    """A range without an end promised transformers 5.24 before anybody had read it."""
    ranges = {
        r.name: r.specifier for r in map(Requirement, PROJECT["optional-dependencies"]["models"])
    }
    for name in releases.READ:
        ends = [s.version for s in ranges[name] if s.operator == "<"]
        assert ends == [releases.end_of_range(name)], name


def test_the_packages_that_models_need_are_those_of_their_extra():
    lowest = {name: ".".join(map(str, version)) for name, version in model_packages.LOWEST.items()}
    assert _lowest(PROJECT["optional-dependencies"]["models"]) == lowest


@pytest.mark.parametrize(
    ("lowest", "state"), [({"no-such-package": (1,)}, "none"), ({"torch": (99, 1)}, r"\d+\.\d+.*")]
)
def test_models_without_their_packages_say_what_to_install(monkeypatch, capsys, lowest, state):
    monkeypatch.setattr(model_packages, "LOWEST", lowest)
    monkeypatch.delitem(vars(drumline), "load", raising=False)
    model_packages.require.cache_clear()
    (name,) = lowest
    message = (
        rf"needs {name} >= [\d.]+, and {state} is installed: `pip install 'drumline\[models\]'`"
    )
    with pytest.raises(drumline.MissingPackage, match=message):
        drumline.load("model")
    assert drumline.cli.main(["plan", "--model", "model", "--memory", "1GiB"]) == 1
    assert re.match(f"drumline: This {message}", capsys.readouterr().err)
    assert drumline.Communicator.__name__ == "Communicator"


def test_a_name_that_a_release_took_away_is_an_error_that_says_what_to_do():
    """It was an ImportError of a name that the user has never heard of."""
    program = (
        "import drumline, transformers.modeling_gguf_pytorch_utils as used\n"
        "del used.TENSOR_PROCESSORS\n"
        "try:\n    drumline.load('model')\n"
        "except drumline.MissingPackage as error:\n    print(error)"
    )
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True).stdout
    installed, newest = releases.installed("transformers"), releases.READ["transformers"][-1]
    assert output.startswith(f"transformers {installed} does not have what") and output.endswith(
        f"; pip install 'transformers=={newest}', the newest that was read.\n"
    )


def test_the_console_script_is_the_command_line():
    entries = PROJECT["scripts"]
    assert set(entries) == {"drumline"}
    module, _, function = entries["drumline"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
