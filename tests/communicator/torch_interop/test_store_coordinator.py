"""A StoreCoordinator over a store that ranks of an earlier launch have used."""

import subprocess
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch.distributed import FileStore, HashStore, TCPStore

from communicator import Communicator, CommunicatorError, CommunicatorTimeout, PeerLost
from communicator.torch_interop.store_coordinator import (
    StoreCoordinator,
    _come_within,
    _request_key,
)
from coordinator import CoordinatorError, Credentials, Peer
from coordinator.peers import start_ticks
from coordinator.transport import connections
from launcher import LaunchInfo

WORLD = 4


@pytest.fixture
def meet():
    """The StoreCoordinators, or errors, of ranks that come to a store one after the other."""

    def run(store, ranks, timeout_s=20.0):
        found = {}

        def rank_of(rank):
            try:
                found[rank] = StoreCoordinator(store, rank, WORLD, timeout_s)
            except (CommunicatorTimeout, PeerLost) as error:
                found[rank] = error

        threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
            time.sleep(0.02)
        for thread in threads:
            thread.join()
        return [found[rank] for rank in ranks]

    return run


def launch_ids(meetings):
    return {meeting.info.launch_id for meeting in meetings}


def test_ranks_meet_where_all_ranks_of_an_earlier_launch_had_met(meet):
    store = HashStore()
    earlier = launch_ids(meet(store, range(WORLD)))
    now = launch_ids(meet(store, range(WORLD)[::-1]))
    assert len(earlier) == len(now) == 1
    assert earlier != now


@pytest.mark.parametrize("died", [[0, 1], [2, 3], [1], [0]])
def test_ranks_meet_where_some_ranks_of_an_earlier_launch_had_waited(meet, died):
    store = HashStore()
    meet(store, died, timeout_s=0.05)
    others = [rank for rank in range(WORLD) if rank not in died]
    assert len(launch_ids(meet(store, [*others, *died]))) == 1


@pytest.mark.parametrize("missing", [0, 2])
def test_rank_that_never_comes_is_named_by_each_of_the_others(meet, missing):
    store, here = HashStore(), [rank for rank in range(WORLD) if rank != missing]
    for rank in here:  # or one that is slow might be named, too
        store.set(_request_key(rank), f"earlier 0 {Peer.me(LaunchInfo('alone')).pack().decode()}")
    for error in meet(store, here, timeout_s=0.3):
        assert f"ranks [{missing}] of {WORLD}" in str(error)


def test_waits_in_pieces_end_with_the_keys_or_the_time_limit_on_every_store_of_torch(tmp_path):
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for store in (HashStore(), FileStore(str(tmp_path / "store"), 1), server):
        for timeout_s in (0.0004, 0.02):
            assert not _come_within(timeout_s, store, ["later"])
        store.set("later", "")
        assert _come_within(0.0004, store, ["later"])


def test_parts_exchange_nothing_to_meet_and_name_a_rank_that_stays_away(meet):
    meetings = meet(HashStore(), range(WORLD))
    parts = [meeting.split([3, 1], "pair", 20.0) for meeting in meetings]
    assert [part and part.rank for part in parts] == [None, 1, None, 0]
    assert (
        on_threads(lambda part: part.allgather(b"%d" % part.rank), parts[1::2])
        == [[b"0", b"1"]] * 2
    )
    with pytest.raises(CommunicatorTimeout, match=r"rank 3 timed out .* rank 1 \(host .*, pid"):
        parts[3].allgather(b"", timeout_s=0.3)


def test_a_part_heeds_what_its_caller_noticed_as_long_as_it_opens(meet):
    part = meet(HashStore(), range(WORLD))[0].split([0, 1], "pair", 20.0)

    def fail():
        raise CommunicatorError("rank 1 has left")

    part.check_more = fail
    part.check()  # as collectives do, for which a rank that has left may have done its part
    with pytest.raises(CommunicatorError, match="rank 1 has left"):
        part.allgather(b"")


@pytest.fixture
def bereft(meet):
    """Rank 0 of those that have met, and the pid of rank 2, which has died since."""
    process = subprocess.Popen(["true"])
    process.wait()
    meeting = meet(HashStore(), range(WORLD))[0]
    dead = replace(meeting.peers[2], pid=process.pid, start_ticks=1)
    meeting.peers = (*meeting.peers[:2], dead, *meeting.peers[3:])
    return meeting, process.pid


def test_rank_that_dies_after_all_have_met_is_named_before_the_time_limit(bereft):
    meeting, pid = bereft
    with pytest.raises(PeerLost, match=rf"rank 0 lost rank 2 .*{pid}"):
        meeting.allgather(b"")


