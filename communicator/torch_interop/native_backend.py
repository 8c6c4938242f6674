"""The C++ part of the torch backend, compiled once for the torch that is installed here.

native = native_backend.load()      # None, and a warning, if it cannot be compiled
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from launcher import make_private, user_cache_folder

SOURCES = Path(__file__).parent / "native"
HEADERS = Path(__file__).parents[1]  # communicator.h
NAME = "drumline_torch_backend"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
LIBRARIES = ("c10", "torch_cpu", "torch_python")


class _CannotBuild(Exception):
    """A reason, and what to do."""


@lru_cache(maxsize=1)
def load() -> Any:
    """The module, which the first process compiles and the others wait for.

    Takes half a minute the first time; blocks for as long. None if it cannot be had here.
    """
    folder = user_cache_folder() / "torch"
    try:
        make_private(folder)  # what lies in it is run
        return _import(_built(folder / f"{_key()}.so"))
    except (_CannotBuild, ImportError, OSError) as reason:
        warnings.warn(
            f"the C++ part of the backend 'drumline' is missing: {reason} Until then calls pass "
            "through Python, which costs some 20 us each, and torch sees a process group without "
            "backends for devices.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _key() -> str:
    """The name of what is built from these sources, for this Python and this torch."""
    digest = hashlib.sha256()
    for path in _source_files():
        digest.update(path.read_bytes())
    versions = (
        f"{torch.__version__}-{torch.version.git_version}-{sysconfig.get_config_var('SOABI')}"
    )
    digest.update(f"{versions} {_abi_flags()} {FLAGS}".encode())
    return f"{NAME}-{torch.__version__}-{digest.hexdigest()[:16]}"


def _source_files() -> list[Path]:
    return [*sorted(SOURCES.iterdir()), HEADERS / "communicator.h"]


def _abi_flags() -> list[str]:
    """The define of torch itself, so that objects can pass between it and the module."""
    return [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]


def _built(path: Path) -> Path:
    """The path, once one process has written it."""
    if not path.exists():
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                _compile(path)
    return path


def _compile(path: Path) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise _CannotBuild("no C++ compiler is found. Install one, such as the package g++.")
    print(f"drumline: compiling {path.stem}, once", file=sys.stderr)
    root, unfinished = Path(torch.__file__).parent, path.with_suffix(".unfinished")
    folders = [HEADERS, root / "include", root / "include/torch/csrc/api/include"]
    command = [
        *(compiler, *FLAGS, *_abi_flags(), f"-DTORCH_EXTENSION_NAME={NAME}"),
        "-DAT_PER_OPERATOR_HEADERS",
        *(f"-I{folder}" for folder in (*folders, sysconfig.get_path("include"))),
        *(str(SOURCES / "backend.cpp"), "-o", str(unfinished)),
        *(f"-L{root / 'lib'}", *(f"-l{library}" for library in LIBRARIES)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
        raise _CannotBuild(
            f"{compiler} refused it: {first.strip()}. Install the compiler and Python's headers "
            "(packages g++ and python3-dev) that fit this torch."
        )
    unfinished.replace(path)


def _import(path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
