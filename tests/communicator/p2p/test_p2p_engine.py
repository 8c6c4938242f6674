"""Messages over both kinds of streams: shared memory, and connections."""

import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from communicator import Communicator, CommunicatorError, PeerLost
from communicator.backends.byte_streams import READABLE, WAKE, TcpStreams, silent_s
from communicator.errors import CommunicatorTimeout, DrumlineError
from communicator.p2p.p2p_engine import MAX_BUFFERED_BYTES, MAX_UNCONFIRMED_BYTES, P2PEngine
from communicator.p2p.p2p_messages import (
    ANY_SOURCE,
    DROPPED_BYTES,
    HEADER,
    MESSAGE,
    Incoming,
    P2PWork,
    Packet,
    message,
)
from coordinator import Coordinator
from coordinator.peers import start_ticks

WORLD = 3
LARGE = 300_000


@pytest.fixture(params=["shm", "tcp"])
def engines(request):
    """Call engines(fn): fn(engine) on each rank, a thread; what they return."""

    def run(fn):
        store, found = HashStore(), {}

        def rank_of(rank):
            coor = Coordinator.over(store, rank, WORLD, timeout_s=20.0)
            comm = Communicator(coor, "shm") if request.param == "shm" else None
            own = comm and comm._backend.streams
            streams = own or TcpStreams(coor.connections(), silent_s(coor))
            engine = P2PEngine(coor, streams).all_ranks
            try:
                found[rank] = fn(engine)
            except Exception as error:
                found[rank] = error
            engine.close()
            (comm or streams).close()
            coor.close()

        threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in found.values():
            if isinstance(result, Exception):
                raise result
        return [found[rank] for rank in range(WORLD)]

    return run


def pair_of(engine):
    """The group of ranks 2 and 1, in this order."""
    ranks = [2, 1]
    coor = SimpleNamespace(
        rank=ranks.index(engine.rank),
        peers=[engine.peers[number] for number in ranks],
        timeout_s=20.0,
        rank_name=lambda rank=None: f"rank {engine.rank if rank is None else ranks[rank]}",
        number=7,
    )
    return engine.engine.open_group(coor, ranks)


def wait_until(is_so, group):
    """Move messages until it is so."""
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        with suppress(PeerLost):
            group.check()
        time.sleep(0.001)


def test_large_messages_go_around_the_ring_while_receives_are_posted_behind_them(engines):
    def body(engine):
        following, before = (engine.rank + 1) % WORLD, (engine.rank - 1) % WORLD
        parts = [torch.full((LARGE,), float(10 * engine.rank + i)) for i in range(4)]
        came = [torch.zeros(LARGE) for _ in parts]
        works = [engine.start("recv", tensor, before, i) for i, tensor in enumerate(came)]
        works += [engine.start("send", tensor, following, i) for i, tensor in enumerate(parts)]
        for work in reversed(works):
            work.wait()
        return [tensor.unique().tolist() for tensor in came]

    for rank, came in enumerate(engines(body)):
        assert came == [[10.0 * ((rank - 1) % WORLD) + i] for i in range(4)]


def test_any_source_takes_each_message_once(engines):
    def body(engine):
        if engine.rank:
            tensors = [torch.full((size,), float(engine.rank)) for size in (1, LARGE)]
            works = [engine.start("send", tensor, 0, tensor.numel()) for tensor in tensors]
            for work in works:
                work.wait()
            return None
        found = []
        for size in (LARGE, LARGE, 1, 1):
            tensor = torch.zeros(size)
            work = engine.start("recv", tensor, ANY_SOURCE, size)
            work.wait()
            assert tensor.eq(work._source_rank()).all()
            found.append((size, work._source_rank()))
        return sorted(found)

    assert engines(body)[0] == [(1, 1), (1, 2), (LARGE, 1), (LARGE, 2)]


