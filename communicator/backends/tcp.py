"""Moves tensors over a full mesh of mutually authenticated TCP connections."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from communicator import timings
from communicator.backend import Capabilities
from communicator.backends._tcp import ConnectionEnded, Engine
from communicator.backends.byte_streams import configure, network_failure, silent_s
from communicator.backends.scheduled_collectives import (
    RECV,
    SEND,
    STEP,
    ComparedByMessages,
    ScheduledCollectives,
    StepProgram,
    packed,
)
from communicator.calls import call_check
from communicator.calls.async_work import AsyncWork, WorkQueue
from communicator.calls.checked_calls import CheckedCalls
from communicator.calls.default_collectives import P2PCall
from communicator.calls.dtypes import OPS, Op, dtype_info, op_name
from communicator.calls.failures import describe_late, describe_lost, report
from communicator.errors import CommunicatorError, CommunicatorTimeout, DrumlineError, PeerLost
from coordinator import (
    Coordinator,
    CoordinatorError,
    EncryptedSocket,
    FailureReason,
    RankFailure,
    link_state,
)

LEFT, UNREACHABLE = FailureReason.LEFT, FailureReason.UNREACHABLE
KINDS = {"send": SEND, "recv": RECV}
# The last message of a connection is one of these, and why no other follows.
END_NOTICE, CLOSE_NOTICE = 2**64 - 1, 2**64 - 2
DIRECTION = {"send": "send to", "recv": "recv from"}

CHECK_LINK = "Check the link between the hosts, and start all ranks again."


Dropped = tuple[int, int, bytes, bool]
"""A message that was not what was expected: its sender, the number of its buffer, its text, and
whether all messages of the call moved."""


class ConnectionLost(Exception):
    """The connection to a peer broke."""

    def __init__(
        self,
        peer: int,
        why: str,
        reason: FailureReason | None = None,
        failures: Sequence[RankFailure] = (),
    ) -> None:
        super().__init__(why)
        self.peer, self.why, self.reason, self.failures = peer, why, reason, failures


class DeadlinePassed(TimeoutError):
    """One of these peers did not do in time what was waited for."""

    def __init__(self, peers: Sequence[int]) -> None:
        super().__init__()
        self.peers = peers


class MessageMismatch(Exception):
    """A peer makes another call, or this one with another tensor or op."""


class TcpCalls(CheckedCalls):
    """Calls that the engine takes unchecked if it can do them alone."""

    backend: Tcp

    def straight(self) -> dict[str, Callable[..., Any]]:
        return {"allreduce": self.allreduce, "send": self.send, "recv": self.recv}

    def allreduce(
        self, tensor: torch.Tensor, op: Op = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.backend.try_allreduce(tensor, op, out):
            return tensor if out is None else out
        return super().allreduce(tensor, op, out=out)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        if self.pending is None:
            self._note_peer(dst)
            if self.backend.try_send(tensor, dst):
                return
        super().send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        if self.pending is None:
            self._note_peer(src)
            if self.backend.try_recv(tensor, src):
                return tensor
        return super().recv(tensor, src)


class Tcp(ScheduledCollectives, ComparedByMessages):
    """Messages between any two ranks, and collectives by schedules. Sums are in order of rank.

    The header of every message in a collective names the call, so all calls are compared.
    """

    name = "tcp"
    ended_by: DrumlineError | None = None  # the error of all later calls
    capabilities = Capabilities(empty_messages=True, empty_collectives=True, encrypts=True)

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        return 20

    def open(self) -> None:
        self.peers = packed(range(self.world_size))
        self._queue = WorkQueue()
        self._lost_before: set[int] = set()  # before the last wait for one of these began
        self._silent_s = silent_s(self.coor)
        links = self.coor.connections(timeout_s=self.timeout_s)
        self._remotes = {rank: link_state.remote_host(link) for rank, link in links.items()}
        for link in links.values():
            configure(link, self._silent_s)
        fds, keys = [-1] * self.world_size, [b""] * self.world_size
        for rank, link in links.items():
            if isinstance(link, EncryptedSocket):
                keys[rank] = link.take_keys()
            fds[rank] = link.detach()
        self._fds = {rank: fds[rank] for rank in links}
        self._engine = Engine(self.rank, fds, keys, timings.TIMINGS.liveness_poll_s)

    def close(self) -> None:
        if not hasattr(self, "_engine"):  # it could not connect
            return
        self._end(f"{self._me} closed its communicator", CLOSE_NOTICE)
        self._queue.close()
        self._engine.close()

    def abort(self) -> None:
        self._end(f"{self._me} aborted its communicator")

    def _end(self, why: str, notice: int = END_NOTICE) -> None:
        """Make calls that wait raise, here and on the peers, for this reason."""
        self.ended_by = self.ended_by or CommunicatorError(f"{why}. Make a new one.")
        self._announce_end(why, notice)

    def disown(self, error: CommunicatorError) -> None:
        super().disown(error)
        self.ended_by = self.ended_by or error

    def own_calls(self) -> TcpCalls:
        return TcpCalls(self)

    def name_call(self, call: str) -> None:
        self.collective = call

    # The engine does these alone, or nothing: then they go the way of all calls.

    def try_allreduce(self, tensor: torch.Tensor, op: Op, out: torch.Tensor | None) -> bool:
        """True if the engine could take the tensor as it is, and did the call."""
        if self._num_compared < self.capabilities.checked_calls:
            return False
        dropped = self._try(self._engine.allreduce, tensor, op, out)
        if dropped is not None and dropped is not NotImplemented:
            self._fail_mismatch(dropped, self._describe("allreduce", tensor, op))
        return dropped is None

    def try_send(self, tensor: torch.Tensor, dst: int) -> bool:
        """True if the engine could take the tensor as it is, and sent it."""
        return self._try(self._engine.send, tensor, dst) is None

    def try_recv(self, tensor: torch.Tensor, src: int) -> bool:
        """True if the engine could fill the tensor as it is, and did."""
        dropped = self._try(self._engine.recv, tensor, src)
        if dropped is not None and dropped is not NotImplemented:
            self._raise_dropped(dropped, call_check.describe_tensor(tensor))
        return dropped is None

    def _try(self, call: Any, tensor: torch.Tensor, *arguments: Any) -> Any:
        """Make a call of the engine. None: it is done; NotImplemented: it cannot do it."""
        if self.ended_by is not None:
            return NotImplemented
        try:
            return call(tensor, *arguments, self._check_wait)
        except BaseException as error:
            self._fail(error, self._describe(call.__name__, tensor, arguments[0]))

    def _describe(self, name: str, tensor: torch.Tensor, argument: Any) -> str:
        """A call of the engine. argument: its op, or its peer."""
        if name in DIRECTION:
            return f"{DIRECTION[name]} {self.rank_name(argument)}"
        return call_check.describe_call(name, tensor, op_name(argument))

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        if not self.try_send(tensor, dst):
            self._move("send", tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        if not self.try_recv(tensor, src):
            self._move("recv", tensor, src)

    def _move(self, kind: str, tensor: torch.Tensor, peer: int) -> None:
        self._run_messages([(kind, tensor, peer)], f"{DIRECTION[kind]} {self.rank_name(peer)}")

    def group(self, calls: list[P2PCall]) -> None:
        """All calls at once; those of one direction with one peer in their order."""
        self._run_messages(calls, "group")

    def _run_messages(self, calls: list[P2PCall], call: str) -> None:
        steps = b"".join(
            STEP.pack(KINDS[kind], peer, number, number, 0, 0, tensor.nbytes)
            for number, (kind, tensor, peer) in enumerate(calls)
        )
        texts = [call_check.describe_tensor(tensor) for _, tensor, _ in calls]
        addresses = [tensor.data_ptr() for _, tensor, _ in calls]
        if dropped := self._run_steps(steps, addresses, texts, call):
            self._raise_dropped(dropped, texts[dropped[1]])

    def _raise_dropped(self, dropped: Dropped, expected: str) -> NoReturn:
        peer, _, sent, is_whole = dropped
        problem = (
            f"{self._me}: a message from {self.rank_name(peer)} is {sent.decode()}, but was to "
            f"be received as {expected}. It was dropped, and the tensor left as it was. Receive "
            "into a tensor of the shape and dtype that is sent."
        )
        if is_whole:
            raise CommunicatorError(problem)
        rest = "Not all of the call's messages came to an end, so this communicator is of no use."
        self._fail(MessageMismatch(f"{problem} {rest}"), "")

    def submit(self, call: Callable[[], object]) -> AsyncWork:
        """Start a call, which progresses by itself."""
        return self._queue.submit(call, [])

    def start_group(self, calls: list[P2PCall]) -> AsyncWork | None:
        """Start sends and receives, which progress by themselves until finish_group."""
        return self.submit(lambda: self.group(calls)) if calls else None

    def finish_group(self, pending: AsyncWork | None) -> None:
        """Return when all have ended. Raises CommunicatorError if a message did not fit."""
        if pending is not None:
            pending.wait()

    def run_program(
        self, program: StepProgram, tensor: torch.Tensor, out: torch.Tensor, op: str = ""
    ) -> None:
        steps, scratch_nbytes = program
        addresses, call = (tensor.data_ptr(), out.data_ptr()), self.collective
        numbers = _numbers(tensor.dtype, op) if op else (0, 0)
        if dropped := self._run_steps(steps, addresses, [call], call, scratch_nbytes, *numbers):
            self._fail_mismatch(dropped, call)

    def _fail_mismatch(self, dropped: Dropped, call: str) -> NoReturn:
        peer, _, sent, _ = dropped
        problem = (
            f"{self._me}: the ranks disagree: this rank asked for {call}, and "
            f"{self.rank_name(peer)} for {sent.decode()}. They are desynchronised, so this "
            "communicator cannot be used again. Let every rank make the same calls in the same "
            "order, with the same shape, dtype and op, and start all again."
        )
        self._fail(MessageMismatch(problem), call)

    def _run_steps(
        self,
        steps: bytes,
        addresses: Sequence[int],
        texts: Sequence[str],
        call: str,
        scratch_nbytes: int = 0,
        dtype: int = 0,
        op: int = 0,
    ) -> Dropped | None:
        """Run packed steps; the peer, buffer and text of a message that was dropped."""
        if self.ended_by is not None:
            raise self.ended_by
        encoded = [text.encode() for text in texts]
        try:
            return self._engine.run(
                steps, addresses, encoded, scratch_nbytes, dtype, op, self._check_wait
            )
        except BaseException as error:
            self._fail(error, call)

    def _connection_lost(self, peer: int, notice: int, error: int, text: str) -> ConnectionLost:
        if notice or not error:
            return ConnectionLost(peer, text, LEFT if notice == CLOSE_NOTICE else None)
        with self._link(peer) as link:
            cause = OSError(error, os.strerror(error))
            why = link_state.describe_error(link, self._remotes[peer], cause)
        reason = UNREACHABLE if link_state.is_network_error(cause) else None
        return ConnectionLost(peer, why, reason)

    @contextmanager
    def _link(self, peer: int) -> Iterator[socket.socket]:
        """The connection to a peer, which stays the engine's."""
        link = socket.socket(fileno=self._fds[peer])
        try:
            yield link
        finally:
            link.detach()

    def _check_wait(self, peers: Sequence[int], waited_s: float) -> None:
        """Raise TimeoutError past the deadline, ConnectionLost if waiting has become pointless."""
        if waited_s > self.timeout_s:
            raise DeadlinePassed(peers)
        try:
            self._check_peers(peers, waited_s)
        except ConnectionLost as error:
            if error.peer in self._lost_before:
                raise
            self._lost_before.add(error.peer)  # once more, for what it sent just before its end

    def _check_peers(self, peers: Sequence[int], waited_s: float) -> None:
        try:
            self.coor.check()
        except CoordinatorError as error:
            failures = error.failures if isinstance(error, PeerLost) else ()
            reason = LEFT if failures else None
            raise ConnectionLost(peers[0], str(error), reason, failures) from error
        for peer in peers:
            if waited_s > self._silent_s:
                self._check_network(peer)
            if self.coor.peers[peer].is_known_dead():
                raise ConnectionLost(peer, "it died")

    def _check_network(self, peer: int) -> None:
        """Raise ConnectionLost if its host is silent."""
        with self._link(peer) as link:
            failure = network_failure(link, self._silent_s)
        if failure:
            raise ConnectionLost(peer, failure, UNREACHABLE)

    # A failure within a call desynchronises the ranks, so it ends the communicator.

    def _fail(self, error: BaseException, call: str) -> NoReturn:
        if self.ended_by is None and isinstance(error, ConnectionEnded):
            error = self._connection_lost(*error.args)
        self.ended_by = self.ended_by or self._error_for(error, call)
        self._announce_end(str(self.ended_by))
        if isinstance(error, Exception):
            is_deadline = isinstance(error, TimeoutError)  # which has no more to say
            raise self.ended_by from (None if is_deadline else error)
        raise error  # Ctrl-C, say

    def _announce_end(self, why: str, notice: int = END_NOTICE) -> None:
        self._engine.announce_end(notice, why.encode(errors="replace"))

    def _error_for(self, error: BaseException, call: str) -> DrumlineError:
        where = f"{call} (tcp, {self.world_size} ranks)"
        if isinstance(error, DeadlinePassed):
            return self._timeout_error(where, error.peers)
        if isinstance(error, ConnectionLost):
            return self._lost_error(error, where)
        if isinstance(error, MessageMismatch):
            return CommunicatorError(str(error))
        return CommunicatorError(
            f"{self._me} left {where} in the middle, because of {error!r}. Start over with a "
            "new Communicator."
        )

    def _timeout_error(self, where: str, awaited: Sequence[int]) -> CommunicatorTimeout:
        names = " and ".join(str(self.coor.peers[peer]) for peer in awaited)
        text = f"{self._me} timed out after {self.timeout_s:g} s in {where}"
        text += f", where it waited for {names}" if names else ""
        if network_failure := next(filter(None, map(self._network_failure, self._fds)), ""):
            return CommunicatorTimeout(f"{text}: {network_failure}. {CHECK_LINK}")
        return CommunicatorTimeout(
            f"{text}.{describe_lost(self._lost_peers())} Are all ranks alive and in the same call, "
            f"with tensors of the same size?{describe_late(self.coor)}"
        )

    def _network_failure(self, peer: int) -> str:
        """The network failure under the connection, if there is one; otherwise ""."""
        with self._link(peer) as link:
            return link_state.describe_silence(link, timings.TIMINGS.liveness_poll_s)

    def _lost_error(self, error: ConnectionLost, where: str) -> PeerLost:
        peer, why = self.coor.peers[error.peer], error.why.rstrip(".")
        text = f"{self._me} lost {peer} in {where}: {why}"
        if error.reason is UNREACHABLE:
            unreachable = RankFailure(error.peer, peer, UNREACHABLE, text=f"{peer}, {why}")
            report(self.coor, unreachable)  # which ranks that wait for others hear at once
            return PeerLost(f"{text}. {CHECK_LINK}", (unreachable,))
        lost = self._await_lost_peers()
        failures = error.failures or lost or (RankFailure(error.peer, peer, LEFT, text=why),)
        advice = "Start all ranks again, and look at what those printed last."
        if error.reason is LEFT and {failure.reason for failure in failures} == {LEFT}:
            advice = "It made fewer calls: let all ranks make the same before they close."
        end = "" if why.endswith("?") else "."
        return PeerLost(f"{text}{end}{describe_lost(lost)} {advice}", failures)


def _numbers(dtype: torch.dtype, op: str) -> tuple[int, int]:
    """The comm_dtype and comm_op of a reduction."""
    number = dtype_info(dtype).number
    assert number is not None, f"{dtype} is not reduced"
    return number, OPS[op].nccl
