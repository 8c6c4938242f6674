"""Ranks of several nodes: shared memory inside a node, the network between the nodes' leaders.

comm = Communicator(coor, backend="hybrid")     # or by itself, where ranks span nodes
comm.allreduce(torch.ones(4))

A node's leader is its first rank. What is reduced is added up in order of rank inside each node,
and then over the nodes, once, so that every rank has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from communicator.base import WIDE, Communicator
from communicator.choice import backend_class
from communicator.errors import CommunicatorError, Unsupported
from communicator.network import Network
from coordinator import Coordinator


class Hybrid(Communicator):
    """The best communicator of each node, and one of the leaders.

    between: the backend among the leaders, and of sends between ranks of different nodes.
    """

    name = "hybrid"

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        if len(coor.nodes) in (1, coor.world_size):
            raise Unsupported(
                f"{coor.world_size} ranks on {len(coor.nodes)} nodes: this needs several nodes, "
                "and more than one rank on some"
            )
        return 50

    def _open(self, between: str = "gloo") -> None:
        self._under = ExitStack()
        if not issubclass(backend_class(between), Network):
            raise ValueError(
                f"rank {self.rank}: between={between!r} does not reach other nodes by itself. Take "
                "'gloo' or 'mpi'."
            )
        self._nodes = [sorted(node) for node in self.coor.nodes]
        self._node_of = {rank: k for k, node in enumerate(self._nodes) for rank in node}
        self._mine = self._nodes[self._node_of[self.rank]]
        self._failures = self.coor.store("hybrid failures")
        error: CommunicatorError | None = None
        try:
            self._join(backend_class(between))
        except CommunicatorError as caught:
            error = caught
        said = self.coor.allgather(str(error or "").encode())
        if any(said):
            self._close()
            raise error or CommunicatorError(
                f"rank {self.rank}: no hybrid communicator, for a rank could not join one of its "
                f"parts. It says: {max(said).decode()}"
            )

    def _join(self, network: Any) -> None:
        """The three groups this rank may be in: everyone, its node, and the leaders."""
        self._everyone = self._under.enter_context(network(self.coor))
        self._inside = self._under.enter_context(self._group_of(Communicator, self._mine))
        self._leaders: Communicator | None = None
        if self.rank == self._mine[0]:
            leaders = self._group_of(network, [node[0] for node in self._nodes])
            self._leaders = self._under.enter_context(leaders)

    def _group_of(self, kind: type[Communicator], ranks: list[int]) -> Communicator:
        """A communicator of some ranks; they need to agree only to open it."""
        with self.coor.split(ranks) as coor:  # type: ignore[union-attr]  # this rank is among them
            return kind(coor)

    def _close(self) -> None:
        self._under.close()

    def _allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        total = _wide(tensor)
        with self._all_told("allreduce"):
            self._inside.reduce(total, 0, _whole(op))
            if self._leaders:
                self._leaders.allreduce(total, _whole(op))
            self._inside.broadcast(total, 0)
        self._give(out, total, op)

    def _reduce(self, out: torch.Tensor | None, tensor: torch.Tensor, dst: int, op: str) -> None:
        total, node = _wide(tensor), self._node_of[dst]
        with self._all_told("reduce"):
            self._inside.reduce(total, 0, _whole(op))
            if self._leaders:
                self._leaders.reduce(total, node, _whole(op))
            if self.rank != dst and self.rank == self._nodes[node][0]:
                self._inside.send(total, self._mine.index(dst))
            elif out is not None and not self._leaders:
                self._inside.recv(total, 0)
        if out is not None:
            self._give(out, total, op)

    def _reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        total = _wide(tensor)
        row = torch.empty_like(total[0])
        with self._all_told("reduce_scatter"):
            self._inside.reduce(total, 0, _whole(op))
            if self._leaders:
                for k, node in enumerate(self._nodes):
                    rows = total[node]
                    self._leaders.reduce(rows, k, _whole(op))
                    if node is self._mine:
                        self._hand_out(row, rows)
            else:
                self._inside.recv(row, 0)
        self._give(out, row, op)

    def _broadcast(self, tensor: torch.Tensor, src: int) -> None:
        is_here = src in self._mine
        with self._all_told("broadcast"):
            if is_here:
                self._inside.broadcast(tensor, self._mine.index(src))
            if self._leaders:
                self._leaders.broadcast(tensor, self._node_of[src])
            if not is_here:
                self._inside.broadcast(tensor, 0)

    def _allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        with self._all_told("allgather"):
            here = self._inside.allgather(tensor)
            if self._leaders:
                for k, node in enumerate(self._nodes):
                    rows = here if node is self._mine else tensor.new_empty(out[node].shape)
                    out[node] = self._leaders.broadcast(rows, k)
            self._inside.broadcast(out, 0)

    def _alltoall(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        with self._all_told("alltoall"):
            if self._leaders:
                rows = self._collect(tensor)
                self._hand_out(out, self._swap_nodes(self._leaders, rows))
            else:
                self._inside.send(tensor, 0)
                self._inside.recv(out, 0)

    def _collect(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the leader, what each rank of the node has: [here, *tensor.shape]."""
        rows = tensor.new_empty((len(self._mine), *tensor.shape))
        rows[0] = tensor
        for local in range(1, len(self._mine)):
            self._inside.recv(rows[local], local)
        return rows

    def _hand_out(self, mine: torch.Tensor, rows: torch.Tensor) -> None:
        """From the leader, to each rank of the node its row."""
        mine.copy_(rows[0])
        for local in range(1, len(self._mine)):
            self._inside.send(rows[local], local)

    def _swap_nodes(self, leaders: Communicator, rows: torch.Tensor) -> torch.Tensor:
        """rows[i, r] goes to rank r from the i-th rank here; what comes is by (i-th here, rank)."""
        here, shape = len(self._mine), rows.shape[2:]
        come = [rows.new_empty((len(node), here, *shape)) for node in self._nodes]
        with leaders.group():
            for k, node in enumerate(self._nodes):
                if node is self._mine:
                    come[k].copy_(rows[:, node])
                else:
                    leaders.send(rows[:, node].contiguous(), k)
                    leaders.recv(come[k], k)
        found = torch.empty_like(rows)
        for node, block in zip(self._nodes, come, strict=True):
            found[:, node] = block.transpose(0, 1)
        return found

    def _barrier(self) -> None:
        with self._all_told("barrier"):
            self._inside.barrier()
            if self._leaders:
                self._leaders.barrier()
            self._inside.barrier()

    def _send(self, tensor: torch.Tensor, dst: int) -> None:
        with self._all_told(f"send to rank {dst}"):
            if dst in self._mine:
                self._inside.send(tensor, self._mine.index(dst))
            else:
                self._everyone.send(tensor, dst)

    def _recv(self, tensor: torch.Tensor, src: int) -> None:
        with self._all_told(f"recv from rank {src}"):
            if src in self._mine:
                self._inside.recv(tensor, self._mine.index(src))
            else:
                self._everyone.recv(tensor, src)

    def _exchange(self, calls: list[tuple[str, torch.Tensor, int]]) -> None:
        far = [call for call in calls if call[2] not in self._mine]
        near = [
            (kind, tensor, self._mine.index(peer))
            for kind, tensor, peer in calls
            if peer in self._mine
        ]
        with self._all_told("group"):
            begun = self._everyone._begin(far)  # moves on while this rank waits for its node
            self._inside._exchange(near)
            self._everyone._finish(begun)

    def _give(self, out: torch.Tensor, total: torch.Tensor, op: str) -> None:
        out.copy_(total / self.world_size if op == "avg" else total)

    @contextmanager
    def _all_told(self, call: str) -> Iterator[None]:
        """One that fails leaves all its groups, so that their ranks fail too, and hear why."""
        try:
            yield
        except Unsupported:
            raise
        except CommunicatorError as error:
            failure = self._failure(call, error)  # noted before the others hear of it
            self._under.close()
            raise failure from error

    def _failure(self, call: str, error: CommunicatorError) -> CommunicatorError:
        mine = f"rank {self.rank} in {call}: {error}"
        try:
            first = self._failures.compare_set("first", "", mine).decode()
        except RuntimeError:
            first = "rank 0, which kept the ranks' notes, is gone"
        why = "" if first == mine else f" First it was {first}"
        return type(error)(
            f"rank {self.rank} lost its peers in {call} ({self.world_size} ranks on "
            f"{len(self._nodes)} nodes).{self._lost_peers()} {error}{why}"
        )


def _whole(op: str) -> str:
    """What to do before the last step: an average is divided once, at the end."""
    return "sum" if op == "avg" else op


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """A copy to add up in; small floats in 32 bits, so that they are rounded once."""
    return tensor.float() if tensor.dtype in WIDE else tensor.clone()
