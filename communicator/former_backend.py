"""Backends that were written when vendors derived from Communicator and named methods do_send.

class Acme(Communicator):      # as before: here it becomes a FormerBackend, for one release
    def do_send(self, tensor, dst): ...
"""

from __future__ import annotations

import warnings
from typing import Any

from communicator.backend import RENAMED, Backend


class FormerBackend(Backend):
    """A backend whose methods are called do_open, do_send and so on, as they were before."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Allow the former names, and raise TypeError for those that users call."""
        super(Backend, cls).__init_subclass__(**kwargs)
        if overridden := [name for name in RENAMED if name in vars(cls)]:
            raise TypeError(
                f"class {cls.__name__}(Communicator) overrides {', '.join(overridden)}, and calls "
                "of users no longer go through methods of a backend. Derive from "
                "communicator.Backend, where these are the methods that were called do_..., and "
                "get checked arguments."
            )


def _calling_former(name: str) -> Any:
    def call(self: FormerBackend, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, f"do_{name}")(*args, **kwargs)

    return call


for _name in RENAMED:
    setattr(FormerBackend, f"do_{_name}", getattr(Backend, _name))
    setattr(FormerBackend, _name, _calling_former(_name))


class BaseOfFormerBackends(type):
    """The class of Communicator: a class that derives from it becomes a FormerBackend."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any
    ) -> Any:
        if not any(isinstance(base, BaseOfFormerBackends) for base in bases):
            return super().__new__(cls, name, bases, namespace, **kwargs)
        former = (FormerBackend if isinstance(base, cls) else base for base in bases)
        backend = type(name, tuple(former), namespace, **kwargs)
        warnings.warn(
            f"class {name}(Communicator): derive a backend from communicator.Backend, and rename "
            "its methods do_send to send, do_open to open, and so on. The old names go in the next "
            "release.",
            DeprecationWarning,
            stacklevel=2,
        )
        return backend

    def __getattr__(cls, name: str) -> Any:
        """A default of Backend under its former name, as `do_barrier = Communicator.do_barrier`."""
        if name.startswith("do_"):
            return getattr(FormerBackend, name)
        raise AttributeError(f"type object 'Communicator' has no attribute {name!r}")
