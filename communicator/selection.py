"""Which backend: the one asked for, or the best that every rank can use.

Backends are found by name, here or among the entry points of the group `communicator.backends`
(name -> subclass of Communicator). Nothing is imported before it is asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from communicator.base import Communicator
from communicator.errors import Unsupported
from coordinator import Coordinator

BUILTIN = {
    "shm": "communicator.backends.plugin:Shm",
    "hybrid": "communicator.backends.hierarchical:Hybrid",
    "tcp": "communicator.backends.tcp:Tcp",
    "gloo": "communicator.backends.gloo:Gloo",
    "mpi": "communicator.backends.mpi:Mpi",
    "nccl": "communicator.backends.nccl:Nccl",
    "cupy": "communicator.backends.nccl.cupy:Cupy",
}


def backend_names() -> list[str]:
    """Every backend that could be asked for by name, built in or installed."""
    return sorted({*BUILTIN, *(point.name for point in _entry_points())})


def backend_class(name: str) -> type[Communicator]:
    """The class of a backend by name. Raises Unsupported if none does, or it does not load."""
    if name in BUILTIN:
        module, _, attribute = BUILTIN[name].partition(":")
        return _import(name, lambda: getattr(import_module(module), attribute))
    for point in _entry_points():
        if point.name == name:
            return _import(name, point.load)
    raise Unsupported(
        f"no backend is called {name!r}. There are: {', '.join(backend_names())}. "
        "A vendor's package adds one through the entry-point group 'communicator.backends'; "
        "a library is given by its path."
    )


def choose(coor: Coordinator, backend: Any, device_type: str | None = None) -> type[Communicator]:
    """The class to use, the same on every rank. Collective over coor.

    device_type: whose memory it must move, if that matters.
    Raises Unsupported on every rank if the backend asked for cannot be used on one of them.
    """
    wanted = backend_names() if backend is None else [backend]
    why_not = _filter(backend, device_type)
    scores = {_label(item): _score(coor, item, why_not) for item in wanted}
    votes = [json.loads(data) for data in coor.allgather(json.dumps(scores).encode())]
    usable = {name: min(vote[name] for vote in votes) for name in scores if _all_can(votes, name)}
    if not usable:
        raise Unsupported(_refusal(coor, votes))
    best = max(usable, key=lambda name: (usable[name], name))
    return _resolve(next(item for item in wanted if _label(item) == best))


def _resolve(item: Any) -> type[Communicator]:
    if isinstance(item, type) and issubclass(item, Communicator):
        return item
    if not isinstance(item, str | os.PathLike):
        raise Unsupported(f"backend={item!r} is neither a name, a path, nor a Communicator class")
    if not is_file(item):
        return backend_class(str(item))
    path = os.path.abspath(item)  # a bare name would be looked for in the system's folders
    return _import(path, lambda: import_module("communicator.backends.plugin").library(path))


def is_file(item: str | os.PathLike[str]) -> bool:
    """Is it the path of a library, and not a name?"""
    return not isinstance(item, str) or item.endswith(".so") or os.sep in item


def _label(item: Any) -> str:
    if isinstance(item, str | os.PathLike):
        return os.fspath(item)
    return getattr(item, "__name__", repr(item))


def _filter(backend: Any, device_type: str | None) -> Callable[[type[Communicator]], str]:
    """Says of a class why it is out of the question; "" if it is not."""

    def why_not(found: type[Communicator]) -> str:
        if backend is None and found.asked_only:
            return "it is taken only when asked for"
        if device_type not in (None, found.device_type):
            return f"it moves tensors on {found.device_type}, not on {device_type}"
        return ""

    return why_not


def _score(coor: Coordinator, item: Any, why_not: Callable[[type[Communicator]], str]) -> int | str:
    """This rank's score for a backend, or in words why it cannot use it."""
    try:
        found = _resolve(item)
        return why_not(found) or found.probe(coor)
    except Unsupported as reason:
        return str(reason)
    except Exception as error:  # a vendor's: raised on one rank alone it would strand the others
        return f"looking for it raised {type(error).__name__}: {error}"


def _all_can(votes: list[dict[str, int | str]], name: str) -> bool:
    return all(isinstance(vote.get(name), int) for vote in votes)


def _refusal(coor: Coordinator, votes: list[dict[str, int | str]]) -> str:
    told = {
        (name, reason): [
            coor.peers[rank] for rank, vote in enumerate(votes) if vote.get(name) == reason
        ]
        for vote in votes
        for name, reason in vote.items()
        if isinstance(reason, str)
    }
    reasons = [
        f"{'no rank' if len(peers) == len(votes) else ', '.join(map(str, peers))} "
        f"can{'' if len(peers) == len(votes) else 'not'} use {name}: {reason}"
        for (name, reason), peers in told.items()
    ]
    if not reasons:  # each rank was asked for another backend
        reasons = [f"rank {rank} asked for {', '.join(vote)}" for rank, vote in enumerate(votes)]
    return f"rank {coor.rank}: no backend that every rank can use. " + "; ".join(reasons)


def _entry_points() -> list[Any]:
    return list(entry_points(group="communicator.backends"))


def _import(name: str, load: Any) -> type[Communicator]:
    try:
        found = load()
    except (ImportError, OSError, AttributeError) as error:
        raise Unsupported(f"the backend {name!r} does not load: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Communicator)):
        raise Unsupported(
            f"the backend {name!r} is {found!r}, and no subclass of communicator.Communicator. Let "
            "its entry point name one."
        )
    return found