def test_what_a_rank_sent_before_it_left_comes_and_then_it_is_lost(engines):
    def body(engine):
        if engine.rank == 1:
            engine.start("send", torch.ones(3), 0, 0).wait()
            return
        if engine.rank == 0:
            came = torch.zeros(3)
            engine.start("recv", came, 1, 0).wait()
            assert came.eq(1).all()
            with pytest.raises(PeerLost, match=r"rank 1 .* in recv of \(3,\) float32 from rank 1"):
                engine.start("recv", came, 1, 0).wait()
            engine.start("send", torch.ones(1), 2, 0).wait()
        else:
            engine.start("recv", torch.zeros(1), 0, 0).wait()

    engines(body)


def test_what_a_rank_had_only_offered_before_it_left_is_forgotten(engines):
    def body(engine):
        if engine.rank == 2:
            return
        peer = 1 - engine.rank
        sent = engine.start("send", torch.ones(MAX_UNCONFIRMED_BYTES), peer, 0)
        assert engine.engine._offered
        wait_until(lambda: engine.engine._arrivals, engine)
        if engine.rank == 0:
            engine.start("send", torch.ones(1), 1, 1).wait()
            with pytest.raises(PeerLost, match="in send"):
                sent.wait()
            assert not engine.engine._offered
            with pytest.raises(PeerLost, match="in recv"):
                engine.start("recv", torch.ones(MAX_UNCONFIRMED_BYTES), 1, 0).wait()
        else:
            engine.start("recv", torch.ones(1), 0, 1).wait()

    engines(body)


def test_receive_from_any_source_hears_of_a_death_once_and_then_of_the_others(engines):
    process = subprocess.Popen(["true"])

    def body(engine):
        if engine.rank == 0:
            peers = list(engine.peers)
            peers[1] = replace(peers[1], pid=process.pid, start_ticks=1)
            engine.peers = engine.engine._coor.peers = tuple(peers)
            came = torch.zeros(1)
            with pytest.raises(PeerLost, match=r"lost rank 1 .* in recv .* from any source"):
                engine.start("recv", came, ANY_SOURCE, 0).wait()
            engine.start("send", came, 2, 0).wait()
            work = engine.start("recv", came, ANY_SOURCE, 0)
            assert work.wait() and work._source_rank() == 2
            with pytest.raises(PeerLost, match=r"lost rank [12] .* in recv .* from any source"):
                engine.start("recv", came, ANY_SOURCE, 0).wait()
        elif engine.rank == 2:
            engine.start("recv", torch.zeros(1), 0, 0).wait()
            engine.start("send", torch.zeros(1), 0, 0).wait()

    process.wait()
    engines(body)


def test_receive_from_any_source_hears_of_a_death_that_is_seen_after_the_end_of_the_streams(
    engines,
):
    """It was asked for once, at that end, and the receive waited for its deadline."""
    process = subprocess.Popen(["sleep", "60"])
    ticks, is_over = start_ticks(process.pid), threading.Event()

    def body(engine):
        if engine.rank == 0:
            peers = list(engine.peers)
            peers[1] = replace(peers[1], pid=process.pid, start_ticks=ticks)
            engine.peers = engine.engine._coor.peers = tuple(peers)
            work = engine.start("recv", torch.zeros(1), ANY_SOURCE, 0)
            while 1 not in engine.engine._lost:
                time.sleep(0.01)
            assert not work.is_completed()
            process.kill()
            process.wait()
            with pytest.raises(PeerLost, match=r"lost rank 1 .* in recv .* from any source"):
                work.wait()
            is_over.set()
        elif engine.rank == 2:
            assert is_over.wait(20)

    engines(body)


def test_a_rank_that_left_because_another_died_is_lost_with_that_one_named_first(engines):
    process = subprocess.Popen(["true"])

    def body(engine):
        if engine.rank == 0:
            peers = list(engine.peers)
            peers[2] = replace(peers[2], pid=process.pid, start_ticks=1)
            engine.peers = tuple(peers)
            with pytest.raises(
                PeerLost, match=rf"lost rank 1 .* Lost: rank 2 .*{process.pid}"
            ) as e:
                engine.start("recv", torch.zeros(1), 1, 0).wait()
            assert [failure.rank for failure in e.value.failures] == [2, 1]

    process.wait()
    engines(body)


