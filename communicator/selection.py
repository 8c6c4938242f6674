"""Selection of a backend: the requested one, or the best that every rank can use.

Backends are found by name, here or among the entry points of the group `communicator.backends`
(name -> subclass of Backend). No plugin is imported before it is requested.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import torch

from communicator.backend import Backend
from communicator.errors import WORK_ERRORS, Unsupported
from communicator.own_gpu import as_device, own_ordinal
from coordinator import Coordinator

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
    coor: Coordinator,
    backend: Any,
    device_type: str | None,
    device: torch.device | str | int | None,
    options: Mapping[str, Any],
    check: Callable[[], None],
) -> type[Backend]:
    """The class to use, the same on every rank. Collective over coor.

    device_type, device: whose memory it must move, if that matters. check: raises a mistake in what
    else this rank was given. The other ranks hear of that, and of a wrong device or option.
    Raises Unsupported on every rank if the requested backend cannot be used on one of them.
    """
    if not isinstance(coor, Coordinator):
        raise TypeError(
            f"Communicator({type(coor).__name__}): needs a Coordinator. Communicator.over() takes "
            "a torch ProcessGroup, or a Store."
        )
    candidates = backend_names() if backend is None else [backend]

    def score_all() -> list[Ballot]:
        check()
        own, is_requested = as_device(device), backend is not None
        kind = own.type if own is not None and device_type is None else device_type
        has_gpu = own is not None and own.index is not None
        ballot = {
            _label(item): _score(coor, item, kind, is_requested, has_gpu) for item in candidates
        }
        if is_requested and isinstance(ballot[_label(backend)], int):
            _check_options(coor, _resolve(backend), options)
        return [ballot]

    (ballots,) = _vote(coor, score_all)
    chosen = _best(ballots)
    if chosen is None:
        raise _no_backend(coor, ballots)
    return _resolve(next(item for item in candidates if _label(item) == chosen))


def choose_for_devices(
    coor: Coordinator, device_types: Sequence[str]
) -> dict[str, type[Backend] | None]:
    """The best class for each kind of device, or None, in one exchange. Collective over coor."""

    def score_all() -> list[Ballot]:
        names = backend_names()
        return [{name: _score(coor, name, kind, False) for name in names} for kind in device_types]

    chosen = map(_best, _vote(coor, score_all))
    return {
        kind: None if name is None else _resolve(name)
        for kind, name in zip(device_types, chosen, strict=True)
    }


Ballot = dict[str, int | str]
"""A rank's scores by the labels of candidates, or why it cannot use one."""


def _vote(coor: Coordinator, score_all: Callable[[], list[Ballot]]) -> list[list[Ballot]]:
    """The ballots of all ranks, for each device type that every rank votes on."""
    votes = coor.run_on_all_ranks(score_all, error_class=WORK_ERRORS)
    return [list(ballots) for ballots in zip(*votes, strict=True)]


def _check_options(coor: Coordinator, backend: type[Backend], options: Mapping[str, Any]) -> None:
    """Raise TypeError unless open() of this backend takes these options."""
    try:
        inspect.signature(backend.open).bind(None, **options)
    except TypeError as error:
        raise TypeError(f"{coor.rank_name()}: {_label(backend)}.open() {error}") from None


def _best(ballots: list[Ballot]) -> str | None:
    """The label of the best candidate that every rank can use."""
    usable = {}
    for name in ballots[0]:
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
    coor: Coordinator,
    candidate: Any,
    device_type: str | None,
    is_requested: bool,
    has_gpu: bool = False,
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
