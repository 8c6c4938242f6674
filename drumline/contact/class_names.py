"""Classes by name: what is sent to other ranks, who have imported the same ones."""

from __future__ import annotations

import functools
import sys
from typing import Any

from drumline.errors import DrumlineError


def full_name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def class_named(name: str, base: Any, is_needed: bool = True) -> type[Any]:
    """The subclass of this name among those that are imported already: nothing is imported.

    Without one DrumlineError, or the base if it is not needed.
    """
    return _search(name, base, is_needed, 0 if is_needed else len(sys.modules))


@functools.lru_cache(maxsize=256)
def _search(name: str, base: Any, is_needed: bool, num_modules: int) -> type[Any]:
    """num_modules: imported so far; what is not found is looked for again after the next import."""
    kinds: list[type[Any]] = [base]
    for kind in kinds:
        if full_name(kind) == name:
            return kind
        kinds.extend(kind.__subclasses__())
    if not is_needed:
        return kinds[0]
    raise DrumlineError(
        f"{name}, which a layer on another rank takes or returns, is not known on this one; import "
        "it where the model is loaded, the same on every rank."
    )