def test_close_ends_what_is_pending(engines):
    all_ended = threading.Barrier(WORLD)  # a peer that closes its streams sooner is lost

    def body(engine):
        work = engine.start("recv", torch.zeros(3), (engine.rank + 1) % WORLD, 0)
        engine.close()
        with pytest.raises(CommunicatorError, match="destroyed before the end of this recv"):
            work.wait()
        with pytest.raises(CommunicatorError, match="group that was destroyed"):
            engine.start("send", torch.zeros(3), (engine.rank + 1) % WORLD, 0)
        all_ended.wait(20)

    engines(body)


def test_messages_of_a_group_match_its_receives_alone_until_a_rank_leaves_it(engines):
    def body(engine):
        if engine.rank == 0:
            return None
        pair = pair_of(engine)
        if pair.rank == 1:
            for group, value in ((pair, 1.0), (engine, 2.0)):
                group.start("send", torch.full((LARGE,), value), group.ranks.index(2), 7)
            pair.start("send", torch.ones(5), 0, 8).wait()
            engine.start("recv", torch.zeros(1), 2, 9).wait()
            pair.close()
            engine.start("send", torch.ones(1), 2, 9).wait()
            engine.start("recv", torch.zeros(1), 2, 10).wait()
            return None
        came = torch.zeros(LARGE)
        engine.start("recv", came, 1, 7).wait()
        assert came.eq(2).all()
        work = pair.start("recv", came, ANY_SOURCE, 7)
        assert work.wait() and work._source_rank() == 1 and came.eq(1).all()
        pending = pair.start("recv", came, ANY_SOURCE, 7)
        engine.start("send", torch.ones(1), 1, 9).wait()
        with pytest.raises(PeerLost, match=r"rank 2 lost rank 1 .*it has destroyed the group"):
            pending.wait()
        pair.start("recv", torch.zeros(5), 1, 8).wait()  # sent before it left
        with pytest.raises(PeerLost, match="destroyed the group"):
            pair.start("send", torch.ones(1), 1, 7).wait()
        with pytest.raises(PeerLost, match=r"in recv .* from any source .*destroyed the group"):
            pair.start("recv", torch.zeros(1), ANY_SOURCE, 7).wait()
        engine.start("recv", torch.zeros(1), 1, 9).wait()
        pair.close()
        engine.start("send", torch.ones(1), 1, 10).wait()
        return None

    engines(body)


def test_rest_of_a_message_is_dropped_if_its_group_was_closed_meanwhile(engines):
    is_closed = threading.Event()

    def body(engine):
        if engine.rank == 0:
            return
        pair, tensor = pair_of(engine), torch.ones(2)
        if engine.rank == 1:
            work = P2PWork(engine.engine, pair, "send", tensor, 2, 7)
            header = message(MESSAGE, pair.number, work).prefix
            for packet in (Packet(header, work.address, 4), Packet(b"", work.address + 4, 4)):
                with engine.engine._lock:
                    engine.engine._outgoing[2].append(packet)
                    engine.engine._write(2)
                assert is_closed.wait(20)
            engine.start("send", tensor, 2, 9).wait()
            return
        wait_until(lambda: engine.engine._arrivals, engine)
        work = pair.start("recv", torch.zeros(2), 1, 7)
        pair.close()
        is_closed.set()
        with pytest.raises(CommunicatorError, match="destroyed"):
            work.wait()
        engine.start("recv", tensor, 1, 9).wait()
        assert engine.engine._buffered[1] == 0

    engines(body)


