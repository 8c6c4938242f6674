"""One transformers model over the devices of every rank, as if they were one device.

model = drumline.load("checkpoint", device_map="auto")
print(model.device_map)
model.generate(tokens)

Engines find the lower layers' names here too: `from drumline import Coordinator, Communicator`.
`import drumline` imports nothing else. A name imports its module when it is first used; those of
models raise MissingPackage where the extra `models` is not installed.
"""

from __future__ import annotations

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
    if name == "__version__":
        return importlib.import_module("launcher").__version__
    if name == "__all__":
        return [*_module_by_name()]
    module = _module_by_name().get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if module.startswith("drumline.") and module != "drumline.errors":
        importlib.import_module("drumline.model_packages").require()
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_module_by_name(), "__version__"})
