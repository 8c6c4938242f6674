"""The entry point of torch.backends: `import torch` runs it in every process.

torch.distributed.init_process_group("drumline")     # with no import of ours before
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

NAME = "drumline"
DEVICE_TYPES = ("cpu", "cuda")


def register() -> None:
    """Register the backend, and import what it needs only when it makes its first group.

    Raises nothing: torch would not import.
    """
    with suppress(Exception):
        from torch.distributed import Backend

        if NAME not in Backend.backend_list:
            Backend.register_backend(
                NAME, _create_group, extended_api=True, devices=[*DEVICE_TYPES]
            )


def _create_group(*arguments: Any) -> Any:
    return import_module("communicator.torch_interop.process_group").create_group(*arguments)
