"""Classes that are mixed with another one under the name of the first, so that nobody sees it.

model.__class__ = mixed_class(type(model), MeshModel, type(model))
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class _Absent:
    """In a class, a method that its instances go without: nn.Module says so, as of any other."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        raise AttributeError


ABSENT = {"generate": _Absent(), "init_continuous_batching": _Absent()}
"""Methods that mixins override, for classes that have none."""


def _mixed_class(kind: type[Any], *bases: type[Any]) -> type[Any]:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    absent = {name: method for name, method in ABSENT.items() if not hasattr(kind, name)}
    return type(kind.__name__, bases, names | absent)


mixed_class: Callable[..., type[Any]] = functools.cache(_mixed_class)
"""mixed_class(kind, *bases): a class of these bases, `kind` among them, that has the name of
`kind`. It is kept, as transformers takes some time to make one."""
