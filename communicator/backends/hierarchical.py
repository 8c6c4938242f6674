"""Ranks of several nodes: shared memory inside a node, the network between the nodes' leaders.

comm = Communicator(coor, backend="hybrid")     # or by itself, where ranks span nodes
comm.allreduce(torch.ones(4))

A node's leader is its first rank. What is reduced is added up in order of rank inside each node,
and then over the nodes, once, so that every rank has the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from communicator.backends.tagged_p2p import Network
from communicator.backends.tcp import Tcp
from communicator.base import Communicator
from communicator.default_collectives import WIDE
from communicator.errors import CommunicatorError, DrumlineError, Unsupported
from communicator.selection import backend_class
from coordinator import Coordinator

PLACE = re.compile(r"\brank (\d+)\b(?! \(host)")  # with its host, a rank is named as in the launch


class Part:
    """Calls a communicator of some ranks, whose errors then number them as the whole does."""

    def __init__(self, comm: Communicator, ranks: list[int]) -> None:
        self._comm, self._ranks = comm, ranks

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._comm, name)

        def numbered(*values: Any) -> Any:
            try:
                return call(*values)
            except (DrumlineError, ValueError) as error:
                raise type(error)(PLACE.sub(self._of_whole, str(error))) from error

        return numbered

    def _of_whole(self, found: re.Match[str]) -> str:
        place = int(found[1])
        return f"rank {self._ranks[place]}" if place < len(self._ranks) else found[0]


class Hybrid(Communicator):
    """The best communicator of each node, and one of the leaders.

    between: the backend among the leaders, and of sends between ranks of different nodes: tcp if
        not given, or gloo where the ranks have no Coordinator.
    """

    name = "hybrid"
    _takes_empty = True
    _compares_moves = True

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        if len(coor.nodes) in (1, coor.world_size):
            raise Unsupported(
                f"{coor.world_size} ranks on {len(coor.nodes)} nodes: this needs several nodes, "
                "and more than one rank on some"
            )
        return 50

    def _open(self, between: str | None = None) -> None:
        self._under = ExitStack()
        between = between or _network(self.coor)
        if not issubclass(backend_class(between), (Network, Tcp)):
            raise ValueError(
                f"rank {self.rank}: between={between!r} does not reach other nodes by itself. Take "
                "'tcp', 'gloo' or 'mpi'."
            )
        self._nodes = [sorted(node) for node in self.coor.nodes]
        self._node_of = {rank: k for k, node in enumerate(self._nodes) for rank in node}
        self._mine = self._nodes[self._node_of[self.rank]]
        self._failures = self.coor.store("hybrid failures")
        error: DrumlineError | None = None
        try:
            self._join(backend_class(between))
        except DrumlineError as caught:
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
        everyone = network(self.coor, timeout_s=self.timeout_s)
        self._everyone = Part(self._under.enter_context(everyone), list(range(self.world_size)))
        self._inside = self._group_of(Communicator, self._mine)
        self._leaders: Part | None = None
        if self.rank == self._mine[0]:
            self._leaders = self._group_of(network, [node[0] for node in self._nodes])

    def _group_of(self, kind: type[Communicator], ranks: list[int]) -> Part:
        """A communicator of some ranks; they need to agree only to open it."""
        with self.coor.split(ranks) as coor:  # type: ignore[union-attr]  # this rank is among them
            return Part(self._under.enter_context(kind(coor, timeout_s=self.timeout_s)), ranks)

    def _close(self) -> None:
        self._under.close()

    def abort(self) -> None:
        for part in (self._everyone, self._inside, self._leaders):
            if part is not None:
                part.abort()

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

    def _swap_nodes(self, leaders: Part, rows: torch.Tensor) -> torch.Tensor:
        """rows[i, r] goes to rank r from the i-th rank here; what comes is by (i-th here, rank)."""
        here, shape = len(self._mine), rows.shape[2:]
        come = [rows.new_empty((len(node), here, *shape)) for node in self._nodes]
        calls = []
        for k, node in enumerate(self._nodes):
            if node is self._mine:
                come[k].copy_(rows[:, node])
            else:
                calls += [("send", rows[:, node].contiguous(), k), ("recv", come[k], k)]
        leaders._exchange(calls)
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
        with self._all_told(f"send to rank {dst}", is_collective=False):
            if dst in self._mine:
                self._inside.send(tensor, self._mine.index(dst))
            else:
                self._everyone.send(tensor, dst)

    def _recv(self, tensor: torch.Tensor, src: int) -> None:
        with self._all_told(f"recv from rank {src}", is_collective=False):
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
        with self._all_told("group", is_collective=False):
            begun = self._everyone._begin(far)  # moves on while this rank waits for its node
            try:
                self._inside._exchange(near)
            except DrumlineError as error:
                if _is_harmless(error):
                    self._everyone._finish(begun)
                raise
            self._everyone._finish(begun)

    def _give(self, out: torch.Tensor, total: torch.Tensor, op: str) -> None:
        given = torch.view_as_complex(total) if out.is_complex() else total
        out.copy_(given / self.world_size if op == "avg" else given)

    @contextmanager
    def _all_told(self, call: str, is_collective: bool = True) -> Iterator[None]:
        """One that fails leaves all its groups, so that their ranks fail too, and hear why.

        But a message that did not fit was dropped, and leaves nobody out of step.
        """
        try:
            yield
        except Unsupported:
            raise
        except DrumlineError as error:
            if _is_harmless(error) and not is_collective:
                raise
            failure = self._failure(call, error)  # noted before the others hear of it
            self._under.close()
            raise failure from error

    def _failure(self, call: str, error: DrumlineError) -> DrumlineError:
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


def _is_harmless(error: DrumlineError) -> bool:
    """Of a message: is this rank still in step with the others? Only what did not fit is plain."""
    return type(error) is CommunicatorError


def _network(coor: Coordinator) -> str:
    try:
        Tcp.probe(coor)
    except Unsupported:
        return "gloo"
    return "tcp"


def _whole(op: str) -> str:
    """What to do before the last step: an average is divided once, at the end."""
    return "sum" if op == "avg" else op


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """A copy to add up in; small floats in 32 bits, so that they are rounded once.

    Complex numbers as pairs: all backends add those.
    """
    if tensor.is_complex():
        return torch.view_as_real(tensor).clone()
    return tensor.float() if tensor.dtype in WIDE else tensor.clone()
