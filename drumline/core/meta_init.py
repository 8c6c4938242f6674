"""Building of models on meta, one thread at a time, without the time that filling weights takes.

with model_building(nn.Linear), init_on_meta():
    model = nn.Linear(4096, 4096)       # names and shapes; no number was drawn for it
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

from drumline.contact.loading.models import no_code_prompt
from drumline.errors import CheckpointError, DrumlineError

INITIALIZERS = {
    *(f for name, f in vars(init).items() if name.endswith("_") and callable(f)),
    torch.Tensor.normal_,
    torch.Tensor.uniform_,
}
"""Functions that give a tensor its first values, and return it."""

_BUILD_LOCK = threading.Lock()


@contextlib.contextmanager
def init_on_meta() -> Iterator[None]:
    """Within this block and thread, tensors are made on meta and stay unfilled."""
    with torch.device("meta"), _SkipInitializers():
        yield


class _SkipInitializers(TorchFunctionMode):
    """Skips initializers on meta: torch goes through all steps of drawing numbers, for none."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in INITIALIZERS:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


@contextlib.contextmanager
def model_building(kind: type[Any], source: Any = "its config.json") -> Iterator[None]:
    """Serialize the building of models by threads of this process, and refuse foreign code.

    transformers sets torch's default dtype and replaces functions of torch while it builds a model,
    for the whole process. Raises CheckpointError for what the model's class raises, which checks
    its sizes in a way of its own, or not at all; source: what the error blames.
    """
    with _BUILD_LOCK, no_code_prompt():
        try:
            yield
        except (DrumlineError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise CheckpointError(
                f"no {kind.__name__} can be built from {source} ({error!r:.500}), so there is "
                "nothing to load; copy it again, or install what it takes."
            ) from error
