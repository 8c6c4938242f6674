"""Ranks of several nodes: shared memory inside a node, the network between the nodes' leaders.

comm = Communicator(coor, backend="hierarchical")     # selected where ranks span nodes
comm.allreduce(torch.ones(4))

A node's leader is its first rank. A reduction is done in order of rank inside each node, and then
over the nodes, once, so that every rank has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from communicator.backends.tagged_p2p import TaggedP2PCommunicator
from communicator.backends.tcp import Tcp
from communicator.base import Capabilities, Communicator
from communicator.calls.default_collectives import P2PCall, accumulator
from communicator.calls.failures import describe_lost, report, run_on_all_ranks
from communicator.errors import CommunicatorError, DrumlineError, PeerLost, Unsupported, with_text
from communicator.selection import backend_class
from coordinator import Coordinator


class RenumberedErrors:
    """A communicator of some ranks, whose errors begin with the caller's numbers of those ranks.

    The communicator numbers its ranks from 0, so its own errors name them by other numbers.
    """

    def __init__(self, comm: Communicator, ranks: list[int]) -> None:
        self._comm = comm
        names = ", ".join(f"rank {rank}" for rank in ranks)
        self._context = (
            f"rank {ranks[comm.rank]}, in the subgroup of {names}, numbered from 0 here: "
        )
        if ranks == list(range(len(ranks))):
            self._context = ""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._comm, name)

        def call(*args: Any) -> Any:
            try:
                return method(*args)
            except (DrumlineError, ValueError) as error:
                raise with_text(error, f"{self._context}{error}") from error

        return call


class Hierarchical(Communicator):
    """The best communicator of each node, and one of the leaders.

    between: the backend among the leaders, and of sends between ranks of different nodes.
    """

    name = "hierarchical"
    capabilities = Capabilities(empty_messages=True, empty_collectives=True)

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        if len(coor.nodes) in (1, coor.world_size):
            raise Unsupported(
                f"{coor.world_size} ranks on {len(coor.nodes)} nodes: this needs several nodes, "
                "and more than one rank on some"
            )
        return 50

    def do_open(self, between: str = "tcp") -> None:
        self._resources = ExitStack()
        if not issubclass(backend_class(between), (TaggedP2PCommunicator, Tcp)):
            raise ValueError(
                f"rank {self.rank}: between={between!r} does not reach other nodes by itself. Take "
                "'tcp', 'gloo' or 'mpi'."
            )
        self._nodes = [sorted(node) for node in self.coor.nodes]
        self._node_of = {rank: k for k, node in enumerate(self._nodes) for rank in node}
        self._node_ranks = self._nodes[self._node_of[self.rank]]  # of this rank's node
        self._failures = self.coor.store("hierarchical failures")
        network = backend_class(between)
        try:
            run_on_all_ranks(self.coor, lambda: self._open_subgroups(network))
        except DrumlineError:
            self.do_close()
            raise

    def _open_subgroups(self, network: Any) -> None:
        """Open the groups of all ranks, of this node, and, on a leader, of the leaders."""
        all_ranks = network(self.coor, timeout_s=self.timeout_s)
        self._all_ranks = RenumberedErrors(
            self._resources.enter_context(all_ranks), list(range(self.world_size))
        )
        self._local = self._subgroup(Communicator, self._node_ranks)
        self._leaders: RenumberedErrors | None = None
        if self.rank == self._node_ranks[0]:
            self._leaders = self._subgroup(network, [node[0] for node in self._nodes])

    def _subgroup(self, kind: type[Communicator], ranks: list[int]) -> RenumberedErrors:
        """A communicator of some ranks, whose Coordinator is needed only to open it."""
        with self.coor.split(ranks) as coor:  # type: ignore[union-attr]  # this rank is among them
            return RenumberedErrors(
                self._resources.enter_context(kind(coor, timeout_s=self.timeout_s)), ranks
            )

    def do_close(self) -> None:
        self._resources.close()

    def abort(self) -> None:
        for subgroup in (self._all_ranks, self._local, self._leaders):
            if subgroup is not None:
                subgroup.abort()

    def do_allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        total = _accumulator(tensor)
        with self._failing_together("allreduce"):
            self._local.reduce(total, 0, _partial_op(op))
            if self._leaders:
                self._leaders.allreduce(total, _partial_op(op))
            self._local.broadcast(total, 0)
        self._write_result(out, total, op)

    def do_reduce(self, out: torch.Tensor | None, tensor: torch.Tensor, dst: int, op: str) -> None:
        total, node = _accumulator(tensor), self._node_of[dst]
        with self._failing_together("reduce"):
            self._local.reduce(total, 0, _partial_op(op))
            if self._leaders:
                self._leaders.reduce(total, node, _partial_op(op))
            if self.rank != dst and self.rank == self._nodes[node][0]:
                self._local.send(total, self._node_ranks.index(dst))
            elif out is not None and not self._leaders:
                self._local.recv(total, 0)
        if out is not None:
            self._write_result(out, total, op)

    def do_reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        total = _accumulator(tensor)
        row = torch.empty_like(total[0])
        with self._failing_together("reduce_scatter"):
            self._local.reduce(total, 0, _partial_op(op))
            if self._leaders:
                for k, node in enumerate(self._nodes):
                    rows = total[node]
                    self._leaders.reduce(rows, k, _partial_op(op))
                    if node is self._node_ranks:
                        self._scatter_local(row, rows)
            else:
                self._local.recv(row, 0)
        self._write_result(out, row, op)

    def do_broadcast(self, tensor: torch.Tensor, src: int) -> None:
        is_here = src in self._node_ranks
        with self._failing_together("broadcast"):
            if is_here:
                self._local.broadcast(tensor, self._node_ranks.index(src))
            if self._leaders:
                self._leaders.broadcast(tensor, self._node_of[src])
            if not is_here:
                self._local.broadcast(tensor, 0)

    def do_allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        with self._failing_together("allgather"):
            node_rows = self._local.allgather(tensor)
            if self._leaders:
                for k, node in enumerate(self._nodes):
                    rows = (
                        node_rows if node is self._node_ranks else tensor.new_empty(out[node].shape)
                    )
                    out[node] = self._leaders.broadcast(rows, k)
            self._local.broadcast(out, 0)

    def do_alltoall(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        with self._failing_together("alltoall"):
            if self._leaders:
                rows = self._gather_local(tensor)
                self._scatter_local(out, self._swap_nodes(self._leaders, rows))
            else:
                self._local.send(tensor, 0)
                self._local.recv(out, 0)

    def _gather_local(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of each rank of the node, on the leader: [ranks here, *tensor.shape]."""
        rows = tensor.new_empty((len(self._node_ranks), *tensor.shape))
        rows[0] = tensor
        for local in range(1, len(self._node_ranks)):
            self._local.recv(rows[local], local)
        return rows

    def _scatter_local(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        """Send each rank of the node its row, from the leader."""
        out.copy_(rows[0])
        for local in range(1, len(self._node_ranks)):
            self._local.send(rows[local], local)

    def _swap_nodes(self, leaders: RenumberedErrors, rows: torch.Tensor) -> torch.Tensor:
        """Send rows[i, r] of the i-th rank here to rank r; the result is by [i-th here, src]."""
        num_local, shape = len(self._node_ranks), rows.shape[2:]
        blocks = [rows.new_empty((len(node), num_local, *shape)) for node in self._nodes]
        calls = []
        for k, node in enumerate(self._nodes):
            if node is self._node_ranks:
                blocks[k].copy_(rows[:, node])
            else:
                calls += [("send", rows[:, node].contiguous(), k), ("recv", blocks[k], k)]
        leaders.do_group(calls)
        result = torch.empty_like(rows)
        for node, block in zip(self._nodes, blocks, strict=True):
            result[:, node] = block.transpose(0, 1)
        return result

    def do_barrier(self) -> None:
        with self._failing_together("barrier"):
            self._local.barrier()
            if self._leaders:
                self._leaders.barrier()
            self._local.barrier()

    def do_send(self, tensor: torch.Tensor, dst: int) -> None:
        with self._failing_together(f"send to rank {dst}", is_collective=False):
            if dst in self._node_ranks:
                self._local.send(tensor, self._node_ranks.index(dst))
            else:
                self._all_ranks.send(tensor, dst)

    def do_recv(self, tensor: torch.Tensor, src: int) -> None:
        with self._failing_together(f"recv from rank {src}", is_collective=False):
            if src in self._node_ranks:
                self._local.recv(tensor, self._node_ranks.index(src))
            else:
                self._all_ranks.recv(tensor, src)

    def do_group(self, calls: list[P2PCall]) -> None:
        remote = [call for call in calls if call[2] not in self._node_ranks]
        local = [
            (kind, tensor, self._node_ranks.index(peer))
            for kind, tensor, peer in calls
            if peer in self._node_ranks
        ]
        with self._failing_together("group", is_collective=False):
            pending = self._all_ranks.start_group(remote)  # progresses during the local group
            try:
                self._local.do_group(local)
            except DrumlineError as error:
                if _was_dropped(error):
                    self._all_ranks.finish_group(pending)
                raise
            self._all_ranks.finish_group(pending)

    def _write_result(self, out: torch.Tensor, total: torch.Tensor, op: str) -> None:
        result = torch.view_as_complex(total) if out.is_complex() else total
        out.copy_(result / self.world_size if op == "avg" else result)

    @contextmanager
    def _failing_together(self, call: str, is_collective: bool = True) -> Iterator[None]:
        """Close the subgroups if the call fails, so that their ranks fail too, and read why.

        But a message that did not fit was dropped, which desynchronises no rank.
        """
        try:
            yield
        except Unsupported:
            raise
        except DrumlineError as error:
            if _was_dropped(error) and not is_collective:
                raise
            failure = self._failure(call, error)  # written down before the others fail of it
            self._resources.close()
            raise failure from error

    def _failure(self, call: str, error: DrumlineError) -> DrumlineError:
        """The error, with the lost ranks and the failure that came first on any rank.

        A lost rank is reported: its death may be visible on its own host alone, and rank 0, which
        keeps the first failure, may exit before others have read it.
        """
        text = f"rank {self.rank} in {call}: {error}"
        try:
            first = self._failures.compare_set("first", "", text).decode()
        except RuntimeError:
            first = "unknown, for rank 0, which kept the failures, exited."
        lost = self._await_lost_peers() if isinstance(error, PeerLost) else self._lost_peers()
        if lost:
            report(self.coor, lost[0])
        cause = "" if first == text else f" The first failure: {first}"
        text = (
            f"rank {self.rank} lost its peers in {call} ({self.world_size} ranks on "
            f"{len(self._nodes)} nodes).{describe_lost(lost)} {error}{cause}"
        )
        return PeerLost(text, lost) if isinstance(error, PeerLost) else with_text(error, text)


def _was_dropped(error: DrumlineError) -> bool:
    """True for the error of a message that did not fit: the only plain CommunicatorError."""
    return type(error) is CommunicatorError


def _partial_op(op: str) -> str:
    """The op of a step before the last: an average is divided once, at the end."""
    return "sum" if op == "avg" else op


def _accumulator(tensor: torch.Tensor) -> torch.Tensor:
    """A copy to reduce into, complex numbers as pairs: all backends add those."""
    return torch.view_as_real(tensor).clone() if tensor.is_complex() else accumulator(tensor)
