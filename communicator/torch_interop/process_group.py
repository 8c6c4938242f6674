"""A torch.distributed backend over our communicators: existing code runs on them unchanged.

dist.init_process_group("drumline")     # or "cpu:drumline,cuda:drumline"
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from communicator.backends.plugin import PluginBackend
from communicator.calls.async_work import AsyncWork, WorkQueue
from communicator.errors import Unsupported
from communicator.p2p.async_messages import Close, open_p2p
from communicator.p2p.deferred_p2p import DeferredMessages
from communicator.p2p.group_ranks import GroupRanks, meet
from communicator.p2p.p2p_messages import ANY_SOURCE, P2PGroup
from communicator.torch_interop import list_arguments, native_backend
from communicator.torch_interop.group_collectives import DEVICE_TYPES, GroupCollectives
from communicator.torch_interop.lazy_communicators import Chosen, LazyCommunicators
from coordinator import Coordinator, torch_private

NAME = "drumline"
Tensors = list[torch.Tensor]


class Met(NamedTuple):
    """Ranks that have met, and the class for each kind of device where parts take the same.

    num_parts: by name and ranks; torch uses the name of a destroyed group again.
    """

    coor: Coordinator
    chosen: Chosen | None
    num_parts: dict[tuple[str, ...], int]

    def part(self, ranks: Sequence[int], name: str, timeout_s: float) -> GroupRanks:
        """Some of these ranks, by torch's numbers, for a group of this name. Exchanges nothing."""
        key = (name, *map(str, ranks))
        self.num_parts[key] = number = self.num_parts.get(key, 0) + 1
        places = [self.coor.ranks.index(rank) for rank in ranks]
        return GroupRanks(self.coor, places, f"{name}/{number}", timeout_s)


# By a default group of another backend: the ranks of the groups beside it. They stay when such a
# group is destroyed, which each rank may do at another time.
_met_beside: WeakKeyDictionary[Any, list[Met]] = WeakKeyDictionary()


