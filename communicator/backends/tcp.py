"""Tensors over connections of our own, one between any two ranks, each end proved to the other."""

from __future__ import annotations

import select
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from communicator import timings
from communicator.backends.tagged_p2p import as_bytes
from communicator.backends.tensor_socket import (
    CLOSE_NOTICE,
    END_NOTICE,
    SocketClosed,
    Steps,
    TensorSocket,
)
from communicator.base import Capabilities, Communicator
from communicator.calls import call_check
from communicator.calls.async_work import AsyncWork, WorkQueue
from communicator.calls.default_collectives import P2PCall
from communicator.calls.failures import describe_late, describe_lost
from communicator.calls.scheduled_collectives import ScheduledCollectives
from communicator.calls.schedules import PeerSlice, Schedule
from communicator.errors import CommunicatorError, CommunicatorTimeout, DrumlineError, PeerLost
from coordinator import Coordinator, CoordinatorError, FailureReason, RankFailure

LEFT, UNREACHABLE = FailureReason.LEFT, FailureReason.UNREACHABLE
CONNECTION_ENDED = select.POLLERR | select.POLLHUP | select.POLLNVAL  # which poll always reports
DIRECTION = {"send": "send to", "recv": "recv from"}
Transfers = list[tuple[int, Steps[str]]]
"""Messages under way at the same time: the peer of each, and what is left to do for it."""

CHECK_LINK = "Check the link between the hosts, and start all ranks again."


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

    def __init__(self, peers: Iterable[int]) -> None:
        super().__init__()
        self.peers = tuple(peers)


class MessageMismatch(Exception):
    """A peer makes another call, or this one with another tensor or op."""


