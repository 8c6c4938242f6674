"""The messages of a communicator's isend and irecv, and of torch's process groups.

messages = open_messages(comm, backend)
work = messages.start("send", tensor, 1)
work.wait()
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from communicator.backend import Backend
from communicator.backends.byte_streams import TcpStreams, silent_s
from communicator.calls.async_work import AsyncWork
from communicator.p2p.deferred_p2p import DeferredMessages, Messenger
from communicator.p2p.group_ranks import GroupRanks
from communicator.p2p.p2p_engine import P2PEngine
from communicator.p2p.p2p_messages import Members, P2PGroup
from coordinator import Coordinator


class HostMessages:
    """Messages that move by themselves, over the streams of the backend, or over connections.

    Collective to make where the backend has no streams.
    """

    def __init__(self, backend: Backend) -> None:
        coor, self._backend = backend.coor, backend
        self._group, self.close = _open(coor, coor, backend.streams, backend.timeout_s)

    def start(self, kind: str, tensor: torch.Tensor, peer: int) -> AsyncWork:
        self._group.timeout_s = self._backend.timeout_s
        return self._group.start(kind, tensor, peer, 0)

    def abort(self) -> None:
        """End all with an error, here and later; close() still frees what is open."""
        self._group.is_aborted = True
        self._group.close()


class DeviceMessages:
    """Messages on a device, which start together when one of them is waited for."""

    def __init__(self, comm: Messenger) -> None:
        self._comm, self._deferred = comm, DeferredMessages()

    def start(self, kind: str, tensor: torch.Tensor, peer: int) -> AsyncWork:
        return self._deferred.add(self._comm, kind, tensor, peer, 0)

    def close(self, is_aborting: bool = False) -> None:
        """Nothing is open."""

    abort = close  # the communicator's own calls raise


Messages = HostMessages | DeviceMessages


def open_messages(comm: Messenger, backend: Backend) -> Messages:
    return HostMessages(backend) if backend.device.type == "cpu" else DeviceMessages(comm)


def open_p2p(members: GroupRanks, backend: Backend | None) -> tuple[P2PGroup | None, Close]:
    """The group of all ranks, over the streams of their communicator, or over connections.

    Collective. The caller closes it by the second. No group for a rank alone.
    """
    if members.world_size == 1:
        return None, lambda **_: None
    return _open(members.coordinator(), members, backend and backend.streams)


def _open(
    coor: Coordinator, members: Members, streams: Any, timeout_s: float | None = None
) -> tuple[P2PGroup, Close]:
    connections = None
    if streams is None:
        connections = TcpStreams(coor.connections(timeout_s=timeout_s), silent_s(coor))
    group = P2PEngine(members, connections or streams).all_ranks
    return group, close_at_exit(group, connections)


Close = Callable[..., object]  # is_aborting: without waiting for peers that do not read


def close_at_exit(group: P2PGroup, connections: TcpStreams | None) -> Close:
    """A function that closes these, and lets what was sent come. The process's end does so, too.

    In a forked child it does nothing: another thread may hold the lock for ever.
    """
    pid = os.getpid()

    def close(is_aborting: bool = False, is_at_exit: bool = False) -> None:
        if os.getpid() != pid:
            return
        if is_at_exit:  # others hear of an error only after this
            is_aborting = getattr(sys, "last_value", None) is not None
        is_aborting |= group.is_aborted
        group.close()
        if connections is not None:
            connections.close(None if is_aborting else group.timeout_s)
        atexit.unregister(close)

    if connections is not None:
        atexit.register(close, is_at_exit=True)
    return close
