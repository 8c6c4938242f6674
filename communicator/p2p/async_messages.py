"""The messages of a communicator's isend and irecv, and of torch's process groups.

messages = open_messages(comm, backend)
work = messages.start("send", tensor, 1)
work.wait()
"""

from __future__ import annotations

import torch

from communicator.backend import Backend
from communicator.backends.byte_streams import TcpStreams, silent_s
from communicator.calls.async_work import AsyncWork
from communicator.p2p.deferred_p2p import DeferredMessages, Messenger
from communicator.p2p.group_ranks import GroupRanks
from communicator.p2p.p2p_engine import P2PEngine
from communicator.p2p.p2p_messages import P2PGroup


class HostMessages:
    """Messages that move by themselves, over the streams of the backend, or over connections.

    Collective to make where the backend has no streams.
    """

    def __init__(self, backend: Backend) -> None:
        streams = backend.streams
        self._connections: TcpStreams | None = None
        if streams is None:
            links = backend.coor.connections(timeout_s=backend.timeout_s)
            streams = self._connections = TcpStreams(links, silent_s(backend.coor))
        self._group = P2PEngine(backend.coor, streams).all_ranks
        self._group.timeout_s = backend.timeout_s

    def start(self, kind: str, tensor: torch.Tensor, peer: int) -> AsyncWork:
        return self._group.start(kind, tensor, peer, 0)

    def close(self) -> None:
        self._group.close()
        if self._connections is not None:
            self._connections.close(self._group.timeout_s)


class DeviceMessages:
    """Messages on a device, which start together when one of them is waited for."""

    def __init__(self, comm: Messenger) -> None:
        self._comm, self._deferred = comm, DeferredMessages()

    def start(self, kind: str, tensor: torch.Tensor, peer: int) -> AsyncWork:
        return self._deferred.add(self._comm, kind, tensor, peer, 0)

    def close(self) -> None:
        """Nothing is open."""


Messages = HostMessages | DeviceMessages


def open_messages(comm: Messenger, backend: Backend) -> Messages:
    return HostMessages(backend) if backend.device.type == "cpu" else DeviceMessages(comm)


def open_p2p(
    members: GroupRanks, backend: Backend | None
) -> tuple[P2PGroup | None, TcpStreams | None]:
    """The group of all ranks, over the streams of their communicator, or over these connections.

    Collective. The caller closes first the one and then the other. No group for a rank alone.
    """
    if members.world_size == 1:
        return None, None
    coor = members.coordinator()
    if backend is not None and backend.streams is not None:
        return P2PEngine(members, backend.streams).all_ranks, None
    connections = TcpStreams(coor.connections(), silent_s(coor))
    return P2PEngine(members, connections).all_ranks, connections
