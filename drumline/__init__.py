"""One transformers model over the devices of every rank, as if they were one device.

model = drumline.load("checkpoint", device_map="auto")
print(model.device_map)
model.generate(tokens)

Engines find the lower layers' names here too: `from drumline import Coordinator, Communicator`.
`import drumline` imports nothing else. A name imports its module when it is first used; those of
models raise MissingPackage where the extra `models` is not installed.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    return importlib.import_module("launcher").import_public(__name__, name, _require)


def __dir__() -> list[str]:
    names: list[str] = importlib.import_module("launcher").list_public(__name__)
    return names


def _require(module: str) -> None:
    """Raise MissingPackage if this module of models needs the extra that is not installed."""
    if module.startswith("drumline.") and module != "drumline.errors":
        importlib.import_module("drumline.model_packages").require()
