"""Automatic preloading: libraries that a script imports at its top, found without running it.

Only LIBRARIES are imported before the fork, and only those that the ranks would import anyway, in
the same environment. Modules of the user are read, and never imported here.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

from launcher import target
from launcher.job import Job
from launcher.system.shadowing import PACKAGES

# Importing these starts no thread that outlives a fork, opens no device, and reads no variable that
# differs between the ranks. The fork server checks the first two all the same.
LIBRARIES = ("numpy", "safetensors", "torch", "transformers", "accelerate", *PACKAGES)
# What changes how later imports work: these must run first, and so in each rank.
PATCHING_MODULES = ("dotenv", "eventlet", "gevent", "unsloth")
CHANGED_NAMES = {"environ", "environb", "putenv", "unsetenv", "meta_path", "path_hooks"}
CHANGED_OF_SYS = {"path", "modules", "setdlopenflags"}
# These import what is public when it is first used.
LAZY_LIBRARIES = ("transformers", *PACKAGES)
READING_METHODS = ("get", "items", "keys", "copy", "values")
# Libraries of OpenMP read these and the CPU set when they are loaded; --bind pins after the fork.
PINNING_VARIABLES = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
IS_MAIN = "__name__ == '__main__'"
MAX_FILES = 200
MAX_FILE_BYTES = 1 << 20


class ImportedNames(NamedTuple):
    """One import before the fork, as `from module import names`; of ("*",), all public names."""

    module: str
    names: tuple[str, ...]

    def load(self) -> None:
        """Import them, also those that a package offers only then."""
        __import__(self.module, fromlist=self.names or ("__name__",))


class Preload(NamedTuple):
    """Imports before the fork. note: why these and no others, for `--dry-run`."""

    imports: list[ImportedNames]
    note: str
    is_automatic: bool = True


def choose(job: Job) -> Preload:
    """The imports that the job names; without any, those of the script that are safe."""
    if job.preload is not None:
        return Preload([ImportedNames(name, ("*",)) for name in job.preload], "by --preload", False)
    if problem := _refusal(job):
        return Preload([], problem)
    scan = ImportScan(target.import_path(job.target), job.target.name)
    if job.target.kind == "script":
        scan.read(target.main_file(job.target.name), "__main__")
    else:
        scan.read_modules(f"{job.target.name}.__main__")
    imports = [
        ImportedNames(module, tuple(sorted(names)))
        for module, names in scan.imports.items()
        if not _is_hidden(module.partition(".")[0], scan.path)
    ]
    return Preload(imports, scan.stopped_by or f"of what {job.target.name} imports at its top")


def _refusal(job: Job) -> str:
    """The reason why nothing may be preloaded, whatever the script imports; empty if there is none.

    A program that calls launch() with a function has imported what that function needs.
    """
    if job.target.kind == "function":
        return "the ranks call a function"
    if job.nprocs == 1:
        return "one rank imports as fast by itself"
    if "LD_PRELOAD" in os.environ:
        return "LD_PRELOAD is set"
    pinned = [name for name in PINNING_VARIABLES if name in os.environ]
    if job.bind and pinned:
        return f"with --bind, {pinned[0]} must be read by each rank"
    return ""


def _is_hidden(name: str, rank_path: list[str]) -> bool:
    """True if the ranks would import another file of this name, or none, or one of the user's."""
    in_rank, here = PathFinder.find_spec(name, rank_path), PathFinder.find_spec(name, sys.path)
    if in_rank is None and here is None:
        return importlib.util.find_spec(name) is None  # of an editable installation, if any
    if in_rank is None or here is None or in_rank.origin != here.origin:
        return True
    return in_rank.submodule_search_locations is None