@pytest.mark.parametrize("first", ["receive", "message", "offer"])
def test_tensor_whose_receive_timed_out_stays_as_it_was(engines, first):
    is_posted, has_ended = threading.Event(), threading.Event()
    size = MAX_UNCONFIRMED_BYTES if first == "offer" else 2

    def send(engine):
        tensor, mover = torch.ones(size), engine.engine
        if first == "offer":
            work = engine.start("send", tensor, 2, 7)
            with mover._lock:  # so that it does not hear that it is accepted
                is_posted.set()
                assert has_ended.wait(20)
            work.wait()
            return
        assert first == "message" or is_posted.wait(20)
        work = P2PWork(mover, engine, "send", tensor, 2, 7)
        header = message(MESSAGE, engine.number, work).prefix
        for packet in (Packet(header, work.address, 4), Packet(b"", work.address + 4, 4)):
            with mover._lock:
                mover._outgoing[2].append(packet)
                mover._write(2)
            assert has_ended.wait(20)

    def receive(engine):
        tensor, mover = torch.zeros(size), engine.engine
        if first != "receive":
            wait_until(lambda: mover._arrivals, engine)
            assert first == "message" or is_posted.wait(20)
        work = engine.start("recv", tensor, 1, 7)
        is_posted.set()
        if first == "receive":
            wait_until(lambda: tensor[0] == 1, engine)
        engine.timeout_s = 0.2
        with pytest.raises(CommunicatorTimeout):
            work.wait()
        engine.timeout_s = 20.0
        has_ended.set()
        engine.start("recv", torch.ones(1), 1, 9).wait()
        assert tensor[1] == 0
        assert not any(map(torch.is_tensor, vars(mover._incoming[1]).values()))

    def body(engine):
        if engine.rank == 1:
            send(engine)
            engine.start("send", torch.ones(1), 2, 9).wait()
        elif engine.rank == 2:
            receive(engine)

    engines(body)


@pytest.mark.parametrize("first", [1, 2])
def test_offer_that_nobody_accepts_is_forgotten_when_both_have_left(engines, first):
    has_closed = {1: threading.Event(), 2: threading.Event()}
    has_offered = threading.Event()

    def body(engine):
        if engine.rank == 0:
            assert has_offered.wait(20)  # an offer to who has left would be none
            return
        pair = pair_of(engine)
        if engine.rank == 1:
            work = pair.start("send", torch.ones(MAX_UNCONFIRMED_BYTES), 0, 7)
            assert engine.engine._offered
            has_offered.set()
        else:
            wait_until(lambda: engine.engine._arrivals, engine)
            assert has_offered.wait(20)  # one to who has left is forgotten before it is seen
        if engine.rank == first:
            pair.close()
            has_closed[first].set()
        else:
            assert has_closed[first].wait(20)
            wait_until(lambda: pair.gone, engine)
            pair.close()
        if engine.rank == 1:
            wait_until(lambda: not engine.engine._offered, engine)
            with pytest.raises(DrumlineError, match=r"destroyed the group|was destroyed"):
                work.wait()
        engine.start("send", torch.ones(1), 3 - engine.rank, 9).wait()
        engine.start("recv", torch.ones(1), 3 - engine.rank, 9).wait()

    engines(body)


def test_two_threads_of_a_rank_wait_for_messages_at_once(engines):
    def body(engine):
        peers = [rank for rank in range(WORLD) if rank != engine.rank]
        came = {peer: torch.zeros(LARGE) for peer in peers}

        def receive(peer):
            for _ in range(5):
                engine.start("recv", came[peer], peer, 0).wait()

        threads = [threading.Thread(target=receive, args=(peer,)) for peer in peers]
        for thread in threads:
            thread.start()
        for _ in range(5):
            works = [
                engine.start("send", torch.full((LARGE,), float(engine.rank)), peer, 0)
                for peer in peers
            ]
            for work in works:
                work.wait()
        for thread in threads:
            thread.join()
        return all(tensor.eq(peer).all() for peer, tensor in came.items())

    assert engines(body) == [True] * WORLD


def test_a_thread_that_waits_as_another_ends_leaves_no_driver(engines):
    """Or close() would wait for ever for the other one to end."""
    is_posted = threading.Event()

    def body(engine):
        if engine.rank == 1:
            assert is_posted.wait(20)
            engine.start("send", torch.ones(1), 0, 0).wait()
        if engine.rank:
            return None
        work = engine.start("recv", torch.zeros(1), 1, 0)
        waiter = threading.Thread(target=work.wait)
        with engine.engine._lock:
            # of another thread, which ends while this one awaits the lock
            engine.engine._driver = -1
            waiter.start()
            time.sleep(0.1)
            engine.engine._driver = None
        is_posted.set()
        waiter.join()
        driver, engine.engine._driver = engine.engine._driver, None
        return driver

    assert engines(body)[0] is None


