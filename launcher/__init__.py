"""Start ranks, and find out which rank this process is.

info = launcher.current()
print(info.rank, "of", info.world_size)
results = launcher.launch(work, nprocs=4)
"""

import ast
import functools
import importlib
from pathlib import Path
from typing import Any


@functools.cache
def _module_by_name() -> dict[str, str]:
    """The module that has each public name, as the stub beside this file says."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name == "__all__":
        return [*_module_by_name()]
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("drumline")
        except metadata.PackageNotFoundError:  # a checkout that is not installed
            return "unknown"
    module = _module_by_name().get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = importlib.import_module(module)
    is_module = not hasattr(package, name)
    value = importlib.import_module(f"{module}.{name}") if is_module else getattr(package, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_module_by_name(), "__version__"})