class ImportScan:
    """Reads source files in the order in which Python would run them.

    path: where modules are looked for. imports: names by module of LIBRARIES. stopped_by: the place
    after which nothing can be said, as it changes what an import does.
    """

    def __init__(self, path: list[str], main: str) -> None:
        self.path = path
        self._main_names = ("__main__", main, f"{main}.__main__")
        self.imports: dict[str, set[str]] = {}
        self.stopped_by = ""
        self._seen: set[str] = set()
        self._functions_with_changes = ""

    def read(self, file: str, name: str) -> None:
        """Read the top level of a file, and of the user's modules that it imports there."""
        if self.stopped_by or file in self._seen:
            return
        self._seen.add(file)
        tree = _parse(file)
        if tree is None or len(self._seen) > MAX_FILES:
            self.stopped_by = f"{file} cannot be read, or is one of too many files"
            return
        package = name if file.endswith("__init__.py") else name.rpartition(".")[0]
        used = _attributes(tree)
        for statement in _executed(tree.body, is_main=name in self._main_names):
            if not self.stopped_by:
                self._read_statement(statement, file, package, used)

    def read_modules(self, name: str) -> None:
        """Read the user's modules among those that importing name runs: its packages come first."""
        for part, spec in _specs(name, self.path):
            if _is_source_of_user(spec):
                self.read(str(spec.origin), part)

    def _read_statement(
        self, statement: ast.stmt, file: str, package: str, used: dict[str, set[str]]
    ) -> None:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                names = used.get(alias.asname or alias.name, set())
                self._add(alias.name, names if alias.name in LAZY_LIBRARIES else set())
        elif isinstance(statement, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - statement.level]
            prefix = ".".join(parents) if statement.level else ""
            module = ".".join(filter(None, (prefix, statement.module)))
            self._add(module, {alias.name for alias in statement.names})
        else:
            self._look_for_changes(statement, f"{file}:{statement.lineno}")

    def _look_for_changes(self, statement: ast.stmt, place: str) -> None:
        """Stop at a change of the environment; in a function, at the next call of any function."""
        changes = _changes_imports(statement)
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self._functions_with_changes = self._functions_with_changes or place * changes
            return
        if any(isinstance(node, ast.Call) for node in ast.walk(statement)):
            place = self._functions_with_changes or place
            changes = changes or bool(self._functions_with_changes)
        if changes:
            self.stopped_by = f"{place} changes the environment of later imports"

    def _add(self, module: str, names: set[str]) -> None:
        """Note an import of a library; read a module of the user."""
        top = module.partition(".")[0]
        if top in PATCHING_MODULES:
            self.stopped_by = f"{top} must be imported first"
        elif top in LIBRARIES:
            self.imports.setdefault(module, set()).update(names)
        elif top and top not in sys.stdlib_module_names:
            for name in (module, *(f"{module}.{name}" for name in sorted(names))):
                self.read_modules(name)


def _parse(file: str) -> ast.Module | None:
    """The syntax tree; None for what is not a small file of valid Python, as a rank will report."""
    try:
        path = Path(file)
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a rank will show them, with the name of the file
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _executed(body: list[ast.stmt], is_main: bool) -> Iterator[ast.stmt]:
    """Statements that importing or running the file runs for certain, or tries to."""
    for statement in body:
        if isinstance(statement, ast.Try):
            yield from _executed(statement.body, is_main)
            rest = [line for handler in statement.handlers for line in handler.body]
            imports = (ast.Import, ast.ImportFrom)
            yield from (line for line in rest if not isinstance(line, imports))
            yield from _executed(statement.orelse + statement.finalbody, is_main)
        elif isinstance(statement, ast.If) and ast.unparse(statement.test) == IS_MAIN:
            yield from _executed(statement.body, is_main) if is_main else ()
        else:
            yield statement


def _attributes(tree: ast.Module) -> dict[str, set[str]]:
    """The attributes that the file reads of each name: packages may import them only then."""
    used: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.setdefault(node.value.id, set()).add(node.attr)
    return used


def _changes_imports(statement: ast.stmt) -> bool:
    """True if a statement may change the environment or the import system, not only read it."""
    mentions, reads = 0, 0
    for node in ast.walk(statement):
        mentions += _is_environment(node)
        if isinstance(node, ast.Subscript):
            reads += _is_environment(node.value) and isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.Compare):
            reads += any(map(_is_environment, node.comparators))
        elif isinstance(node, ast.Attribute):
            reads += _is_environment(node.value) and node.attr in READING_METHODS
    return mentions > reads


def _is_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        is_of_sys = isinstance(node.value, ast.Name) and node.value.id == "sys"
        return node.attr in CHANGED_NAMES or (is_of_sys and node.attr in CHANGED_OF_SYS)
    return isinstance(node, ast.Name) and node.id in CHANGED_NAMES


def _specs(name: str, path: list[str]) -> Iterator[tuple[str, ModuleSpec]]:
    """The package of each level, and the module, that importing name runs; nothing is imported."""
    parts = name.split(".")
    for count, part in enumerate(parts, 1):
        spec = PathFinder.find_spec(part, path)  # a dotted namespace needs its parent imported
        if spec is None:
            return
        yield ".".join(parts[:count]), spec
        path = list(spec.submodule_search_locations or ())


def _is_source_of_user(spec: ModuleSpec) -> bool:
    is_source = spec.has_location and str(spec.origin).endswith(".py")
    return is_source and not {"site-packages", "dist-packages"} & {*Path(str(spec.origin)).parts}
