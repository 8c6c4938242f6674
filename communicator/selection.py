"""Selection of a backend: the requested one, or the best that every rank can use.

Backends are found by name, here or among the entry points of the group `communicator.backends`
(name -> subclass of Backend). No plugin is imported before it is requested.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeVar

from communicator.backend import Backend
from communicator.errors import Unsupported
from communicator.own_gpu import own_ordinal
from coordinator import Coordinator

log = logging.getLogger("communicator")

BUILTIN = {
    "shm": "communicator.backends.shm:Shm",
    "hierarchical": "communicator.backends.hierarchical:Hierarchical",
    "tcp": "communicator.backends.tcp:Tcp",
    "gloo": "communicator.backends.gloo:Gloo",
    "mpi": "communicator.backends.mpi:Mpi",
    "nccl": "communicator.backends.nccl:Nccl",
    "cupy": "communicator.backends.nccl.cupy:Cupy",
}
ALIASES = {"hybrid": "hierarchical"}


def backend_names() -> list[str]:
    """The names of all backends, built in or installed."""
    return sorted({*BUILTIN, *(point.name for point in _entry_points())})


def import_builtin() -> None:
    """Import the built-in backends, so that choosing one need not; leave out what does not load."""
    for name in backend_names():
        if name in BUILTIN:
            with contextlib.suppress(Unsupported):
                backend_class(name)


def backend_class(name: str) -> type[Backend]:
    """The class of a backend by name. Raises Unsupported if there is none, or it does not load."""
    name = ALIASES.get(name, name)
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


def choose(
    coor: Coordinator, backend: Any, device_type: str | None = None, has_gpu: bool = False
) -> type[Backend]:
    """The class to use, the same on every rank. Collective over coor.

    device_type: whose memory it must move, if that matters. has_gpu: the caller names its GPU.
    Raises Unsupported on every rank if the requested backend cannot be used on one of them.
    """
    if not isinstance(coor, Coordinator):
        raise TypeError(
            f"Communicator({type(coor).__name__}): needs a Coordinator. Communicator.over() takes "
            "a torch ProcessGroup, or a Store."
        )
    candidates = backend_names() if backend is None else [backend]
    chosen, ballots = _vote(coor, candidates, [device_type], backend is not None, has_gpu)
    if chosen[device_type] is None:
        raise _no_backend(coor, ballots[device_type])
    return _resolve(next(item for item in candidates if _label(item) == chosen[device_type]))


def choose_for_devices(
    coor: Coordinator, device_types: Sequence[str]
) -> dict[str, type[Backend] | None]:
    """The best class for each kind of device, or None, in one exchange. Collective over coor."""
    chosen, _ = _vote(coor, backend_names(), device_types, is_requested=False)
    return {kind: None if name is None else _resolve(name) for kind, name in chosen.items()}


Ballot = dict[str, int | str]
DeviceType = TypeVar("DeviceType", str, str | None)


def _vote(
    coor: Coordinator,
    candidates: list[Any],
    device_types: Sequence[DeviceType],
    is_requested: bool,
    has_gpu: bool = False,
) -> tuple[dict[DeviceType, str | None], dict[DeviceType, list[Ballot]]]:
    """The label of the best that every rank can use, by device type, and every rank's scores."""
    own: list[Ballot] = [
        {_label(item): _score(coor, item, kind, is_requested, has_gpu) for item in candidates}
        for kind in device_types
    ]
    votes = zip(*coor.allgather_object(own), strict=True)
    ballots = dict(zip(device_types, map(list, votes), strict=True))
    return {kind: _best(ballots[kind], own[0]) for kind in device_types}, ballots


def _best(ballots: list[Ballot], names: Iterable[str]) -> str | None:
    usable = {}
    for name in names:
        scores = [score for ballot in ballots if isinstance(score := ballot.get(name), int)]
        if len(scores) == len(ballots):
            usable[name] = min(scores)
    return max(usable, key=lambda name: (usable[name], name)) if usable else None


def _resolve(item: Any) -> type[Backend]:
    if isinstance(item, type) and issubclass(item, Backend):
        return item
    if not isinstance(item, str | os.PathLike):
        raise Unsupported(f"backend={item!r} is neither a name, a path, nor a Backend class")
    if not is_file(item):
        return backend_class(str(item))
    path = os.path.abspath(item)  # a bare name would be looked for in the system's folders
    return _import(path, lambda: import_module("communicator.backends.plugin").load(path))


def is_file(item: str | os.PathLike[str]) -> bool:
    """True for the path of a library, False for a name."""
    return not isinstance(item, str) or item.endswith(".so") or os.sep in item


def _label(item: Any) -> str:
    if isinstance(item, str | os.PathLike):
        return os.fspath(item)
    return getattr(item, "__name__", repr(item))


def _exclusion_reason(backend: type[Backend], device_type: str | None, is_requested: bool) -> str:
    """Why a class cannot be selected, whatever its probe says; "" if it can."""
    if backend.capabilities.only_by_name and not is_requested:
        return "it is used only if named"
    if device_type not in (None, backend.device_type):
        return f"it moves tensors on {backend.device_type}, not on {device_type}"
    return ""


def _score(
    coor: Coordinator, candidate: Any, device_type: str | None, is_requested: bool, has_gpu: bool
) -> int | str:
    """This rank's score for a backend, or the reason why it cannot use it."""
    try:
        backend = _resolve(candidate)
        if reason := _exclusion_reason(backend, device_type, is_requested):
            return reason
        if reason := backend.why_unencrypted(coor):
            return reason
        if backend.device_type == "cuda" and not has_gpu:
            own_ordinal(coor.info.local_rank)
        return backend.probe(coor)
    except Unsupported as reason:
        return str(reason)
    except Exception as error:  # a vendor's: raised on one rank alone, the others would wait
        return f"its probe raised {type(error).__name__}: {error}"


def _no_backend(coor: Coordinator, ballots: list[dict[str, int | str]]) -> Unsupported:
    """The error for scores, one dict a rank, of which no backend has one on every rank."""
    peers_by_reason = {
        (name, reason): [
            coor.peers[rank] for rank, ballot in enumerate(ballots) if ballot.get(name) == reason
        ]
        for ballot in ballots
        for name, reason in ballot.items()
        if isinstance(reason, str)
    }
    reasons = [
        f"{'no rank' if len(peers) == len(ballots) else ', '.join(map(str, peers))} "
        f"can{'' if len(peers) == len(ballots) else 'not'} use {name}: {reason}"
        for (name, reason), peers in peers_by_reason.items()
    ]
    if not reasons:  # each rank requested another backend
        reasons = [
            f"{coor.rank_name(rank)} asked for {', '.join(names)}"
            for rank, names in enumerate(ballots)
        ]
    return Unsupported(
        f"{coor.rank_name()}: no backend that every rank can use. {'; '.join(reasons)}",
        reasons=[reason for _, reason in peers_by_reason],
    )


@cache  # it reads a file of every package that is installed
def _entry_points() -> list[Any]:
    return list(entry_points(group="communicator.backends"))


def _import(name: str, load: Callable[[], Any]) -> type[Backend]:
    try:
        backend = load()
    except (ImportError, OSError, AttributeError) as error:
        raise Unsupported(f"the backend {name!r} does not load: {error}") from error
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise Unsupported(
            f"the backend {name!r} is {backend!r}, and no subclass of "
            "communicator.Backend. Let its entry point name one."
        )
    return backend
