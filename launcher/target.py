"""Run a script, a module or a function as Python would, in a process that already runs."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import sys
import zipimport
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from launcher.errors import TargetError
from launcher.job import Job, Target
from launcher.launch_info import LaunchInfo
from launcher.system import shadowing


def of(work: Callable[..., Any] | str | os.PathLike[str]) -> Target:
    """The Target for a function, or for the path of a script."""
    if callable(work):
        module, name = getattr(work, "__module__", "?"), getattr(work, "__qualname__", "?")
        return Target("function", f"{module}:{name}", work)
    return Target("script", os.fspath(work))


def by_reference(target: Target) -> Target:
    """An equal target by a reference that another process can import.

    Raises TargetError for a function that no import can reach.
    """
    if target.function is None:
        return target
    module, _, name = target.name.partition(":")
    main = sys.modules["__main__"]
    if "<" in name or not isinstance(target.function, FunctionType):
        reason = "it is nested, a lambda, or not a plain function"
    elif module == "__main__" and main.__spec__ is not None:
        return Target("function", f"{main.__spec__.name}:{name}", target.function)
    elif module == "__main__" and not os.path.isfile(getattr(main, "__file__", None) or ""):
        reason = "it was typed interactively, and is in no file"
    elif module == "__main__":
        return Target("function", f"{os.path.abspath(str(main.__file__))}:{name}", target.function)
    else:
        return target
    raise TargetError(
        f"{target.name} cannot be imported by another process: {reason}. The ranks of a backend "
        "launcher, and of a program that has threads or an accelerator open, are not forked from "
        "it. Move the function to the top level of a module, or launch before starting threads."
    )


def find(reference: str) -> Callable[..., Any]:
    """The function of a reference; a script is imported for it under another name than __main__."""
    source, _, name = reference.rpartition(":")
    load = _script_as_module if source.endswith(".py") else importlib.import_module
    try:
        value: Any = load(source)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise TargetError(f"cannot find {name!r} in {source!r}: {error}") from error
    return value  # type: ignore[no-any-return]


def _script_as_module(path: str) -> ModuleType:
    """The script's names, without what it guards by `if __name__ == "__main__"`."""
    # the name that the standard library's multiprocessing gives it, so that scripts expect it
    name = "__mp_main__"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules["__main__"] = module
    sys.path.insert(0, os.path.dirname(path))
    spec.loader.exec_module(module)
    return module


def check(target: Target) -> None:
    """Raise TargetError, before any rank exists, if there is nothing to run.

    Or if a file of the user would be imported in place of one of our packages.
    """
    if target.kind == "script":
        _check_script(Path(target.name))
        shadowing.check([os.path.dirname(os.path.realpath(main_file(target.name)))])
    if target.kind == "module":
        if _spec(target.name) is None:
            raise TargetError(
                f"no module named {target.name!r}, so there is nothing to run. Install it, or "
                "start from the folder that contains it."
            )
        shadowing.check(sys.path[:1])


def import_from_working_directory() -> None:
    """Look for modules there first, as `python -m` does, and a console script does not."""
    if not sys.flags.safe_path:  # python -P
        sys.path.insert(0, _working_directory())


def _check_script(path: Path) -> None:
    is_own = path.parts[:3] in (("/", "dev", "stdin"), ("/", "dev", "fd"))  # of each process
    if is_own or path.is_fifo() or path.is_char_device():
        raise TargetError(f"only one rank could read {str(path)!r}: save the script to a file")
    archive = _archive(str(path))
    if archive is not None:
        if archive.find_spec("__main__") is None:
            raise TargetError(f"the archive {str(path)!r} has no __main__.py that could be run")
        return
    try:
        with io.open_code(os.path.abspath(main_file(str(path)))):
            pass
    except OSError as error:
        raise TargetError(
            f"cannot open the script {str(path)!r}: {error.strerror}, so there is nothing to run. "
            f"Paths are relative to {_working_directory()}."
        ) from error


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "a working directory that has been deleted"


def _spec(name: str) -> Any:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError):
        return None
    return spec


def call(job: Job) -> Any:
    """Run the target, a script or a module as the main program; returns a function's result."""
    if job.target.kind == "function":
        function = job.target.function or find(job.target.name)
        return function(*job.args)
    load = _module if job.target.kind == "module" else _script
    module, code = load(job.target.name)
    name = job.target.name if job.target.kind == "script" else module.__file__
    sys.argv = [str(name), *map(str, job.args)]
    sys.modules["__main__"] = module
    exec(code, module.__dict__)
    return None


def callables(job: Job) -> Callable[[LaunchInfo], Callable[[], Any]]:
    """The call of each rank, where ranks share a process, and with it sys.argv and sys.path."""
    if job.target.kind == "function":
        function = job.target.function or find(job.target.name)
        return lambda info: lambda: function(*job.args)
    return lambda info: lambda: call(job)


def main_file(name: str) -> str:
    """The file that Python runs for a script, or for a folder or an archive."""
    holds_main = os.path.isdir(name) or _archive(name) is not None
    return os.path.join(name, "__main__.py") if holds_main else name


def _archive(name: str) -> zipimport.zipimporter | None:
    """Python's importer for a zip archive, as those of zipapp; None for any other file."""
    try:
        return zipimport.zipimporter(name)
    except zipimport.ZipImportError:
        return None


def _script(name: str) -> tuple[ModuleType, CodeType]:
    path, archive = main_file(name), _archive(name)
    sys.path[:] = import_path(Target("script", name))
    module = _new_main(path)
    if archive is not None:
        module.__loader__ = archive
        return module, archive.get_code("__main__")
    with io.open_code(os.path.abspath(path)) as file:
        return module, compile(file.read(), path, "exec")


def import_path(target: Target) -> list[str]:
    """A rank's sys.path: a script's folder in the place of the folder of `python -m launcher`."""
    if target.kind != "script" or sys.flags.safe_path:
        return list(sys.path)
    folder = os.path.dirname(os.path.realpath(main_file(target.name)))
    return [folder, *sys.path[sys.path[:1] == [_working_directory()] :]]


def _module(name: str) -> tuple[ModuleType, CodeType]:
    spec = _spec(name)
    if spec is None:
        raise TargetError(f"no module named {name!r}")
    module = _new_main(spec.origin)
    module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, spec.parent
    return module, spec.loader.get_code(spec.name)


def _new_main(file: str) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__ = file
    module.__dict__["__builtins__"] = __builtins__
    return module
