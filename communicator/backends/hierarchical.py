"""Ranks of several nodes: shared memory inside a node, the network between nodes.

comm = Communicator(coor, backend="hierarchical")     # selected where ranks span nodes
comm.allreduce(torch.ones(4))

The first ranks of all nodes are a column, so are the second ones, and so on; on a node with fewer
ranks than the largest, one rank is in several. Each column moves its part of a tensor, so that all
ranks of a node share its network's work. A reduction is done in order of rank inside each node, and
then over the nodes, once, so that every rank has the same bits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import Future, TimeoutError
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from communicator import timings
from communicator.backends.tagged_p2p import TaggedP2PCommunicator
from communicator.backends.tcp import Tcp
from communicator.base import Capabilities, Communicator
from communicator.calls import call_check, programs
from communicator.calls.default_collectives import P2PCall, accumulator
from communicator.calls.failures import describe_lost, report, run_on_all_ranks
from communicator.calls.programs import row
from communicator.calls.scheduled_collectives import SubgroupCollectives
from communicator.calls.schedules import SMALL_NBYTES, Slice, parts
from communicator.errors import CommunicatorError, DrumlineError, PeerLost, Unsupported, with_text
from communicator.selection import backend_class
from coordinator import Coordinator


class Hierarchical(Communicator):
    """The best communicator of each node, and one of all ranks for what goes between nodes.

    between: the backend for that.
    """

    name = "hierarchical"
    capabilities = Capabilities(empty_messages=True, empty_collectives=True, encrypts=True)

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
        network = backend_class(between)
        if not issubclass(network, (TaggedP2PCommunicator, Tcp)):
            raise ValueError(
                f"{self._me}: between={between!r} does not reach other nodes by itself. Take "
                "'tcp', 'gloo' or 'mpi'."
            )
        self._nodes = [sorted(node) for node in self.coor.nodes]
        self._node_of = {rank: k for k, node in enumerate(self._nodes) for rank in node}
        self._node = self._node_of[self.rank]
        self._node_ranks = self._nodes[self._node]
        self._failures = self.coor.store("hierarchical failures")
        try:
            run_on_all_ranks(self.coor, lambda: self._open_parts(network))
        except DrumlineError:
            self.do_close()
            raise

    def _open_parts(self, network: Any) -> None:
        """Open the communicators of all ranks, and of this node."""
        self._network = self._resources.enter_context(network(self.coor, timeout_s=self.timeout_s))
        with self.coor.split(self._node_ranks) as coor:  # type: ignore[union-attr]  # it is in it
            local = Communicator(coor, timeout_s=self.timeout_s)
        self._local = self._resources.enter_context(local)
        self._num_columns = max(map(len, self._nodes))
        place, num_local = self._node_ranks.index(self.rank), len(self._node_ranks)
        self._columns = {
            column: SubgroupCollectives(
                self._network, [node[column % len(node)] for node in self._nodes]
            )
            for column in range(place, self._num_columns, num_local)
        }
        self._leaders = self._columns.get(0)  # None on other ranks than the first of a node

    def do_close(self) -> None:
        self._resources.close()

    def abort(self) -> None:
        self._network.abort()
        self._local.abort()

    def _check_same_call(
        self, call: str, tensor: torch.Tensor | None = None, details: str = ""
    ) -> None:
        """Compare the first calls before anything moves, and later ones by their messages."""
        self._network.collective = "comparison"
        super()._check_same_call(call, tensor, details)
        self._network.collective = call_check.describe_call(call, tensor, details)

    def do_allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        total, op_of_part = _accumulator(tensor), _partial_op(op)
        with self._failing_together("allreduce"):
            if total.nbytes <= SMALL_NBYTES:
                self._local.reduce(total, 0, op_of_part)
                if self._leaders:
                    self._leaders.do_allreduce(total, total, op_of_part)
                self._local.broadcast(total, 0)
            else:
                self._local.allreduce(total, op_of_part)
                for part, column in self._parts(total):
                    column.do_allreduce(part, part, op_of_part)
                self._share_parts(total)
        self._write_result(out, total, op)

    def _pieces(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The piece of the tensor that each column moves."""
        flat = tensor.view(-1)
        return [flat[begin:end] for begin, end in parts(flat.numel(), self._num_columns)]

    def _parts(self, tensor: torch.Tensor) -> list[tuple[torch.Tensor, SubgroupCollectives]]:
        """The pieces that this rank's columns move."""
        pieces = self._pieces(tensor)
        return [(pieces[place], column) for place, column in self._columns.items()]

    def _share_parts(self, tensor: torch.Tensor) -> None:
        """Each rank of this node has the parts of its columns: give them to the others."""
        for place, piece in enumerate(self._pieces(tensor)):
            self._local.broadcast(piece, place % len(self._node_ranks))

    def do_reduce(self, out: torch.Tensor | None, tensor: torch.Tensor, dst: int, op: str) -> None:
        total, node = _accumulator(tensor), self._node_of[dst]
        with self._failing_together("reduce"):
            self._local.reduce(total, 0, _partial_op(op))
            if self._leaders:
                target = total if node == self._node else None
                self._leaders.do_reduce(target, total, node, _partial_op(op))
            if self.rank != dst and self.rank == self._nodes[node][0]:
                self._local.send(total, self._node_ranks.index(dst))
            elif out is not None and not self._leaders:
                self._local.recv(total, 0)
        if out is not None:
            self._write_result(out, total, op)

    def do_reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        total = _accumulator(tensor)
        result = total[self.rank]
        with self._failing_together("reduce_scatter"):
            self._local.allreduce(total, _partial_op(op))
            for place, column in self._columns.items():
                rows = total.new_empty((len(self._nodes), result.numel()))
                is_own = place < len(self._node_ranks)
                column.exchange(
                    total,
                    functools.partial(self._row_in_column, place, result.numel()),
                    rows,
                    functools.partial(row, result.numel() if is_own else 0),
                )
                if is_own:
                    rows[self._node] = result.view(-1)
                    result = column.reduce_parts(rows, _partial_op(op)).view(result.shape)
        self._write_result(out, result, op)

    def _row_in_column(self, place: int, numel: int, node: int) -> Slice:
        """The elements of the row of the node's rank at this place; none if it has fewer ranks."""
        ranks = self._nodes[node]
        return row(numel, ranks[place]) if place < len(ranks) else (0, 0)

    def do_broadcast(self, tensor: torch.Tensor, src: int) -> None:
        node, is_small = self._node_of[src], tensor.nbytes <= SMALL_NBYTES
        with self._failing_together("broadcast"):
            if node == self._node:
                self._local.broadcast(tensor, self._node_ranks.index(src))
            for part, column in [(tensor, self._leaders)] if is_small else self._parts(tensor):
                if column:
                    column.do_broadcast(part, node)
            if node != self._node:
                self._local.broadcast(tensor, 0) if is_small else self._share_parts(tensor)

    def do_allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        with self._failing_together("allgather"):
            out[self._node_ranks] = self._local.allgather(tensor)
            for place, column in self._columns.items():
                of_node = functools.partial(self._row_in_column, place, tensor.numel())
                column.exchange(
                    out, functools.partial(_constant, of_node(self._node)), out, of_node
                )
            for place in range(self._num_columns):
                ranks = [node[place] for node in self._nodes if place < len(node)]
                out[ranks] = self._local.broadcast(out[ranks], place % len(self._node_ranks))

    def do_alltoall(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        program = programs.alltoall(self.rank, self.world_size, tensor.numel(), tensor.itemsize)
        between = program.with_schedules(lambda schedule: schedule.without(self._node_ranks))
        with self._failing_together("alltoall"):
            compiled = self._network.compile_program(between, tensor.itemsize)
            self._network.run_compiled(compiled, tensor, out)
            out[self._node_ranks] = self._local.alltoall(tensor[self._node_ranks])

    def do_barrier(self) -> None:
        with self._failing_together("barrier"):
            self._local.barrier()
            if self._leaders:
                self._leaders.do_barrier()
            self._local.barrier()

    def do_send(self, tensor: torch.Tensor, dst: int) -> None:
        with self._failing_together(f"send to {self.rank_name(dst)}", is_collective=False):
            if dst in self._node_ranks:
                self._local.send(tensor, self._node_ranks.index(dst))
            else:
                self._network.send(tensor, dst)

    def do_recv(self, tensor: torch.Tensor, src: int) -> None:
        with self._failing_together(f"recv from {self.rank_name(src)}", is_collective=False):
            if src in self._node_ranks:
                self._local.recv(tensor, self._node_ranks.index(src))
            else:
                self._network.recv(tensor, src)

    def do_group(self, calls: list[P2PCall]) -> None:
        remote = [call for call in calls if call[2] not in self._node_ranks]
        local = [
            (kind, tensor, self._node_ranks.index(peer))
            for kind, tensor, peer in calls
            if peer in self._node_ranks
        ]
        with self._failing_together("group", is_collective=False):
            pending = self._network.start_group(remote)  # progresses during the local group
            try:
                self._local.do_group(local)
            except DrumlineError as error:
                if _was_dropped(error):
                    self._network.finish_group(pending)
                raise
            self._network.finish_group(pending)

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
        text = f"{self._me} in {call}: {error}"
        first = first_failure(self._failures, text)
        lost = self._await_lost_peers() if isinstance(error, PeerLost) else self._lost_peers()
        if lost:
            report(self.coor, lost[0])
        cause = "" if first == text else f" The first failure: {first}"
        text = (
            f"{self._me} lost its peers in {call} ({self.world_size} ranks on "
            f"{len(self._nodes)} nodes).{describe_lost(lost)} {error}{cause}"
        )
        return PeerLost(text, lost) if isinstance(error, PeerLost) else with_text(error, text)


def first_failure(failures: Any, text: str) -> str:
    """The text that was first written to the store: this one, if there was none.

    Bounded: a store waits without a limit for a process that was stopped, or a link that was cut.
    """
    answer: Future[str] = Future()

    def write() -> None:
        try:
            answer.set_result(failures.compare_set("first", "", text).decode())
        except RuntimeError:
            answer.set_result("unknown, for rank 0, which kept the failures, exited.")

    threading.Thread(target=write, daemon=True).start()
    try:
        return answer.result(timings.TIMINGS.exit_notice_s)
    except TimeoutError:
        return "unknown, for rank 0, which keeps the failures, does not answer."


def _was_dropped(error: DrumlineError) -> bool:
    """True for the error of a message that did not fit: the only plain CommunicatorError."""
    return type(error) is CommunicatorError


def _constant(value: Slice, _: int) -> Slice:
    return value


def _partial_op(op: str) -> str:
    """The op of a step before the last: an average is divided once, at the end."""
    return "sum" if op == "avg" else op


def _accumulator(tensor: torch.Tensor) -> torch.Tensor:
    """A copy to reduce into, complex numbers as pairs: all backends add those."""
    return torch.view_as_real(tensor).clone() if tensor.is_complex() else accumulator(tensor)
