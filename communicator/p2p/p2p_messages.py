"""The messages of p2p_engine.py: their kinds, the works that wait for them, and what has come.

Every message begins with a HEADER, which names its group. What else it holds, and what its receiver
does then:

    MESSAGE  tag, dtype, bytes; the bytes follow    fills the receive that matches, or is buffered
    OFFER    tag, dtype, bytes, number              is kept until a receive matches; then, to it:
    ACCEPT   number, of the offer                   sends DATA
    REFUSE   number, of the offer                   ends its send: the receive was of another size
    DATA     number, of the offer; the bytes follow fills the receive that accepted the offer
    CONFIRM  number: bytes of large MESSAGEs that were received, which may be sent anew
    LEAVE    nothing                                ends the works of the group that wait for it

A work is pending from its start to its end. A send is offered or on its way; a receive is posted,
until a message matches, and then accepted, or being filled.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch

from communicator.calls import call_check
from communicator.calls.async_work import NO_TIMEOUT, AsyncWork
from communicator.calls.failures import dead_peers, describe_lost
from communicator.errors import CommunicatorError, PeerLost
from communicator.p2p.flat_tensors import flattened
from communicator.p2p.group_ranks import GroupRanks
from coordinator import Coordinator, FailureReason, RankFailure

Members = Coordinator | GroupRanks
ANY_SOURCE = -1
HEADER = struct.Struct("<B3xq16sQQQ")  # kind, tag, dtype, bytes, number, group
MESSAGE, OFFER, ACCEPT, REFUSE, DATA, LEAVE, CONFIRM = range(7)
DROPPED_BYTES = 1 << 20  # at a time


class MessageMover(Protocol):
    """The engine, as groups and works need it."""

    def open_group(self, members: GroupRanks, ranks: list[int]) -> P2PGroup: ...
    def start_work(self, work: P2PWork) -> P2PWork: ...
    def wait_for(self, work: P2PWork, timeout_s: float) -> None: ...
    def read_on(self, peer: int) -> None: ...
    def close_group(self, group: P2PGroup) -> None: ...
    def check_group(self, group: P2PGroup) -> None: ...
    def has_died(self, peer: int) -> bool: ...
    def are_gone(self, group: P2PGroup) -> bool: ...


class P2PGroup:
    """Some ranks of an engine, whose messages are apart from those of its other groups.

    ranks: by number in the group, that in the engine. number: no other group of the engine has it.
    """

    def __init__(self, engine: MessageMover, coor: Members, ranks: list[int], number: int) -> None:
        self.engine, self.ranks, self.number = engine, ranks, number
        self.rank, self.peers, self.timeout_s = coor.rank, coor.peers, coor.timeout_s
        self.rank_name = coor.rank_name
        self.gone: set[int] = set()  # those that have closed it
        self.is_closed = self.is_aborted = False

    def start(self, kind: str, tensor: torch.Tensor, peer: int, tag: int) -> P2PWork:
        """Start to "send" to a peer, or to "recv" from one or from ANY_SOURCE."""
        engine_peer = peer if peer == ANY_SOURCE else self.ranks[peer]
        return self.engine.start_work(P2PWork(self.engine, self, kind, tensor, engine_peer, tag))

    def close(self) -> None:
        """End all that is pending with an error. What was sent can still be received."""
        self.engine.close_group(self)

    def check(self) -> None:
        """Raise PeerLost if another rank has gone from the group."""
        self.engine.check_group(self)

    def group_rank(self, engine_rank: int) -> int:
        return self.ranks.index(engine_rank)

    def lost_error(self, rank: int, call: str, why: str) -> PeerLost:
        """The error of a call that another rank of the group has left alone."""
        peer = self.peers[rank]
        dead = {failure.rank: failure for failure in dead_peers(self.peers)}
        reason = FailureReason.EXITED if dead.pop(rank, None) else FailureReason.LEFT
        others = dead.values()  # for which the peer may have left
        return PeerLost(
            f"{self.rank_name()} lost {peer} in {call}: {why}.{describe_lost(others)} Start all "
            "ranks again, and look at what those printed last.",
            (*others, RankFailure(rank, peer, reason, text=why)),
        )


class P2PWork(AsyncWork):
    """A send or receive. peer: the other rank of the engine, or ANY_SOURCE until it has come."""

    def __init__(
        self,
        engine: MessageMover,
        group: P2PGroup,
        kind: str,
        tensor: torch.Tensor,
        peer: int,
        tag: int,
    ) -> None:
        super().__init__([tensor])
        self._engine, self.group = engine, group
        self.kind, self.peer, self.tag = kind, peer, tag
        self._waiting = set[int]()  # threads
        self._flattened = flattened(tensor)
        self.whole = self._flattened.__enter__()
        self.address, self.nbytes = self.whole.data_ptr(), self.whole.nbytes
        self.dtype = str(self.whole.dtype)[6:].encode()

    def __str__(self) -> str:
        is_any = self.peer == ANY_SOURCE
        end = "any source" if is_any else self.group.rank_name(self._source_rank())
        direction = "to" if self.kind == "send" else "from"
        tensor = call_check.describe_tensor(self.whole)
        return f"{self.kind} of {tensor} {direction} {end} (tag {self.tag})"

    def matches(self, arrival: Arrival) -> bool:
        is_of_kind = self.tag == arrival.tag and self.group.number == arrival.group
        return is_of_kind and self.peer in (arrival.src, ANY_SOURCE)

    def mismatch(self, arrival: Arrival) -> CommunicatorError | None:
        """The error of a receive that a message of another size or dtype has met."""
        if (arrival.dtype, arrival.nbytes) == (self.dtype, self.nbytes):
            return None
        dtype = getattr(torch, arrival.dtype.decode())
        sent = f"({arrival.nbytes // dtype.itemsize},) {arrival.dtype.decode()}"
        group = self.group
        return CommunicatorError(
            f"{group.rank_name()}: a message from "
            f"{group.rank_name(group.group_rank(arrival.src))} is {sent}, and met this {self}. It "
            "was dropped, and the tensor left as it was. Receive into a tensor of the size and "
            "dtype that is sent."
        )

    def awaits(self, peer: int) -> bool:
        """True too for a receive from any source that no other peer is left to send."""
        group = self.group
        if self.peer != ANY_SOURCE or peer not in group.ranks:
            return self.peer == peer
        return self._engine.has_died(peer) or self._engine.are_gone(group)

    def is_awaited_from(self, peer: int) -> bool:
        """True if a thread waits for it: behind what else comes from there may be its end."""
        return bool(self._waiting) and self.peer in (peer, ANY_SOURCE)

    def finish(self, error: Exception | None) -> None:
        if self.has_ended():
            return  # its deadline was first
        if error is None and self.kind == "recv":
            with torch.inference_mode():  # so that it may write to any tensor
                self._flattened.__exit__(None, None, None)
        self.end(error)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """True once the tensor was sent or has come. timeout 0: that of the group, from now on."""
        if not self.has_ended():
            self._waiting.add(threading.get_ident())
            try:
                self._engine.wait_for(self, timeout.total_seconds())
            finally:
                self._waiting.discard(threading.get_ident())
        self._result_or_raise()
        return True

    def is_completed(self) -> bool:
        """True once wait() would return or raise at once. Each call reads on if it is too early."""
        if not self.has_ended():
            for peer in self.group.ranks if self.peer == ANY_SOURCE else [self.peer]:
                self._engine.read_on(peer)
        return self.has_ended()

    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait_ended(self, timeout_s: float) -> None:
        """Wait while another thread moves the messages."""
        self._ended.wait(timeout_s)

    def _source_rank(self) -> int:
        return self.group.group_rank(self.peer)


@dataclass
class Packet:
    """Bytes on their way to a peer. work: a send that ends with them."""

    prefix: bytes
    address: int = 0
    nbytes: int = 0
    work: P2PWork | None = None

    def skip(self, nbytes: int) -> bool:
        """Take off what was written; True if that was all."""
        in_prefix = min(nbytes, len(self.prefix))
        self.prefix = self.prefix[in_prefix:]
        self.address += nbytes - in_prefix
        self.nbytes -= nbytes - in_prefix
        return not self.prefix and not self.nbytes


@dataclass(eq=False)
class Arrival:
    """A message for which no receive was posted. data: None if it was only offered."""

    src: int
    tag: int
    dtype: bytes
    nbytes: int
    number: int
    group: int
    data: torch.Tensor | None = None
    is_complete: bool = False
    work: P2PWork | None = None  # the receive that has matched it since

    def buffer(self, incoming: Incoming) -> None:
        """Let its bytes, which come next, be kept here."""
        self.data = torch.empty(self.nbytes, dtype=torch.uint8)
        incoming.expect(self, self.data.data_ptr(), self.nbytes)


class Incoming:
    """The header or payload that is read from a peer now."""

    def __init__(self) -> None:
        self.header, self.unwanted = ctypes.create_string_buffer(HEADER.size), 0
        self.expect_header()

    def expect_header(self) -> None:
        """Expect the next message, once all is dropped that is to be."""
        if self.unwanted:
            return self.drop(self.unwanted)
        self.address, self.left = ctypes.addressof(self.header), HEADER.size
        self.target: P2PWork | Arrival | None = None

    def expect(self, target: P2PWork | Arrival, address: int, nbytes: int) -> None:
        self.target, self.address, self.left = target, address, nbytes

    def advance(self, nbytes: int) -> None:
        self.address += nbytes
        self.left -= nbytes

    def abandon(self, work: P2PWork) -> None:
        """Let what is still to come of a receive that has failed miss its tensor."""
        if self.target is work:
            self.drop(self.left)

    def drop(self, nbytes: int) -> None:
        """Let so much of what comes next be read into one small buffer after another."""
        piece = Arrival(ANY_SOURCE, 0, b"", min(nbytes, DROPPED_BYTES), 0, 0)
        piece.buffer(self)
        self.unwanted = nbytes - piece.nbytes


def message(
    kind: int,
    group: int,
    work: P2PWork | None = None,
    number: int = 0,
    has_payload: bool = False,
) -> Packet:
    """A message of this kind, of a work if it is one of a work's. has_payload: its bytes follow."""
    if work is None:
        return Packet(HEADER.pack(kind, 0, b"", 0, number, group))
    header = HEADER.pack(kind, work.tag, work.dtype, work.nbytes, number, group)
    return Packet(header, work.address, work.nbytes, work) if has_payload else Packet(header)
