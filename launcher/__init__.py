"""Start ranks, and find out which rank this process is.

info = launcher.current()
print(info.rank, "of", info.world_size)
results = launcher.launch(work, nprocs=4)
"""

import ast
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


@functools.cache
def public_names(package: str) -> dict[str, str]:
    """By public name of a package, the module that has it, as the stub beside its __init__ says."""
    stub = ast.parse(Path(str(sys.modules[package].__file__)).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def import_public(package: str, name: str, before: Callable[[str], None] | None = None) -> Any:
    """Import a public name of a package when it is first used (PEP 562), and keep it there.

    before: called with the module that has it.
    """
    if name == "__all__":
        return [*public_names(package)]
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("drumline")
        except metadata.PackageNotFoundError:  # a checkout that is not installed
            return "unknown"
    module = public_names(package).get(name)
    if module is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    if before is not None:
        before(module)
    source = importlib.import_module(module)
    is_module = not hasattr(source, name)
    value = importlib.import_module(f"{module}.{name}") if is_module else getattr(source, name)
    setattr(sys.modules[package], name, value)
    return value


def list_public(package: str) -> list[str]:
    """The names of a package for dir(): those that were imported, and those that can be."""
    return sorted({*vars(sys.modules[package]), *public_names(package), "__version__"})


__getattr__ = functools.partial(import_public, __name__)
__dir__ = functools.partial(list_public, __name__)