class DrumlineProcessGroup(GroupCollectives):
    """A process group of torch: the best communicator there is for each kind of device.

    On the CPU a collective runs in a thread of the group, unless its caller waits for it at once;
    sends and receives start when they are called. On other devices those are deferred: they start
    together when one of them is waited for, or at the next collective.
    """

    def __init__(
        self,
        ranks: GroupRanks,
        queue: WorkQueue,
        whole: DrumlineProcessGroup | None = None,
        global_ranks: Sequence[int] = (),
        chosen: Chosen | None = None,
    ) -> None:
        """whole: the group of which this one is a part, those ranks. Otherwise this is collective.

        chosen: the class for each kind of device, if all ranks know it already.
        """
        super().__init__(ranks.rank, ranks.world_size)
        self._ranks, self._queue = ranks, queue
        self._comms = LazyCommunicators(ranks, DEVICE_TYPES, chosen)
        self._p2p: P2PGroup | None = None
        self._close_messages: Close = lambda **_: None
        if whole is None:
            self._open_p2p_and_devices()
        else:
            if whole._p2p is not None and ranks.world_size > 1:
                self._p2p = whole._p2p.engine.open_group(ranks, list(global_ranks))
                ranks.check_more = self._p2p.check
            if whole._comms.chosen["cuda"] is not None:  # sends there need all ranks
                self._open_if_any("cuda")
        self._deferred = DeferredMessages()

    @cached_property
    def met(self) -> Met:
        """Facts that a group of some of these ranks need not find out again."""
        # On one node a part can use what the whole does. Elsewhere it may do better.
        coor = self._ranks.coordinator()
        return Met(coor, self._comms.chosen if len(coor.nodes) == 1 else None, {})

    def _open_p2p_and_devices(self) -> None:
        self._open_if_any("cpu")
        self._open_if_any("cuda")
        comm = self._comms.if_opened("cpu")
        self._p2p, self._close_messages = open_p2p(self._ranks, comm and comm._backend)

    def _open_if_any(self, device_type: str) -> None:
        with suppress(Unsupported):
            self._comms.of(device_type)

    # Properties that torch reads.

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    def callable_from_cpp(self) -> Any:
        """The binding of the CPU's communicator if nothing is to be done around its calls."""
        comm = self._comms.if_opened("cpu")
        if comm is None or comm._recorder is not None:
            return None
        backend = comm._backend
        is_compared = backend.capabilities.compares_every_call
        return backend._comm if isinstance(backend, PluginBackend) and is_compared else None

    def split(self, store: dist.Store, ranks: list[int], options: Any) -> Any:
        """The Backend of some ranks of this one; None on others."""
        if self.rank() not in ranks:
            return None
        own_rank, global_ranks = ranks.index(self.rank()), options.global_ranks_in_group
        name, timeout = options.group_name, torch_private.timeout_of(options)
        return _open_backend(store, own_rank, len(ranks), timeout, name, global_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        """Give later calls of this rank another deadline."""
        self._comms.set_timeout(timeout.total_seconds())
        if self._p2p is not None:
            self._p2p.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """End all calls, and close the communicators."""
        self._deferred.start()
        self._queue.close()
        self._close_messages(is_aborting=sys.exc_info()[0] is not None)
        self._close()

    def abort(self) -> None:
        """End all calls with an error, and close the communicators."""
        self._comms.abort()
        self._queue.close(is_waiting=False)
        self._close_messages(is_aborting=True)  # or a peer that does not read delays it
        self._close()

    def _close(self) -> None:
        if self._p2p is not None:
            self._p2p.close()
        self._comms.close()

    # Sends and receives.

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> AsyncWork:
        return self._start_p2p("send", tensors, dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> AsyncWork:
        return self._start_p2p("recv", tensors, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> AsyncWork:
        if tensors and tensors[0].device.type != "cpu":
            raise Unsupported(
                f"{self._ranks.rank_name()}: recv without src: on {tensors[0].device.type} "
                "a communicator hears one rank at a time. Say which, or receive into a tensor on "
                "the CPU."
            )
        return self._start_p2p("recv", tensors, ANY_SOURCE, tag)

    def _start_p2p(self, kind: str, tensors: Tensors, peer: int, tag: int) -> AsyncWork:
        place = self._place(kind)
        tensor = list_arguments.only_item(place, tensors)
        self._check_dense(tensor)
        if kind == "recv":
            list_arguments.check_outputs(place, tensors)
        self._comms.check(tensor.device.type)
        if tensor.device.type == "cpu" and self._p2p is not None:
            return self._p2p.start(kind, tensor, peer, tag)
        return self._deferred.add(self._comms.of(tensor.device.type), kind, tensor, peer, tag)


def create_group(options: Any, _: Any) -> Any:
    place = options.store, options.group_rank, options.group_size
    return _open_backend(*place, options.timeout, options.group_id, options.global_ranks_in_group)


def _open_backend(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    group_name: str,
    global_ranks: list[int],
) -> Any:
    """A torch Backend, or a ProcessGroup where the C++ of the Backend cannot be compiled."""
    native = native_backend.load()
    queue = WorkQueue() if native is None else native.CallQueue(rank)
    whole, timeout_s = _default_group() if global_ranks else None, timeout.total_seconds()
    if whole is not None:
        part = whole.met.part(global_ranks, group_name, timeout_s)
        group = DrumlineProcessGroup(part, queue, whole, global_ranks, whole.met.chosen)
    elif met := _first_with(global_ranks):
        part = met.part(global_ranks, group_name, timeout_s)
        group = DrumlineProcessGroup(part, queue, chosen=met.chosen)
    else:
        coor = meet(store, rank, world_size, timeout_s, global_ranks)
        others = _all_met(global_ranks)
        ranks = GroupRanks(coor, keeps_whole=others is not None)
        group = DrumlineProcessGroup(ranks, queue)
        if others is not None:
            others.append(group.met)
    if native is None:
        return group
    return native.create(group, queue, rank, world_size, timeout, group_name, global_ranks)


def _first_with(global_ranks: list[int]) -> Met | None:
    """The first group in which all of these have met, the same on each of them."""
    ranks = set(global_ranks)
    all_met = _all_met(global_ranks) or []
    return next((met for met in all_met if ranks <= set(met.coor.ranks)), None)


def _all_met(global_ranks: list[int]) -> list[Met] | None:
    """All met ranks beside the default group of torch; None for that group itself."""
    default = dist.group.WORLD
    if default is None or not global_ranks:
        return None
    return _met_beside.setdefault(default, [])


def _default_group() -> DrumlineProcessGroup | None:
    """torch's group of all ranks, of which others are parts, if it is of this backend."""
    default = dist.group.WORLD
    if default is None or isinstance(default, DrumlineProcessGroup):
        return default
    backends = torch_private.backends_of(default)
    return next((backend.group for backend in backends if hasattr(backend, "group")), None)


def _skip_in_dynamo(kind: type) -> None:
    """Have torch.compile run a class's methods, and all that they call, without tracing them.

    torch.compiler.disable does the same, and imports the compiler, which takes seconds.
    """
    methods = (method for method in vars(kind).values() if isinstance(method, FunctionType))
    torch_private.skip_in_dynamo(method.__code__ for method in methods)


_skip_in_dynamo(GroupCollectives)
_skip_in_dynamo(DrumlineProcessGroup)
dist.Backend.register_backend(NAME, create_group, extended_api=True, devices=list(DEVICE_TYPES))
