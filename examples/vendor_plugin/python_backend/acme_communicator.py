"""A backend in Python: tensors through sockets, one for each pair of ranks.

comm = Communicator(coor, backend="acme")  # found through the entry point in pyproject.toml
"""

import socket

import torch

from communicator import Backend, CommunicatorTimeout, PeerLost, Unsupported
from coordinator import Coordinator


class Acme(Backend):
    """Only send and recv; every collective is inherited and works on top of them."""

    name = "acme"

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        if coor.local_world_size != coor.world_size:
            raise Unsupported("acme connects the ranks of one node only")
        return 1

    def open(self) -> None:
        self._sockets: dict[int, socket.socket] = {}
        listener = socket.create_server(("127.0.0.1", 0), backlog=self.world_size)
        listener.settimeout(self.timeout_s)
        ports = self.coor.allgather(str(listener.getsockname()[1]).encode())
        for peer in range(self.rank):
            connection = socket.create_connection(("127.0.0.1", int(ports[peer])), self.timeout_s)
            connection.sendall(self.rank.to_bytes(4, "little"))
            self._sockets[peer] = connection
        while len(self._sockets) < self.world_size - 1:
            connection, _ = listener.accept()
            connection.settimeout(self.timeout_s)
            peer = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")
            self._sockets[peer] = connection
        listener.close()

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        try:
            self._sockets[dst].sendall(_memory(tensor))
        except TimeoutError as error:
            raise CommunicatorTimeout(f"rank {self.rank}: rank {dst} does not receive") from error
        except OSError as error:
            raise PeerLost(f"rank {self.rank}: rank {dst} is gone") from error

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        room = _memory(tensor)
        try:
            while room:
                received = self._sockets[src].recv_into(room)
                if received == 0:
                    raise PeerLost(f"rank {self.rank}: rank {src} has left")
                room = room[received:]
        except TimeoutError as error:
            raise CommunicatorTimeout(f"rank {self.rank}: rank {src} does not send") from error
        except OSError as error:
            raise PeerLost(f"rank {self.rank}: rank {src} is gone") from error


def _memory(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