@pytest.mark.parametrize("died", [0, 2])
def test_rank_that_dies_while_it_waits_for_others_is_named_by_all_that_have_come(meet, died):
    """One of an earlier launch, whose request is still there, is not."""
    store, here = HashStore(), [rank for rank in range(WORLD) if rank != 3]
    process = subprocess.Popen(["sleep", "60"])
    me = Peer.me(LaunchInfo("alone"))
    dying = replace(me, rank=died, pid=process.pid, start_ticks=start_ticks(process.pid))
    store.set(_request_key(3), f"earlier 0 {replace(me, start_ticks=1).pack().decode()}")
    store.set(_request_key(died), f"now {2**40} {dying.pack().decode()}")
    here.remove(died)
    process.kill()
    process.wait()
    for error in meet(store, here):
        assert isinstance(error, PeerLost) and [f.rank for f in error.failures] == [died], error
        assert f"lost rank {died} (host" in str(error) and f"pid {process.pid}" in str(error)


def test_rank_with_which_the_store_has_died_is_named(bereft):
    meeting, pid = bereft
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting._store = TCPStore("127.0.0.1", server.port)
    del server
    with pytest.raises(PeerLost, match=rf"rank 0 lost rank 2 .*{pid}"):
        meeting.allgather(b"")


def test_a_peer_that_did_its_part_and_left_at_once_has_done_it(meet):
    parts = [meeting.split([0, 1], "pair", 20.0) for meeting in meet(HashStore(), range(WORLD))[:2]]

    def leave():
        parts[1]._publish(b"1")
        raise CommunicatorError("rank 1 has left")

    parts[0].check_more = leave
    assert parts[0].allgather(b"0") == [b"0", b"1"]


def test_wait_of_a_part_ends_when_it_is_closed_and_keeps_no_thread_from_the_store(meet):
    meetings = meet(HashStore(), range(WORLD))
    first, _ = (meeting.split([0, 1], timeout_s=20.0) for meeting in meetings[:2])
    errors = []

    def wait():
        with pytest.raises(CommunicatorError, match="destroyed") as caught:
            first.allgather(b"")
        errors.append(caught.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    other = [meeting.split([0, 1], "other") for meeting in meetings[:2]]
    assert on_threads(lambda part: part.allgather(b""), other) == [[b"", b""]] * 2
    first.close()
    waiting.join()
    assert errors


def on_threads(call, meetings):
    """What call(meeting) returns or raises on each rank."""
    found = {}

    def rank_of(meeting):
        try:
            found[meeting.rank] = call(meeting)
        except Exception as error:
            found[meeting.rank] = error

    threads = [threading.Thread(target=rank_of, args=(meeting,)) for meeting in meetings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[meeting.rank] for meeting in meetings]


def test_ranks_of_a_store_sum_over_connections_of_their_own(meet):
    def total(meeting):
        with Communicator(meeting, "tcp") as comm:
            return comm.allreduce(torch.tensor([float(comm.rank)])).item()

    assert on_threads(total, meet(HashStore(), range(WORLD))) == [6.0] * WORLD


def test_rank_that_does_not_know_the_secret_in_the_store_is_rejected(meet, monkeypatch):
    is_rejected, connect = threading.Event(), connections.connect_to_parent

    def noticing(address, credentials, me, *rest):
        try:
            return connect(address, credentials, me, *rest)
        except CoordinatorError:
            if me.rank == 2:
                is_rejected.set()
            raise

    def check(_):
        if is_rejected.is_set():
            raise CoordinatorError("rank 2 will not come")

    monkeypatch.setattr(connections, "connect_to_parent", noticing)
    monkeypatch.setattr(connections.PeerConnector, "_check_alive", check)
    meetings = meet(HashStore(), range(WORLD))
    meetings[2]._credentials = Credentials(bytes(32), meetings[2].info.launch_id, WORLD)
    errors = on_threads(lambda meeting: meeting.connections(timeout_s=60), meetings)
    assert all(isinstance(error, CoordinatorError) for error in errors)
    assert "launch secret" in str(errors[2])


def test_no_rank_waits_for_a_look_at_its_stack_that_nobody_takes_over_a_store(meet):
    """A peer that came after the deadline was told only 1.2 s later."""

    def seconds_until_told():
        meetings = meet(HashStore(), range(WORLD))
        comms = on_threads(lambda coor: Communicator(coor, "shm", timeout_s=0.05), meetings)
        late, *others = comms
        errors = on_threads(lambda comm: comm.barrier(), others)
        assert all(isinstance(error, CommunicatorTimeout | PeerLost) for error in errors)
        begun = time.monotonic()
        with pytest.raises(PeerLost):
            late.barrier()
        return time.monotonic() - begun

    assert min(seconds_until_told() for _ in range(3)) < 0.6