class Tcp(ScheduledCollectives, Communicator):
    """Messages between any two ranks, and collectives by schedules. Sums are in order of rank.

    The header of every message in a collective names the call, so all calls are compared.
    """

    name = "tcp"
    capabilities = Capabilities(empty_messages=True, empty_collectives=True)

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        return 20

    def do_open(self) -> None:
        self._ended_by: DrumlineError | None = None
        self.collective = ""  # the call in progress, which its messages name
        self._queue = WorkQueue()
        links = self.coor.connections(timeout_s=self.timeout_s)
        self._sockets = {rank: TensorSocket(link) for rank, link in links.items()}

    def do_close(self) -> None:
        self._announce_end(f"{self._me} closed its communicator", CLOSE_NOTICE)
        self._queue.close()
        for peer_socket in self._sockets.values():
            peer_socket.close()

    def abort(self) -> None:
        for peer_socket in self._sockets.values():
            peer_socket.shut_down()

    def _check_same_call(
        self, call: str, tensor: torch.Tensor | None = None, details: str = ""
    ) -> None:
        """Compare the first calls before anything moves, and later ones by their messages."""
        self.collective = "comparison"
        super()._check_same_call(call, tensor, details)
        self.collective = call_check.describe_call(call, tensor, details)

    def do_send(self, tensor: torch.Tensor, dst: int) -> None:
        self._move("send", tensor, dst)

    def do_recv(self, tensor: torch.Tensor, src: int) -> None:
        self._move("recv", tensor, src)

    def _move(self, kind: str, tensor: torch.Tensor, peer: int) -> None:
        problem = self._run(peer, self._steps(kind, tensor, peer), DIRECTION[kind])
        if problem:
            raise CommunicatorError(problem)

    def do_group(self, calls: list[P2PCall]) -> None:
        """All calls at once; those of one direction with one peer in their order."""
        transfers: dict[tuple[str, int], list[Steps[str]]] = {}
        for kind, tensor, peer in calls:
            transfers.setdefault((kind, peer), []).append(self._steps(kind, tensor, peer))
        messages = [(peer, _one_after_another(steps)) for (_, peer), steps in transfers.items()]
        problem = self._run_all([messages], "group")
        if problem:
            raise CommunicatorError(problem)

    def start_group(self, calls: list[P2PCall]) -> AsyncWork | None:
        """Start sends and receives, which progress by themselves until finish_group."""
        return self._queue.submit(lambda: self.do_group(calls), []) if calls else None

    def finish_group(self, pending: AsyncWork | None) -> None:
        """Return when all have ended. Raises CommunicatorError if a message did not fit."""
        if pending is not None:
            pending.wait()

    def run_schedule(self, schedule: Schedule, source: torch.Tensor, target: torch.Tensor) -> None:
        """Run the rounds, which send from source and receive into target, both flat."""
        rounds = (
            [self._transfer("send", source, send) for send in one_round.sends]
            + [self._transfer("recv", target, recv) for recv in one_round.recvs]
            for one_round in schedule.rounds
        )
        problem = self._run_all(rounds, self.collective, schedule.window)
        if problem:
            self._fail(MessageMismatch(problem), self.collective)

    def _transfer(
        self, kind: str, flat: torch.Tensor, transfer: PeerSlice
    ) -> tuple[int, Steps[str]]:
        piece = flat[transfer.begin : transfer.end]
        return transfer.peer, self._steps(kind, piece, transfer.peer, self.collective)

    # One message.

    def _steps(
        self, kind: str, tensor: torch.Tensor, peer: int, collective: str = ""
    ) -> Steps[str]:
        """Send or receive it, in a collective or not; what is wrong with the message, or ""."""
        is_plain = tensor.dtype is torch.uint8 and tensor.dim() == 1
        data: Any = (tensor.detach() if is_plain else as_bytes(tensor)).numpy()
        text = (collective or call_check.describe_tensor(tensor)).encode()
        if kind == "send":
            return self._message_to(peer, text, memoryview(data))
        return self._message_from(peer, text, memoryview(data), bool(collective))

    def _message_to(self, peer: int, text: bytes, data: memoryview) -> Steps[str]:
        yield from self._sockets[peer].send(text, data)
        return ""

    def _message_from(
        self, peer: int, text: bytes, data: memoryview, is_collective: bool
    ) -> Steps[str]:
        peer_socket = self._sockets[peer]
        nbytes, sent_text = yield from peer_socket.receive_header()
        if sent_text == text and nbytes == len(data):
            yield from peer_socket.receive_into(data)
            return ""
        yield from peer_socket.drop(nbytes)
        sent, expected = sent_text.decode(), text.decode()
        if is_collective:
            return (
                f"{self._me}: the ranks disagree: this rank asked for {expected}, and "
                f"{self.rank_name(peer)} for {sent}. They are desynchronised, so this communicator "
                "cannot be used again. Let every rank make the same calls in the same order, with "
                "the same shape, dtype and op, and start all again."
            )
        return (
            f"{self._me}: a message from {self.rank_name(peer)} is {sent}, but was to be received "
            f"as {expected}. It was dropped, and the tensor left as it was. Receive into a tensor "
            "of the shape and dtype that is sent."
        )

    def _run(self, peer: int, steps: Steps[str], call: str) -> str:
        """Take the steps of one message: the same as _run_all, and in less time."""
        if self._ended_by is not None:
            raise self._ended_by
        try:
            events = next(steps)  # and often this is all
            deadline = time.monotonic() + self.timeout_s
            while True:
                if not self._sockets[peer].wait(events, timings.TIMINGS.liveness_poll_s):
                    self._check_wait([peer], deadline)
                events = next(steps)
        except StopIteration as ended:
            return str(ended.value)
        except SocketClosed as broken:
            lost = ConnectionLost(peer, str(broken), broken.reason)
            self._fail(lost, f"{call} {self.rank_name(peer)}")
        except BaseException as error:
            self._fail(error, f"{call} {self.rank_name(peer)}")

    # Many at once.

    def _run_all(self, rounds: Iterable[Transfers], call: str, window: int = 1) -> str:
        """Take the steps of all messages; what is wrong with the first wrong one, or ""."""
        if self._ended_by is not None:
            raise self._ended_by
        try:
            return self._step_all(iter(rounds), window, time.monotonic() + self.timeout_s)
        except BaseException as error:
            self._fail(error, call)

    def _step_all(self, rounds: Iterator[Transfers], window: int, deadline: float) -> str:
        """Take steps wherever one can be taken, until all are done."""
        problem = ""
        waiting: list[tuple[int, Steps[str], int, Counter[str]]] = []
        unfinished: list[Counter[str]] = []  # the rounds under way
        while True:
            while len(unfinished) < window and (transfers := next(rounds, None)) is not None:
                left = Counter(messages=len(transfers))
                unfinished.append(left)
                waiting += [(peer, steps, 0, left) for peer, steps in transfers]
            if not waiting:
                return problem
            is_new = any(not events for _, _, events, _ in waiting)
            try:
                came = {} if is_new else self._poll(waiting, deadline)
            except (TimeoutError, ConnectionLost):
                if problem:  # which is the reason
                    return problem
                raise
            before, waiting = waiting, []
            for peer, steps, events, left in before:
                try:
                    if not events or came.get(peer, 0) & (events | CONNECTION_ENDED):
                        events = next(steps)
                    waiting.append((peer, steps, events, left))
                except StopIteration as ended:
                    problem = problem or ended.value
                    left["messages"] -= 1
                except SocketClosed as broken:
                    if problem:
                        return problem
                    raise ConnectionLost(peer, str(broken), broken.reason) from broken
            while unfinished and not unfinished[0].total():
                del unfinished[0]

    def _poll(self, waiting: Iterable[tuple[Any, ...]], deadline: float) -> dict[int, int]:
        """The events that came, by peer. Raises TimeoutError, or ConnectionLost if one died."""
        poll = select.poll()
        masks: dict[int, int] = {}
        peers = {}
        for peer, _, events, _ in waiting:
            masks[peer] = masks.get(peer, 0) | events
            peers[self._sockets[peer].fileno()] = peer
            poll.register(self._sockets[peer], masks[peer])
        while not (came := poll.poll(timings.TIMINGS.liveness_poll_s * 1e3)):
            self._check_wait(masks, deadline)
        return {peers[place]: events for place, events in came}

    def _check_wait(self, peers: Iterable[int], deadline: float) -> None:
        """Raise TimeoutError past the deadline, ConnectionLost if waiting has become pointless."""
        if time.monotonic() > deadline:
            raise DeadlinePassed(peers)
        try:
            self.coor.check()
        except CoordinatorError as error:
            failures = error.failures if isinstance(error, PeerLost) else ()
            reason = LEFT if failures else None
            raise ConnectionLost(next(iter(peers)), str(error), reason, failures) from error
        for peer in peers:
            if self.coor.peers[peer].is_known_dead():
                raise ConnectionLost(peer, "it died")

    # A failure within a call desynchronises the ranks, so it ends the communicator.

    def _fail(self, error: BaseException, call: str) -> NoReturn:
        self._ended_by = self._ended_by or self._error_for(error, call)
        self._announce_end(str(self._ended_by))
        if isinstance(error, Exception):
            is_deadline = isinstance(error, TimeoutError)  # which has no more to say
            raise self._ended_by from (None if is_deadline else error)
        raise error  # Ctrl-C, say

    def _announce_end(self, why: str, notice: int = END_NOTICE) -> None:
        for peer_socket in self._sockets.values():
            peer_socket.announce_end(why, notice)

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
        failures = (peer_socket.network_failure() for peer_socket in self._sockets.values())
        if network_failure := next(filter(None, failures), ""):
            return CommunicatorTimeout(f"{text}: {network_failure}. {CHECK_LINK}")
        return CommunicatorTimeout(
            f"{text}.{describe_lost(self._lost_peers())} Are all ranks alive and in the same call, "
            f"with tensors of the same size?{describe_late(self.coor)}"
        )

    def _lost_error(self, error: ConnectionLost, where: str) -> PeerLost:
        peer, why = self.coor.peers[error.peer], error.why.rstrip(".")
        text = f"{self._me} lost {peer} in {where}: {why}"
        if error.reason is UNREACHABLE:
            unreachable = RankFailure(error.peer, peer, UNREACHABLE, text=f"{peer}, {why}")
            return PeerLost(f"{text}. {CHECK_LINK}", (unreachable,))
        lost = self._await_lost_peers()
        failures = error.failures or lost or (RankFailure(error.peer, peer, LEFT, text=why),)
        advice = "Start all ranks again, and look at what those printed last."
        if error.reason is LEFT and {failure.reason for failure in failures} == {LEFT}:
            advice = "It made fewer calls: let all ranks make the same before they close."
        end = "" if why.endswith("?") else "."
        return PeerLost(f"{text}{end}{describe_lost(lost)} {advice}", failures)


def _one_after_another(messages: list[Steps[str]]) -> Generator[int, None, str]:
    """The steps of all messages; the first problem."""
    problem = ""
    for message in messages:
        problem = (yield from message) or problem
    return problem
