"""Tensors over connections of our own, one between any two ranks, each end proved to the other."""

from __future__ import annotations

import select
import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NoReturn

import torch

from communicator import call_check
from communicator.async_work import Handle, WorkQueue
from communicator.backends.tagged_p2p import as_bytes
from communicator.backends.tensor_socket import Broken, Line, Steps
from communicator.base import Communicator
from communicator.errors import (
    CommunicatorError,
    CommunicatorTimeout,
    DrumlineError,
    PeerLost,
    Unsupported,
)
from coordinator import Coordinator, CoordinatorError

LARGE = 1 << 21  # bytes from which all ranks share the work of an allreduce
KEPT = 1 << 24  # bytes of room that is kept between two of those
ALIGNED = 64
SLICE_S = 0.1  # between looks at whether the peers live
GRACE_S = 0.5  # its sockets close a little before a process that dies is seen dead
POLL_S = 0.005

ENDED = select.POLLERR | select.POLLHUP | select.POLLNVAL  # which come unasked

WAY = {"send": "send to rank", "recv": "recv from rank"}

Call = tuple[str, torch.Tensor, int]
"""As in group(): "send" or "recv", what, and the peer."""


class Lost(Exception):
    """The connection to a peer broke."""

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(why)
        self.peer, self.why = peer, why


class Mismatch(Exception):
    """A peer is in another call, or in this one with another tensor or op."""