def test_every_thread_that_closes_waits_for_the_one_that_moves_messages(engines):
    """The second returned at once, and closed the streams under it."""

    def body(engine):
        engine.engine._driver = -1  # another thread
        closers = [threading.Thread(target=engine.close) for _ in range(2)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(0.1)
        are_waiting = [closer.is_alive() for closer in closers]
        engine.engine._driver = None
        for closer in closers:
            closer.join(20)
        return are_waiting, [closer.is_alive() for closer in closers]

    assert engines(body) == [([True] * 2, [False] * 2)] * WORLD


def test_end_of_a_peer_is_noticed_while_another_one_sends_all_the_time(engines):
    """It was looked for where nothing came, and the receive waited for its deadline."""
    is_noticed = threading.Event()

    def body(engine):
        if engine.rank == 0:
            with pytest.raises(PeerLost, match="lost rank 1"):
                engine.start("recv", torch.zeros(1), 1, 0).wait()
            is_noticed.set()
        deadline_s = time.monotonic() + 5
        while engine.rank == 2 and not is_noticed.wait(0.001):
            assert time.monotonic() < deadline_s
            engine.start("send", torch.ones(1), 0, 0)

    engines(body)


def test_service_sleeps_while_a_message_that_nobody_receives_is_unread(engines):
    """It looked again and again, for as long as the message was there."""
    is_posted, has_received, has_measured = (threading.Event() for _ in range(3))

    def body(engine):
        if engine.rank == 1:
            assert is_posted.wait(20)
            engine.start("send", torch.ones(1), 0, 0).wait()
            assert has_received.wait(20)
            engine.start("send", torch.ones(1), 0, 1).wait()
        if engine.rank:
            assert has_measured.wait(20)
            return None
        work = engine.start("recv", torch.zeros(1), 1, 0)
        is_posted.set()
        while not work.is_completed():
            time.sleep(0.01)
        has_received.set()
        time.sleep(0.3)  # in which the service falls asleep
        clock = time.pthread_getcpuclockid(engine.engine._service.ident)
        before_s = time.clock_gettime(clock)
        time.sleep(0.3)
        has_measured.set()
        return time.clock_gettime(clock) - before_s

    assert engines(body)[0] < 0.03


def test_rest_of_a_receive_that_has_failed_is_dropped_piece_by_piece():
    """As much memory was taken for it as the tensor has, tens of GiB."""
    incoming, nbytes, pieces = Incoming(), 3 * DROPPED_BYTES + 5, []
    incoming.expect(work := object(), 0, nbytes)
    incoming.abandon(work)
    while incoming.target is not None:
        pieces.append(incoming.left)
        incoming.expect_header()
    assert sum(pieces) == nbytes and max(pieces) == DROPPED_BYTES
    assert incoming.left == HEADER.size


def test_thread_that_waits_hears_of_a_peer_that_is_read_again(engines):
    """It went on to wait for the others alone, until it looked after the living."""

    def body(engine):
        mover, peer, notified = engine.engine, (engine.rank + 1) % WORLD, []
        streams, mover._streams = mover._streams, SimpleNamespace(stream_notify=notified.append)
        mover._driver = -1  # another thread
        with mover._lock:
            mover._set_buffered(peer, MAX_BUFFERED_BYTES)
            notified.clear()
            mover._set_buffered(peer, -1)
        mover._driver, mover._streams = None, streams
        return mover._interest[peer] & READABLE, notified

    assert engines(body) == [(READABLE, [WAKE])] * WORLD


def test_a_receive_that_is_polled_gets_past_more_than_is_buffered(engines):
    """It never ended: only a thread in wait() had more read from a peer with many messages."""
    has_come = threading.Event()

    def body(engine):
        tensor = torch.zeros(1)
        if engine.rank == 0:
            work = engine.start("recv", tensor, 1, 2)
            wait_until(work.is_completed, engine)
            has_come.set()
        elif engine.rank == 1:
            part = torch.zeros(6000)
            for _ in range(MAX_BUFFERED_BYTES // part.nbytes + 10):
                engine.start("send", part, 0, 1)
            engine.start("send", torch.ones(1), 0, 2)
            assert has_come.wait(20)  # what one that leaves has sent is read in any case
        return tensor.item()

    assert engines(body) == [1.0, 0.0, 0.0]
