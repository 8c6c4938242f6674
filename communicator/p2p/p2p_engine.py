"""Sends and receives that start when they are called, and progress by themselves.

group = P2PEngine(coor, streams).all_ranks
work = group.start("recv", tensor, src, tag)
work.wait()

They travel through streams of their own, so no collective delays them. A small message is sent at
once, and buffered where nobody has posted a receive for it. So are the first large ones, until the
receiver confirms that it has received them; further ones are offered, and sent once a receive has
matched them. At most about 16 MiB from a peer are buffered: then nothing more is read from it, in
any group, until some are received, a receive from it is waited for or polled, or it is gone.
A thread that waits moves the messages of all; while none does, one of the engine, asleep until
a stream changes and started by the first message that has to wait. All groups of a process send
through the engine of its default group: a message has the number of its group, and a rank that
leaves a group says so to the others.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict, deque

import torch

from communicator import timings
from communicator.backends.byte_streams import ARM, DISARM, READABLE, WAKE, WRITABLE, ByteStreams
from communicator.errors import CommunicatorError, CommunicatorTimeout, DrumlineError, PeerLost
from communicator.p2p.group_ranks import GroupRanks
from communicator.p2p.p2p_messages import (
    ACCEPT,
    ANY_SOURCE,
    CONFIRM,
    DATA,
    HEADER,
    LEAVE,
    MESSAGE,
    OFFER,
    REFUSE,
    Arrival,
    Incoming,
    Members,
    P2PGroup,
    P2PWork,
    Packet,
    message,
)

LARGE_BYTES = 1 << 15
MAX_UNCONFIRMED_BYTES = 1 << 22  # of large messages that are sent without an offer
MAX_BUFFERED_BYTES = 1 << 24  # from one peer, of messages that nobody has posted a receive for
FOREVER_MS = 2**31 - 1


class P2PEngine:
    """The messages of one rank, on the CPU, in groups of which the first is that of all ranks."""

    def __init__(self, coor: Members, streams: ByteStreams) -> None:
        self._coor, self._streams, self.rank = coor, streams, coor.rank
        self.all_ranks = P2PGroup(self, coor, list(range(coor.world_size)), 0)
        peers = [rank for rank in range(coor.world_size) if rank != coor.rank]
        self._lock = threading.Lock()  # of all that follows
        self._groups, self._closed_groups = {0: self.all_ranks}, set[int]()
        self._early_leaves = defaultdict[int, set[int]](set)  # by group that is not made here yet
        self._pending: dict[P2PWork, None] = {}
        self._posted: list[P2PWork] = []  # receives, of which no message has come
        self._arrivals: list[Arrival] = []
        self._offered: dict[int, P2PWork] = {}  # sends, by number
        self._accepted: dict[tuple[int, int], P2PWork] = {}  # receives, by peer and its number
        self._num_offers = 0
        self._unconfirmed = dict.fromkeys(peers, 0)  # bytes of large messages, by receiver
        self._received = dict.fromkeys(peers, 0)  # bytes of such that are to be confirmed
        self._outgoing: dict[int, deque[Packet]] = {peer: deque() for peer in peers}
        self._incoming = {peer: Incoming() for peer in peers}
        self._buffered = dict.fromkeys(peers, 0)  # bytes of the arrivals
        self._interest = bytearray(READABLE * (rank != coor.rank) for rank in range(len(peers) + 1))
        self._lost, self._living = dict[int, str](), set[int]()  # living when looked at last
        self._driver: int | None = None  # the thread that waits, and so moves the messages
        self._service: threading.Thread | None = None
        self._is_asleep = self._is_closed = False  # asleep: the service has nothing to look after
        self._ended: deque[tuple[P2PWork, Exception | None]] = deque()

    # What groups and works use.

    def open_group(self, members: GroupRanks, ranks: list[int]) -> P2PGroup:
        """A group of some ranks, those of members in order. Not collective."""
        group = P2PGroup(self, members, ranks, members.number)
        with self._lock:
            self._groups[group.number] = group
            group.gone |= self._early_leaves.pop(group.number, set())
        return group

    def start_work(self, work: P2PWork) -> P2PWork:
        group, peer = work.group, work.peer
        with self._lock:
            if group.is_closed:
                me = group.rank_name()
                raise CommunicatorError(f"{me}: {work} on a group that was destroyed or aborted.")
            self._pending[work] = None
            if work.kind == "recv":
                self._start_receive(work)
            elif self._is_gone(group, peer):
                self._end(work, self._lost_error(work.group, peer, work))
            else:
                self._start_send(work)
            self._let_service_watch()
        self._finish_ended()
        return work

    def wait_for(self, work: P2PWork, timeout_s: float) -> None:
        """Return when the work has ended. timeout_s 0: that of the group, which ends it."""
        deadline = time.monotonic() + (timeout_s or work.group.timeout_s)
        while not work.has_ended() and time.monotonic() < deadline:
            if not self._drive(work, deadline):
                work.wait_ended(timings.TIMINGS.liveness_poll_s)
        if work.has_ended():
            return
        error = CommunicatorTimeout(
            f"{work.group.rank_name()} timed out after {timeout_s or work.group.timeout_s:g} s in "
            f"{work}. Does that rank make the matching call? Wait for longer, or give all calls "
            "more time: Communicator(timeout_s=...) or init_process_group(timeout=...)."
        )
        if timeout_s:
            raise error
        with self._lock:
            self._end(work, error)
        self._finish_ended()

    def read_on(self, peer: int) -> None:
        """Read one more message from a peer of which no more is read, as too many are buffered."""
        if self._buffered.get(peer, 0) >= MAX_BUFFERED_BYTES and peer not in self._lost:
            with self._lock:
                self._set_interest(peer, READABLE, True)  # until it is buffered
                self._let_service_watch()
            self._finish_ended()

    def close_group(self, group: P2PGroup) -> None:
        if group is self.all_ranks:
            return self._close()
        with self._lock:
            if group.is_closed:
                return
            self._end_works_of(group)
            self._closed_groups.add(group.number)
            del self._groups[group.number]
            for arrival in [item for item in self._arrivals if item.group == group.number]:
                self._arrivals.remove(arrival)
                arrival.work = None  # or what is still to come of it would be delivered
                if arrival.data is None:
                    group.gone.discard(arrival.src)  # so that it hears the end of its offer
                else:
                    self._confirm(arrival.src, arrival.nbytes)
                    self._set_buffered(arrival.src, -arrival.nbytes)
            for peer in group.ranks:
                if peer != self.rank and not self._is_gone(group, peer):
                    self._send(peer, message(LEAVE, group.number))
            self._let_service_watch()
        self._finish_ended()

    def _end_works_of(self, group: P2PGroup) -> None:
        group.is_closed = True
        for work in [work for work in self._pending if work.group is group]:
            text = f"the group was aborted or was destroyed before the end of this {work}."
            self._end(work, CommunicatorError(f"{group.rank_name()}: {text}"))

    def _close(self) -> None:
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            for group in self._groups.values():
                self._end_works_of(group)
            if is_first:  # or another thread may have closed the streams
                self._streams.stream_notify(WAKE)
        self._finish_ended()
        service, this_thread = self._service, threading.current_thread()
        if not is_first and (this_thread is service or this_thread.ident == self._driver):
            return  # the first closer waits for this thread
        if service is not None and service is not this_thread:
            service.join()
        while self._driver not in (None, this_thread.ident):
            time.sleep(timings.TIMINGS.exit_poll_s)

    # Who moves the messages.

    def _drive(self, work: P2PWork, deadline: float) -> bool:
        """Move all messages until the work has ended; False if another thread does."""
        this_thread, looked_s = threading.get_ident(), time.monotonic()
        with self._lock:
            before = self._driver
            if self._is_closed or before not in (None, this_thread):
                return False
            self._driver = this_thread
            self._streams.stream_notify(DISARM)
        try:
            while not work.has_ended() and (left_s := deadline - time.monotonic()) > 0:
                peer = self._streams.stream_wait(self._interest, _poll_ms(left_s))
                with self._lock:
                    if peer >= 0:
                        self._move(peer)
                    if peer < 0 or time.monotonic() - looked_s > timings.TIMINGS.liveness_poll_s:
                        self._check_peers()
                        looked_s = time.monotonic()
                self._finish_ended()
        finally:
            with self._lock:
                self._driver = before
                self._let_service_watch()
            self._finish_ended()
        return True

    def _let_service_watch(self) -> None:
        """Move what can be moved, and let the service thread move the rest. Unless another does."""
        if self._driver is None:
            self._move_all()
        if self._driver is not None or self._is_closed or not self._has_work():
            return
        self._streams.stream_notify(ARM)
        self._move_all()  # what came before that rang no bell
        if self._service is None:
            self._service = threading.Thread(target=self._serve, daemon=True)
            self._service.start()
        elif self._is_asleep:
            self._is_asleep = False
            self._streams.stream_notify(WAKE)

    def _serve(self) -> None:
        was_idle = False
        while not self._is_closed:
            poll_ms = FOREVER_MS if self._is_asleep else _poll_ms(timings.TIMINGS.liveness_poll_s)
            self._streams.stream_sleep(poll_ms)
            with self._lock:
                if self._driver is None and self._has_work():
                    self._streams.stream_notify(ARM)
                    self._move_all()
                    self._check_peers()
                if not self._has_work():
                    self._streams.stream_notify(DISARM)  # what comes now stays unread
                self._is_asleep = was_idle and not self._has_work()
                was_idle = not self._has_work()
            self._finish_ended()

    def _has_work(self) -> bool:
        return bool(self._pending) or any(self._outgoing.values())

    def _move_all(self) -> None:
        while not self._is_closed and (peer := self._streams.stream_wait(self._interest, 0)) >= 0:
            self._move(peer)

    def _move(self, peer: int) -> None:
        """Move what can be moved to and from a peer."""
        if self._interest[peer] & READABLE:
            self._read(peer)
        self._write(peer)

    def _end(self, work: P2PWork, error: Exception | None = None) -> None:
        self._pending.pop(work, None)
        if error is not None and work in self._posted:
            self._posted.remove(work)
        elif error is not None and work.peer in self._incoming:
            self._incoming[work.peer].abandon(work)
        self._ended.append((work, error))

    def _finish_ended(self) -> None:
        """End the works outside the lock: what is to be done then may start others."""
        while self._ended:
            try:
                work, error = self._ended.popleft()
            except IndexError:  # another thread was faster
                return
            work.finish(error)

    # Sending.

    def _start_send(self, work: P2PWork) -> None:
        is_large = work.nbytes >= LARGE_BYTES
        unconfirmed = self._unconfirmed[work.peer] + work.nbytes * is_large
        if not is_large or unconfirmed <= MAX_UNCONFIRMED_BYTES:
            self._unconfirmed[work.peer] = unconfirmed
            self._send(work.peer, message(MESSAGE, work.group.number, work, has_payload=True))
        else:
            self._num_offers += 1
            self._offered[self._num_offers] = work
            self._send(work.peer, message(OFFER, work.group.number, work, self._num_offers))

    def _send(self, peer: int, packet: Packet) -> None:
        self._outgoing[peer].append(packet)
        self._write(peer)

    def _write(self, peer: int) -> None:
        queue = self._outgoing[peer]
        if peer in self._lost:
            queue.clear()
        while queue:
            packet = queue[0]
            count = self._streams.stream_write(peer, packet.prefix, packet.address, packet.nbytes)
            if not packet.skip(count):
                break
            queue.popleft()
            if packet.work is not None:
                self._end(packet.work)
        self._set_interest(peer, WRITABLE, bool(queue))

    def _set_interest(self, peer: int, bit: int, is_on: bool) -> None:
        bits = self._interest[peer] & ~bit | bit * is_on
        if bits != self._interest[peer]:
            self._interest[peer] = bits
            if self._driver not in (None, threading.get_ident()):
                self._streams.stream_notify(WAKE)  # it waits for what it was interested in before

    # Receiving.

    def _start_receive(self, work: P2PWork) -> None:
        for arrival in self._arrivals:
            if arrival.work is None and work.matches(arrival):
                return self._take(arrival, work)
        group, peer = work.group, work.peer
        if peer == ANY_SOURCE and self.are_gone(group):
            peer = next(other for other in group.ranks if other != self.rank)
        if self._is_gone(group, peer):
            return self._end(work, self._lost_error(group, peer, work))
        self._posted.append(work)

    def _take(self, arrival: Arrival, work: P2PWork) -> None:
        """Give a message that has arrived to the receive that matches it."""
        work.peer = arrival.src
        if arrival.data is None:
            self._arrivals.remove(arrival)
            return self._answer_offer(arrival, work)
        arrival.work = work
        if arrival.is_complete:
            self._deliver(arrival, work, arrival.data)

    def _deliver(self, arrival: Arrival, work: P2PWork, data: torch.Tensor) -> None:
        self._arrivals.remove(arrival)
        self._set_buffered(arrival.src, -arrival.nbytes)
        self._confirm(arrival.src, arrival.nbytes)
        error = work.mismatch(arrival)
        if error is None and work in self._pending:
            ctypes.memmove(work.address, data.data_ptr(), work.nbytes)
        self._end(work, error)

    def _answer_offer(self, offer: Arrival, work: P2PWork) -> None:
        error = work.mismatch(offer)
        if error is not None:
            self._end(work, error)
        else:
            self._accepted[offer.src, offer.number] = work
        kind = ACCEPT if error is None else REFUSE
        self._send(offer.src, message(kind, offer.group, number=offer.number))

    def _confirm(self, src: int, nbytes: int) -> None:
        """Count a message that was received, and let its sender know from time to time."""
        if nbytes < LARGE_BYTES:
            return
        self._received[src] += nbytes
        if self._received[src] >= MAX_UNCONFIRMED_BYTES // 2:
            self._send(src, message(CONFIRM, 0, number=self._received[src]))
            self._received[src] = 0

    def _read(self, peer: int) -> None:
        incoming = self._incoming[peer]
        while self._interest[peer] & READABLE:
            if incoming.left:
                count = self._streams.stream_read(peer, incoming.address, incoming.left)
                if not count:
                    return
                incoming.advance(count)
            if not incoming.left:
                self._handle(peer, incoming)

    def _handle(self, peer: int, incoming: Incoming) -> None:
        """Handle what has come as a whole: a header, or a payload."""
        target = incoming.target
        incoming.expect_header()
        if target is None:
            kind, tag, dtype, nbytes, number, group = HEADER.unpack(incoming.header.raw)
            arrival = Arrival(peer, tag, dtype.rstrip(b"\0"), nbytes, number, group)
            return self._handle_header(kind, arrival, incoming)
        if isinstance(target, P2PWork):
            return self._end(target)
        target.is_complete = True
        if target.work is not None and target.data is not None:
            self._deliver(target, target.work, target.data)

    def _handle_header(self, kind: int, arrival: Arrival, incoming: Incoming) -> None:
        src, number = arrival.src, arrival.number
        if kind == ACCEPT:
            work = self._offered.pop(number)
            self._send(src, message(DATA, arrival.group, work, number, has_payload=True))
        elif kind == REFUSE:
            self._end(self._offered.pop(number))
        elif kind == DATA:
            work = self._accepted.pop((src, number))
            if work in self._pending:
                return incoming.expect(work, work.address, work.nbytes)
            incoming.drop(arrival.nbytes)
        elif kind == CONFIRM:
            self._unconfirmed[src] -= number
        elif kind == LEAVE:
            self._handle_leave(src, arrival.group)
        elif arrival.group not in self._closed_groups:
            self._match(kind, arrival, incoming)
        elif kind == MESSAGE:  # it is skipped; the sender of an offer hears of the end
            self._confirm(src, arrival.nbytes)
            incoming.drop(arrival.nbytes)

    def _match(self, kind: int, arrival: Arrival, incoming: Incoming) -> None:
        """Find the receive for a message or an offer, or keep it."""
        work = next((work for work in self._posted if work.matches(arrival)), None)
        if work is not None:
            self._posted.remove(work)
            work.peer = arrival.src
            if kind == OFFER:
                return self._answer_offer(arrival, work)
            if work.mismatch(arrival) is None:
                self._confirm(arrival.src, arrival.nbytes)
                return incoming.expect(work, work.address, work.nbytes)
        self._arrivals.append(arrival)
        if kind == MESSAGE:
            arrival.work = work
            arrival.buffer(incoming)
            self._set_buffered(arrival.src, arrival.nbytes)

    def _set_buffered(self, peer: int, nbytes: int) -> None:
        """Count bytes that are buffered; of a peer with too many only what is awaited is read."""
        self._buffered[peer] += nbytes
        if peer not in self._lost:
            awaits = (work.is_awaited_from(peer) for work in self._pending)
            has_room = self._buffered[peer] < MAX_BUFFERED_BYTES
            self._set_interest(peer, READABLE, has_room or any(awaits))

    # Peers that have gone.

    def _check_peers(self) -> None:
        """End the works that wait for a peer that has gone, or has died since it had gone."""
        for peer in [peer for peer in self._living if self.has_died(peer)]:
            self._living.remove(peer)
            self._lose(peer, self._lost[peer])
        awaited = {work.peer for work in self._pending}
        peers = self._outgoing if ANY_SOURCE in awaited else awaited
        for peer in set(peers) - self._lost.keys():
            if peer in self._buffered:  # torch allows a receive from this rank itself
                self._set_buffered(peer, 0)  # a message may be awaited only now
            try:
                self._streams.stream_check(peer)
            except DrumlineError as error:
                self._lose(peer, str(error))

    def _lose(self, peer: int, why: str) -> None:
        self._lost[peer] = why
        self._interest[peer] = READABLE
        self._read(peer)  # all that it had sent before, however much is buffered
        self._outgoing[peer].clear()
        self._interest[peer] = 0
        self._arrivals = [item for item in self._arrivals if item.src != peer or item.is_complete]
        self._offered = {key: work for key, work in self._offered.items() if work.peer != peer}
        self._accepted = {key: work for key, work in self._accepted.items() if key[0] != peer}
        if not self.has_died(peer):  # a process closes its streams some time before it is dead
            self._living.add(peer)
        for work in [work for work in self._pending if work.awaits(peer)]:
            self._end(work, self._lost_error(work.group, peer, work))

    def check_group(self, group: P2PGroup) -> None:
        with self._lock:
            self._let_service_watch()
        self._finish_ended()
        for peer in group.ranks:
            if peer != self.rank and self._is_gone(group, peer):
                raise self._lost_error(group, peer, "the first call of a group")

    def _handle_leave(self, peer: int, number: int) -> None:
        group = self._groups.get(number)
        if group is not None:
            group.gone.add(peer)
            for work in [work for work in self._pending if work.group is group]:
                if work.awaits(peer):
                    self._end(work, self._lost_error(work.group, peer, work))
        elif number not in self._closed_groups:
            self._early_leaves[number].add(peer)
        for offer, work in list(self._offered.items()):
            if (work.group.number, work.peer) == (number, peer):
                del self._offered[offer]  # ended above, or when the group was closed here

    def _is_gone(self, group: P2PGroup, peer: int) -> bool:
        return peer in self._lost or peer in group.gone

    def are_gone(self, group: P2PGroup) -> bool:
        """True if no other rank of the group is left."""
        return all(peer == self.rank or self._is_gone(group, peer) for peer in group.ranks)

    def has_died(self, peer: int) -> bool:
        return peer in self._lost and bool(self._coor.peers[peer].is_known_dead())

    def _lost_error(self, group: P2PGroup, peer: int, call: object) -> PeerLost:
        why = self._lost.get(peer, "it has destroyed the group")
        return group.lost_error(group.group_rank(peer), f"{call}", why)


def _poll_ms(left_s: float) -> int:
    return max(1, int(1e3 * min(left_s, timings.TIMINGS.liveness_poll_s)))