class Tcp(Communicator):
    """Sends and receives; all else, but large sums, as the base class makes it of them."""

    name = "tcp"
    _takes_empty = True
    _compares_moves = True

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        if not hasattr(coor, "connections"):
            raise Unsupported("the ranks met in a Store, where they have no secret to prove")
        return 20

    def _open(self) -> None:
        self._failure: DrumlineError | None = None
        self._doing = ""  # the collective under way, of which its messages tell
        self._room = torch.empty(0, dtype=torch.uint8)
        self._queue = WorkQueue()
        links = self.coor.connections(timeout_s=self.timeout_s)
        self._lines = {rank: Line(link) for rank, link in links.items()}

    def _close(self) -> None:
        self._leave(f"rank {self.rank} closed its communicator")
        self._queue.close()
        for line in self._lines.values():
            line.close()

    def abort(self) -> None:
        for line in self._lines.values():
            line.cut()

    def _compare(self, call: str, tensor: torch.Tensor | None = None, how: str = "") -> None:
        """The first calls before anything moves; all, by what the header of each message says."""
        self._doing = "comparison"
        super()._compare(call, tensor, how)
        what = "" if tensor is None else f"of {call_check.describe(tensor)}"
        self._doing = " ".join(filter(None, (call, what, how)))

    def _send(self, tensor: torch.Tensor, dst: int) -> None:
        self._step_on("send", tensor, dst)

    def _recv(self, tensor: torch.Tensor, src: int) -> None:
        self._step_on("recv", tensor, src)

    def _step_on(self, kind: str, tensor: torch.Tensor, peer: int) -> None:
        """A message within a collective: what does not fit leaves the ranks out of step."""
        call = f"{self._doing}, {WAY[kind]}"
        problem = self._go(peer, self._steps(kind, tensor, peer, self._doing), call)
        if problem:
            self._break(Mismatch(problem), call)

    def _post(self, kind: str, tensor: torch.Tensor, peer: int) -> None:
        if self._pending is not None:
            return super()._post(kind, tensor, peer)
        problem = self._go(peer, self._steps(kind, tensor, peer), WAY[kind])
        if problem:
            raise CommunicatorError(problem)

    def _exchange(self, calls: list[Call]) -> None:
        """All calls at once; those of one direction with one peer in their order."""
        ways: dict[tuple[str, int], list[Steps[str]]] = {}
        for kind, tensor, peer in calls:
            ways.setdefault((kind, peer), []).append(self._steps(kind, tensor, peer))
        problem = self._run([(peer, _in_turn(steps)) for (_, peer), steps in ways.items()], "group")
        if problem:
            raise CommunicatorError(problem)

    def _begin(self, calls: list[Call]) -> Handle | None:
        """Start sends and receives, which go on by themselves until _finish waits for them."""
        return self._queue.put(lambda: self._exchange(calls), []) if calls else None

    def _finish(self, begun: Handle | None) -> None:
        if begun is not None:
            begun.wait()

    def _allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        """Large ones of more than two ranks: every rank reduces a part, and gives it to all."""
        if self.world_size == 2 or tensor.nbytes < LARGE:
            return super()._allreduce(out, tensor, op)
        given, made = (each.view(-1).tensor_split(self.world_size) for each in (tensor, out))
        mine = given[self.rank]
        parts = self._room_for_all(mine)
        parts[self.rank] = mine
        self._swap_all(given, parts)
        made[self.rank].copy_(self._total(parts, op))
        self._swap_all([made[self.rank]] * self.world_size, made)

    def _room_for_all(self, like: torch.Tensor) -> list[torch.Tensor]:
        """A tensor for each rank, like this one; kept for the next call unless it is much: pages
        that are new each time cost as much as what they are filled with."""
        nbytes = -(-like.nbytes // ALIGNED) * ALIGNED
        room = self._room
        if room.numel() < nbytes * self.world_size:
            room = torch.empty(nbytes * self.world_size, dtype=torch.uint8)
        if room.numel() <= KEPT:
            self._room = room
        rows = room[: nbytes * self.world_size].view(self.world_size, nbytes)[:, : like.nbytes]
        return [row.view(like.dtype).view(like.shape) for row in rows]

    def _swap_all(self, given: Sequence[torch.Tensor], taken: Sequence[torch.Tensor]) -> None:
        """given[r] to each other rank r, and taken[r] from it."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        ways = [
            (peer, self._steps(kind, tensors[peer], peer, self._doing))
            for kind, tensors in (("send", given), ("recv", taken))
            for peer in others
        ]
        problem = self._run(ways, self._doing)
        if problem:
            self._break(Mismatch(problem), self._doing)

    # One message.

    def _steps(self, kind: str, tensor: torch.Tensor, peer: int, doing: str = "") -> Steps[str]:
        """Send or receive it, in a collective or not; what is wrong, in words, or nothing."""
        is_plain = tensor.dtype is torch.uint8 and tensor.dim() == 1
        data: Any = (tensor.detach() if is_plain else as_bytes(tensor)).numpy()
        text = (doing or call_check.describe(tensor)).encode()
        if kind == "send":
            return self._message_to(peer, text, memoryview(data))
        return self._message_from(peer, text, memoryview(data), bool(doing))

    def _message_to(self, peer: int, text: bytes, data: memoryview) -> Steps[str]:
        yield from self._lines[peer].send(text, data)
        return ""

    def _message_from(
        self, peer: int, text: bytes, data: memoryview, is_collective: bool
    ) -> Steps[str]:
        line = self._lines[peer]
        nbytes, theirs = yield from line.receive_header()
        if theirs == text and nbytes == len(data):
            yield from line.receive_into(data)
            return ""
        yield from line.drop(nbytes)
        said, mine = theirs.decode(), text.decode()
        if is_collective:
            return (
                f"rank {self.rank}: the ranks disagree: this rank asked for {mine}, and rank "
                f"{peer} for {said}. The communicator is at its end, for they are out of step. Let "
                "every rank make the same calls in the same order, with the same shape, dtype and "
                "op, and start all again."
            )
        return (
            f"rank {self.rank}: a message from rank {peer} is {said}, but was to be received as "
            f"{mine}. It was dropped, and the tensor left as it was. Receive into a tensor of the "
            "shape and dtype that is sent."
        )

    def _go(self, peer: int, steps: Steps[str], call: str) -> str:
        """Take the steps of one message: the same as _run, and in less time."""
        if self._failure is not None:
            raise self._failure
        try:
            events = next(steps)  # and often this is all
            deadline = time.monotonic() + self.timeout_s
            while True:
                if not self._lines[peer].wait(events, SLICE_S):
                    self._look_at([peer], deadline)
                events = next(steps)
        except StopIteration as ended:
            return str(ended.value)
        except Broken as broken:
            self._break(Lost(peer, str(broken)), f"{call} {peer}")
        except BaseException as error:
            self._break(error, f"{call} {peer}")

    # Many at once.

    def _run(self, ways: list[tuple[int, Steps[str]]], call: str) -> str:
        """Go every way to its end; what is wrong with the messages, in words, or nothing."""
        if self._failure is not None:
            raise self._failure
        try:
            return self._walk(ways, time.monotonic() + self.timeout_s)
        except BaseException as error:
            self._break(error, call)

    def _walk(self, ways: list[tuple[int, Steps[str]]], deadline: float) -> str:
        """Take steps wherever one can be taken, until all are done."""
        problem = ""
        waiting = [(peer, steps, 0) for peer, steps in ways]
        came: dict[int, int] = {}
        while waiting:
            before, waiting = waiting, []
            for peer, steps, events in before:
                try:
                    if not events or came.get(peer, 0) & (events | ENDED):
                        events = next(steps)
                    waiting.append((peer, steps, events))
                except StopIteration as ended:
                    problem = problem or ended.value
                except Broken as broken:
                    raise Lost(peer, str(broken)) from broken
            if waiting:
                came = self._wait([(peer, events) for peer, _, events in waiting], deadline)
        return problem

    def _wait(self, wanted: list[tuple[int, int]], deadline: float) -> dict[int, int]:
        """The events that came, by peer. Raises TimeoutError, or Lost if one has died."""
        poll = select.poll()
        masks: dict[int, int] = {}
        peers = {}
        for peer, events in wanted:
            masks[peer] = masks.get(peer, 0) | events
            peers[self._lines[peer].fileno()] = peer
            poll.register(self._lines[peer], masks[peer])
        while not (came := poll.poll(SLICE_S * 1e3)):
            self._look_at(masks, deadline)
        return {peers[place]: events for place, events in came}

    def _look_at(self, peers: Iterable[int], deadline: float) -> None:
        """Return if there is still reason to wait for them."""
        if time.monotonic() > deadline:
            raise TimeoutError
        try:
            self.coor.check()
        except CoordinatorError as error:
            raise Lost(next(iter(peers)), str(error)) from error
        for peer in peers:
            if self.coor.peers[peer].is_known_dead():
                raise Lost(peer, "it died")

    # What goes wrong in the middle leaves the ranks out of step, so it ends the communicator.

    def _break(self, error: BaseException, call: str) -> NoReturn:
        self._failure = self._failure or self._describe(error, call)
        self._leave(str(self._failure))
        if isinstance(error, Exception):
            raise self._failure from error
        raise error  # Ctrl-C, say

    def _leave(self, why: str) -> None:
        for line in self._lines.values():
            line.say_goodbye(why)

    def _describe(self, error: BaseException, call: str) -> DrumlineError:
        where = f"{call} (tcp, {self.world_size} ranks)"
        if isinstance(error, TimeoutError):
            return CommunicatorTimeout(
                f"rank {self.rank} waited {self.timeout_s:g} s in {where}.{self._lost_peers()} Are "
                "all ranks alive and in the same call, with tensors of the same size?"
            )
        if isinstance(error, Lost):
            peer, why = self.coor.peers[error.peer], error.why.rstrip(".")
            end = "" if why.endswith("?") else "."
            return PeerLost(
                f"rank {self.rank} lost {peer} in {where}: {why}{end}"
                f"{self._lost_peers_soon()} Start all ranks again, and look at what those printed "
                "last."
            )
        if isinstance(error, Mismatch):
            return CommunicatorError(str(error))
        return CommunicatorError(
            f"rank {self.rank} left {where} in the middle, because of {error!r}. Start over with a "
            "new Communicator."
        )

    def _lost_peers_soon(self) -> str:
        until = time.monotonic() + GRACE_S
        while not (lost := self._lost_peers()) and time.monotonic() < until:
            time.sleep(POLL_S)
        return lost


def _in_turn(messages: list[Steps[str]]) -> Generator[int, None, str]:
    """One after another; the first problem."""
    problem = ""
    for message in messages:
        problem = (yield from message) or problem
    return problem
