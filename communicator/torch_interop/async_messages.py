"""The messages of a communicator's isend and irecv.

messages = open_messages(comm)
work = messages.start("send", tensor, 1)
work.wait()
"""

from __future__ import annotations

import torch

from communicator.backends.byte_streams import TcpStreams
from communicator.base import Communicator
from communicator.calls.async_work import AsyncWork
from communicator.torch_interop.deferred_p2p import DeferredMessages
from communicator.torch_interop.p2p_engine import P2PEngine


class HostMessages:
    """Messages that move by themselves, over the streams of the backend, or over connections.

    Collective to make where the backend has no streams.
    """

    def __init__(self, comm: Communicator) -> None:
        streams = getattr(comm, "streams", None)
        self._connections: TcpStreams | None = None
        if streams is None:
            links = comm.coor.connections(timeout_s=comm.timeout_s)
            streams = self._connections = TcpStreams(links)
        self._group = P2PEngine(comm.coor, streams).all_ranks
        self._group.timeout_s = comm.timeout_s

    def start(self, kind: str, tensor: torch.Tensor, peer: int) -> AsyncWork:
        return self._group.start(kind, tensor, peer, 0)

    def close(self) -> None:
        self._group.close()
        if self._connections is not None:
            self._connections.close()


class DeviceMessages:
    """Messages on a device, which start together when one of them is waited for."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._deferred = comm, DeferredMessages()

    def start(self, kind: str, tensor: torch.Tensor, peer: int) -> AsyncWork:
        return self._deferred.add(self._comm, kind, tensor, peer, 0)

    def close(self) -> None:
        """Nothing is open."""


Messages = HostMessages | DeviceMessages


def open_messages(comm: Communicator) -> Messages:
    return HostMessages(comm) if comm.device.type == "cpu" else DeviceMessages(comm)
