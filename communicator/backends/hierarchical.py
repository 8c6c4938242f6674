"""Ranks of several nodes: shared memory inside a node, the network between nodes.

comm = Communicator(coor, backend="hierarchical")     # selected where ranks span nodes
comm.allreduce(torch.ones(4))

Column 0 is the first rank of every node, column 1 the second, and so on; on a node with fewer
ranks than the largest, one rank is in several. Each column moves its part of a large tensor, so
that all ranks of a node share its network's work; the first column moves small ones. A reduction is
done in order of rank inside each node, and then over the nodes, once, so that every rank has the
same bits.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from communicator import timings
from communicator.backend import Capabilities
from communicator.backends.scheduled_collectives import (
    NOTHING,
    Buffer,
    ComparedByMessages,
    Slice,
    SubgroupCollectives,
    parts,
    row,
)
from communicator.backends.tagged_p2p import TaggedP2PBackend, as_bytes
from communicator.backends.tcp import Tcp
from communicator.calls.async_work import AsyncWork
from communicator.calls.default_collectives import P2PCall, accumulator
from communicator.calls.dtypes import SMALL_FLOATS
from communicator.calls.failures import describe_late, describe_lost, report
from communicator.communicator import Communicator
from communicator.errors import (
    WORK_ERRORS,
    CommunicatorError,
    CommunicatorTimeout,
    DrumlineError,
    PeerLost,
    Unsupported,
    with_text,
)
from communicator.selection import backend_class
from coordinator import Coordinator, FailureReason

LEADER_NBYTES = 1 << 17  # of a tensor that one rank of each node moves: fewer messages
SEGMENT_NBYTES = 1 << 18
MAX_SEGMENTS = 8
Phase = Callable[[torch.Tensor], None]


class Hierarchical(ComparedByMessages):
    """The best communicator of each node, and one of all ranks for what goes between nodes.

    between: the backend for that.
    """

    name = "hierarchical"
    _network: Any = None  # until it is open
    capabilities = Capabilities(empty_messages=True, empty_collectives=True, encrypts=True)

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        if len(coor.nodes) in (1, coor.world_size):
            raise Unsupported(
                f"{coor.world_size} ranks on {len(coor.nodes)} nodes: this needs several nodes, "
                "and more than one rank on some"
            )
        return 50

    def open(self, between: str = "tcp") -> None:
        self._resources = ExitStack()

        def check_network() -> None:
            if not issubclass(backend_class(between), (TaggedP2PBackend, Tcp)):
                raise ValueError(
                    f"{self._me}: between={between!r} does not reach other nodes by itself. Take "
                    "'tcp', 'gloo' or 'mpi'."
                )

        self.coor.run_on_all_ranks(check_network, error_class=WORK_ERRORS)
        network = backend_class(between)
        self._nodes = tuple(tuple(sorted(node)) for node in self.coor.nodes)
        self._node_of = {rank: k for k, node in enumerate(self._nodes) for rank in node}
        self._node = self._node_of[self.rank]
        self._node_ranks = list(self._nodes[self._node])
        notice_s = timings.TIMINGS.exit_notice_s  # rank 0, which has it, may have stopped
        self._failures = self.coor.store("hierarchical failures", timeout_s=notice_s)
        try:
            self.coor.run_on_all_ranks(lambda: self._open_parts(network), error_class=WORK_ERRORS)
        except DrumlineError:
            self.close()
            raise

    def _open_parts(self, network: Any) -> None:
        """Open the communicators of all ranks, and of this node."""
        self._network = network(self.coor, timeout_s=self.timeout_s)
        self._resources.callback(self._close_network)
        self._network.open()
        with self.coor.split(self._node_ranks) as coor:  # type: ignore[union-attr]  # it is in it
            local = Communicator(coor, timeout_s=self.timeout_s, device_type="cpu")
        self._local = self._resources.enter_context(local)
        self._num_columns = max(map(len, self._nodes))
        place, num_local = self._node_ranks.index(self.rank), len(self._node_ranks)
        self._columns = {
            column: SubgroupCollectives(
                self._network, [node[column % len(node)] for node in self._nodes]
            )
            for column in range(place, self._num_columns, num_local)
        }
        self._everyone = SubgroupCollectives(self._network, range(self.world_size))
        self._leaders = self._columns.get(0)  # None on other ranks than the first of a node
        nodes = sorted(self._node_of.items())
        places = [k * self._num_columns + self._nodes[k].index(rank) for rank, k in nodes]
        self._places = torch.tensor(places)  # of each rank, in rows of nodes

    def close(self) -> None:
        if self._network is not None:
            self._resources.close()

    def _close_network(self) -> None:
        self._network.is_closed = True
        self._network.close()

    def disown(self, error: CommunicatorError) -> None:
        super().disown(error)
        if self._network is not None:
            self._network.disown(error)

    def set_timeout(self, timeout_s: float) -> None:
        super().set_timeout(timeout_s)
        self._network.set_timeout(timeout_s)
        self._local.set_timeout(timeout_s)

    def abort(self) -> None:
        self._network.abort()
        self._local.abort()

    def name_call(self, call: str) -> None:
        self._network.collective = call

    def allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        total, op_of_part = _accumulator(tensor, out), _partial_op(op)

        def reduce_in_node(segment: torch.Tensor) -> None:
            for place, piece in enumerate(self._pieces(segment)):
                self._local.reduce(piece, place % len(self._node_ranks), op_of_part)

        def reduce_between(segment: torch.Tensor) -> None:
            for part, column in self._parts(segment):
                column.allreduce(part, part, op_of_part)

        with self._failing_together("allreduce"):
            if total.nbytes <= LEADER_NBYTES:
                self._local.reduce(total, 0, op_of_part)
                if self._leaders:
                    self._leaders.allreduce(total, total, op_of_part)
                self._local.broadcast(total, 0)
            else:
                self._in_segments(total, reduce_in_node, reduce_between, self._share_parts)
        self._write_result(out, total, op)

    def _in_segments(
        self, tensor: torch.Tensor, before: Phase, between: Phase, after: Phase
    ) -> None:
        """Take each segment of a tensor through three phases, the second one on the network."""
        flat = tensor.view(-1)
        segments = [flat[begin:end] for begin, end in _segments(flat.numel(), flat.itemsize)]
        works = []
        for segment in segments:
            before(segment)
            works.append(self._start(functools.partial(between, segment), tensor.nbytes))
        for segment, work in zip(segments, works, strict=True):
            work.wait()
            after(segment)

    def _start(self, call: Callable[[], object], nbytes: int) -> AsyncWork:
        """Start a call on the network; for so few bytes that a thread costs more, run it."""
        if nbytes < 2 * SEGMENT_NBYTES:
            return AsyncWork([]).run(call)
        return self._network.submit(call)  # type: ignore[no-any-return]

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

    def reduce(self, out: torch.Tensor | None, tensor: torch.Tensor, dst: int, op: str) -> None:
        total, node = _accumulator(tensor), self._node_of[dst]
        with self._failing_together("reduce"):
            self._local.reduce(total, 0, _partial_op(op))
            if self._leaders:
                target = total if node == self._node else None
                self._leaders.reduce(target, total, node, _partial_op(op))
            if self.rank != dst and self.rank == self._nodes[node][0]:
                self._local.send(total, self._node_ranks.index(dst))
            elif out is not None and not self._leaders:
                self._local.recv(total, 0)
        if out is not None:
            self._write_result(out, total, op)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        result = out.view(-1)
        rows = tensor.view(self.world_size, result.numel())
        works = []
        with self._failing_together("reduce_scatter"):
            for begin, end in _segments(result.numel(), rows.nbytes // max(result.numel(), 1)):
                total = _accumulator(rows[:, begin:end].contiguous())
                self._local.allreduce(total, _partial_op(op))
                call = functools.partial(self._reduce_rows, result[begin:end], total, op)
                works.append(self._start(call, rows.nbytes))
            for work in works:
                work.wait()

    def _reduce_rows(self, result: torch.Tensor, total: torch.Tensor, op: str) -> None:
        """Row `rank` of the totals of all nodes, reduced into result."""
        nodes, width = range(len(self._nodes)), result.numel()
        for place, column in self._columns.items():
            rows, is_here = total.new_empty((len(nodes), width)), place < len(self._node_ranks)
            sends = [self._row_of(node, place, width) for node in nodes]
            column.exchange(total, rows, sends, [row(width * is_here, node) for node in nodes])
            if is_here:
                rows[self._node] = total[self.rank]
                self._write_result(result, column.reduce_parts(rows, _partial_op(op)), op)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        tensor, node = as_bytes(tensor), self._node_of[src]

        def give_to_node(segment: torch.Tensor) -> None:
            if node == self._node:
                self._local.broadcast(segment, self._node_ranks.index(src))

        def give_to_nodes(segment: torch.Tensor) -> None:
            for part, column in self._parts(segment):
                column.broadcast(part, node)

        def share(segment: torch.Tensor) -> None:
            if node != self._node:
                self._share_parts(segment)

        with self._failing_together("broadcast"):
            if tensor.nbytes > LEADER_NBYTES:
                return self._in_segments(tensor, give_to_node, give_to_nodes, share)
            give_to_node(tensor)
            if self._leaders:
                self._leaders.broadcast(tensor, node)
            if node != self._node:
                self._local.broadcast(tensor, 0)

    def allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        tensor = as_bytes(tensor)
        out = as_bytes(out).view(self.world_size, tensor.numel())
        if out.nbytes <= LEADER_NBYTES:
            return self._allgather_by_leaders(out, tensor)
        numel, works = tensor.numel(), []
        segments = _segments(numel, tensor.itemsize * self.world_size)
        with self._failing_together("allgather"):
            out[self.rank].copy_(tensor)
            for segment in segments:
                call = functools.partial(self._gather_rows, out, numel, segment)
                works.append(self._start(call, out.nbytes))
            out[self._node_ranks] = self._local.allgather(tensor)
            for segment, work in zip(segments, works, strict=True):
                work.wait()
                self._share_rows(out, numel, segment)

    def _allgather_by_leaders(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Each node's rows at once, with room for as many as the largest node has."""
        rows = tensor.new_zeros(len(self._nodes), self._num_columns, tensor.numel())
        own = rows[self._node]
        with self._failing_together("allgather"):
            own[: len(self._node_ranks)] = self._local.allgather(tensor)
            if self._leaders:
                self._leaders.allgather(rows, own)
            self._local.broadcast(rows, 0)
        torch.index_select(rows.flatten(0, 1), 0, self._places, out=out)

    def _gather_rows(self, out: torch.Tensor, numel: int, segment: Slice) -> None:
        """A segment of the rows of other nodes' ranks, for each column of this rank."""
        for place, column in self._columns.items():
            rows = [self._row_of(node, place, numel) for node in range(len(self._nodes))]
            begin, end = segment
            recvs = [(first + begin, first + end) if last else (0, 0) for first, last in rows]
            column.exchange(out, out, [recvs[self._node]] * len(recvs), recvs, Buffer.OUT)

    def _row_of(self, node: int, place: int, numel: int) -> Slice:
        """The row, of numel elements, of the node's rank at this place; nothing without one."""
        ranks = self._nodes[node]
        return row(numel, ranks[place]) if place < len(ranks) else (0, 0)

    def _share_rows(self, out: torch.Tensor, numel: int, segment: Slice) -> None:
        """Each rank of this node has the rows of its columns: give them to the others."""
        flat = out.view(-1)
        for k, node in enumerate(self._nodes):
            for place, rank in enumerate(node if k != self._node else ()):
                begin, end = (numel * rank + edge for edge in segment)
                self._local.broadcast(flat[begin:end], place % len(self._node_ranks))

    def alltoall(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        out, tensor = (
            as_bytes(rows).view(self.world_size, rows[0].nbytes) for rows in (out, tensor)
        )
        with self._failing_together("alltoall"):
            work = self._start(lambda: self._swap_between(out, tensor), tensor.nbytes)
            out[self._node_ranks] = self._local.alltoall(tensor[self._node_ranks])
            work.wait()

    def _swap_between(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Alltoall among the ranks of different nodes."""
        width, near = out.shape[1], self._node_ranks
        rows = [NOTHING if rank in near else row(width, rank) for rank in range(self.world_size)]
        self._everyone.exchange(tensor, out, rows, rows)

    def barrier(self) -> None:
        with self._failing_together("barrier"):
            self._local.barrier()
            if self._leaders:
                self._leaders.barrier()
            self._local.barrier()

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self._move("send", "to", tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        self._move("recv", "from", tensor, src)

    def _move(self, kind: str, direction: str, tensor: torch.Tensor, peer: int) -> None:
        call = f"{kind} {direction} {self.rank_name(peer)}"
        with self._failing_together(call, is_collective=False):
            if peer in self._node_ranks:
                getattr(self._local, kind)(tensor, self._node_ranks.index(peer))
            else:
                self._network.check_open(kind)
                getattr(self._network, kind)(tensor, peer)

    def group(self, calls: list[P2PCall]) -> None:
        remote = [call for call in calls if call[2] not in self._node_ranks]
        local = [
            (kind, tensor, self._node_ranks.index(peer))
            for kind, tensor, peer in calls
            if peer in self._node_ranks
        ]
        with self._failing_together("group", is_collective=False):
            pending = self._network.start_group(remote)  # progresses during the local group
            try:
                self._local._backend.group(local)
            except DrumlineError as error:
                if _was_dropped(error):
                    self._network.finish_group(pending)
                raise
            self._network.finish_group(pending)

    def _write_result(self, out: torch.Tensor, total: torch.Tensor, op: str) -> None:
        if total is not out or op == "avg":
            out.copy_(total / self.world_size if op == "avg" else total)

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
            if self.rank == 0 and is_collective and isinstance(error, PeerLost):
                self._await_readers(error)
            raise failure from error

    def _failure(self, call: str, error: DrumlineError) -> DrumlineError:
        """The error, with the lost ranks and the failure that came first on any rank.

        A lost rank is reported: its death may be visible on its own host alone.
        """
        text = f"{self._me} in {call}: {error}"
        first = first_failure(self._failures, text, self.rank)
        lost = self._await_lost_peers() if isinstance(error, PeerLost) else self._lost_peers()
        if lost:
            report(self.coor, lost[0])
        cause = "" if first == text else f" The first failure: {first}"
        if isinstance(error, CommunicatorTimeout) and error is not self._network.ended_by:
            cause += describe_late(self.coor)  # the rank that is missing on this node may wait, too
        text = (
            f"{self._me} lost its peers in {call} ({self.world_size} ranks on "
            f"{len(self._nodes)} nodes).{describe_lost(lost)} {error}{cause}"
        )
        return PeerLost(text, lost) if isinstance(error, PeerLost) else with_text(error, text)

    def _await_readers(self, error: PeerLost) -> None:
        """After a link was cut: let the ranks of the other nodes read the first failure.

        For a while. Rank 0 keeps it, and may exit at once.
        """
        lost = [one.rank for one in error.failures if one.reason is FailureReason.UNREACHABLE]
        cut, nodes = {self._node_of[rank] for rank in lost}, self._node_of.items()
        keys = [reader_key(rank) for rank, node in nodes if node not in cut and rank > 0]
        deadline = time.monotonic() + timings.TIMINGS.exit_notice_s
        with suppress(RuntimeError):  # the store is closed
            while cut and keys and not self._failures.check(keys) and time.monotonic() < deadline:
                time.sleep(timings.TIMINGS.exit_poll_s)


def reader_key(rank: int) -> str:
    """Of the store of failures: set once the rank has read the first one."""
    return f"read by {rank}"


def first_failure(failures: Any, text: str, rank: int) -> str:
    """The text that was first written to the store: this one, if there was none."""
    try:
        first: bytes = failures.compare_set("first", "", text)
        with suppress(RuntimeError, TimeoutError):
            failures.set(reader_key(rank), "")
        return first.decode()
    except TimeoutError:
        return "unknown, for rank 0, which keeps the failures, does not answer."
    except RuntimeError:
        return "unknown, for rank 0, which kept the failures, exited."


def _was_dropped(error: DrumlineError) -> bool:
    """True for the error of a message that did not fit: the only plain CommunicatorError."""
    return type(error) is CommunicatorError


def _segments(numel: int, itemsize: int) -> list[Slice]:
    """The elements that are on the network at once."""
    return parts(numel, max(1, min(numel * itemsize // SEGMENT_NBYTES, MAX_SEGMENTS)))


def _partial_op(op: str) -> str:
    """The op of a step before the last: an average is divided once, at the end."""
    return "sum" if op == "avg" else op


def _accumulator(tensor: torch.Tensor, room: torch.Tensor | None = None) -> torch.Tensor:
    """A copy to reduce into. room: for it, if it has the tensor's dtype; may be the tensor."""
    is_small = tensor.dtype in SMALL_FLOATS
    return accumulator(tensor) if room is None or is_small else room.copy_(tensor)
