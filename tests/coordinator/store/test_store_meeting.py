"""Coordinators over a torch Store that ranks of an earlier launch may have used."""

import subprocess
import threading
import time
from dataclasses import replace

import pytest
from torch.distributed import FileStore, HashStore, TCPStore

from coordinator import Coordinator, CoordinatorError, CoordinatorTimeout, Peer, PeerLost
from coordinator.control.session import this_process
from coordinator.peers import start_ticks
from coordinator.store import store_meeting
from coordinator.store.store_meeting import request_key
from launcher import LaunchInfo, host_addresses

WORLD = 4


@pytest.fixture
def meet():
    """The Coordinators, or errors, of ranks that come to a store one after the other."""
    coordinators = []

    def run(store, places, timeout_s=20.0, world_size=WORLD, numbers=()):
        found = {}

        def rank_of(place):
            try:
                found[place] = Coordinator.over(
                    store, place, world_size, ranks=numbers, timeout_s=timeout_s
                )
            except CoordinatorError as error:
                found[place] = error

        threads = [threading.Thread(target=rank_of, args=(place,)) for place in places]
        for thread in threads:
            thread.start()
            time.sleep(0.02)
        for thread in threads:
            thread.join()
        coordinators.extend(coor for coor in found.values() if isinstance(coor, Coordinator))
        return [found[place] for place in places]

    yield run
    for coor in coordinators:
        coor.close()


@pytest.fixture
def on_threads():
    """What call(coordinator) returns or raises on each rank."""

    def run(call, coordinators):
        found = {}

        def rank_of(coor):
            try:
                found[coor.rank] = call(coor)
            except Exception as error:
                found[coor.rank] = error

        threads = [threading.Thread(target=rank_of, args=(coor,)) for coor in coordinators]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[coor.rank] for coor in coordinators]

    return run


def launch_ids(coordinators):
    return {coor.info.launch_id for coor in coordinators}


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
    others = [place for place in range(WORLD) if place not in died]
    assert len(launch_ids(meet(store, [*others, *died]))) == 1


@pytest.mark.parametrize("missing", [0, 2])
def test_rank_that_never_comes_is_named_by_each_of_the_others(meet, missing):
    store, here = HashStore(), [place for place in range(WORLD) if place != missing]
    for place in here:  # or one that is slow might be named, too
        store.set(request_key(place), f"earlier 0 {Peer.me(LaunchInfo('alone')).pack().decode()}")
    for error in meet(store, here, timeout_s=0.3):
        assert isinstance(error, CoordinatorTimeout)
        assert f"ranks [{missing}] of {WORLD}" in str(error)


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_ranks_agree_over_every_store_of_torch(meet, on_threads, tmp_path, kind):
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = {
        "hash": HashStore(),
        "file": FileStore(str(tmp_path / "store"), 1),
        "tcp": TCPStore("127.0.0.1", server.port),
    }
    coordinators = meet(stores[kind], range(3), world_size=3)
    gathered = on_threads(lambda coor: coor.allgather(b"%d" % coor.rank), coordinators)
    assert gathered == [[b"0", b"1", b"2"]] * 3


def test_errors_name_ranks_by_the_numbers_that_they_have_elsewhere(meet, on_threads):
    """The first of them serves, though it is not rank 0 of anything."""
    coordinators = meet(HashStore(), range(3), world_size=3, numbers=(5, 2, 9))
    assert [coor.rank_name() for coor in coordinators] == ["rank 5", "rank 2", "rank 9"]
    assert [coor.info.is_master for coor in coordinators] == [True, False, False]
    late, *others = coordinators[::-1]
    errors = on_threads(lambda coor: coor.barrier(timeout_s=0.3), others)
    assert all(isinstance(error, CoordinatorTimeout) for error in errors)
    assert all("rank 9 (" in str(error) for error in errors)
    with pytest.raises(CoordinatorError):
        late.barrier()


def test_a_key_that_nobody_puts_is_no_fault_of_the_rank_that_keeps_the_keys(meet):
    """It was said not to answer, for rank 0 was asked after, which is none of them."""
    _, other = meet(HashStore(), range(2), world_size=2, numbers=(5, 2))
    with pytest.raises(CoordinatorTimeout, match=r"\['key'\], which nobody has put"):
        other.wait("key", timeout_s=0.3)


def test_a_rank_alone_meets_nobody():
    with Coordinator.over(HashStore(), 0, 1, ranks=[3]) as coor:
        assert (coor.rank_name(), coor.allgather(b"x")) == ("rank 3", [b"x"])


@pytest.mark.parametrize(("rank", "world_size", "ranks"), [(2, 2, ()), (-1, 2, ()), (0, 2, (1, 1))])
def test_a_place_that_is_not_there_is_refused(rank, world_size, ranks):
    with pytest.raises(ValueError, match="place of this process"):
        Coordinator.over(HashStore(), rank, world_size, ranks=ranks)


def test_close_waits_for_nobody_and_the_first_rank_serves_until_all_have_left(meet):
    first, *others = meet(HashStore(), range(3), world_size=3)
    begun = time.monotonic()
    first.close()
    assert time.monotonic() - begun < 5
    others[0].put("key", b"value")
    assert others[1].get("key") == b"value"
    server = this_process.of(first.info).server
    for coor in others:
        coor.close()
    assert server.wait(10)


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_what_nobody_reads_again_is_not_left_in_the_store(meet, tmp_path, kind):
    """Three keys of each rank stayed, of every process group that a program makes."""
    stores = {
        "hash": HashStore,
        "file": lambda: FileStore(str(tmp_path / "store"), 1),
        "tcp": lambda: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }
    store = stores[kind]()
    before = store.num_keys()
    for _ in range(3):
        meet(store, range(WORLD))
        assert store.num_keys() == before + 1 and store.check([request_key(0)])


def test_no_session_is_left_of_meetings_that_have_ended(meet):
    for coor in meet(HashStore(), range(2), world_size=2):
        ended = coor.info.launch_id
        coor.close()
    deadline = time.monotonic() + 10
    kept = {ended}
    while kept & {ended} and time.monotonic() < deadline:
        meet(HashStore(), range(2), world_size=2)
        kept = {launch_id for launch_id, _ in this_process._sessions}
    assert ended not in kept


@pytest.mark.parametrize("died", [0, 2])
def test_rank_that_dies_while_it_waits_for_others_is_named_by_all_that_have_come(meet, died):
    """One of an earlier launch, whose request is still there, is not."""
    store, here = HashStore(), [place for place in range(WORLD) if place != 3]
    process = subprocess.Popen(["sleep", "60"])
    me = Peer.me(LaunchInfo("alone"))
    dying = replace(me, rank=died, pid=process.pid, start_ticks=start_ticks(process.pid))
    store.set(request_key(3), f"earlier 0 {replace(me, start_ticks=1).pack().decode()}")
    store.set(request_key(died), f"now {2**40} {dying.pack().decode()}")
    here.remove(died)
    process.kill()
    process.wait()
    for error in meet(store, here):
        assert isinstance(error, PeerLost) and [f.rank for f in error.failures] == [died], error
        assert f"lost rank {died} (host" in str(error) and f"pid {process.pid}" in str(error)


def test_rank_that_does_not_know_the_secret_in_the_store_is_rejected(meet, monkeypatch):
    joined = store_meeting._Meeting._joined

    def forgetful(self, launch_id, introductions, listener):
        info, location = joined(self, launch_id, introductions, listener)
        return info, replace(location, secret=bytes(32)) if self._place == 1 else location

    monkeypatch.setattr(store_meeting._Meeting, "_joined", forgetful)
    errors = meet(HashStore(), range(2), timeout_s=1.0, world_size=2)
    assert isinstance(errors[1], CoordinatorError) and "secret" in str(errors[1])


def test_ranks_of_one_launch_share_a_secret_that_is_not_in_the_store(meet, monkeypatch):
    """Who reads torch's store could join otherwise, and read what is encrypted."""
    launch = LaunchInfo("ours", extras={"secret_fd": "3"})
    monkeypatch.setattr(store_meeting, "_own_launch", lambda: launch)
    monkeypatch.setattr(store_meeting, "launch_secret", lambda info: b"secret of the launch")
    monkeypatch.setattr(store_meeting._Meeting, "forget", lambda meeting: None)
    store = HashStore()
    first, _ = meet(store, range(2), world_size=2)
    secret = this_process.of(first.info).location.secret
    introduction = store.get(f"{first.info.launch_id}/0")
    assert len(secret) == 32 and secret.hex().encode() not in introduction


@pytest.mark.parametrize("names", [["one", "one"], ["one", "two"]])
def test_the_first_rank_listens_where_other_hosts_reach_it_if_ranks_are_there(
    meet, monkeypatch, names
):
    """To itself, a host's own name is often the loopback: the others looked at their own."""
    monkeypatch.setattr(host_addresses, "routable_addresses", lambda: ["127.0.0.9"])
    me, hosts = Peer.me(LaunchInfo("alone")), iter(names)
    monkeypatch.setattr(store_meeting, "_own_process", lambda _: replace(me, host=next(hosts)))
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("localhost", server.port)
    coordinators = meet(store, range(2), world_size=2)
    expected = "127.0.0.9" if "two" in names else "127.0.0.1"
    assert [coor.info.master_addr for coor in coordinators] == [expected] * 2


@pytest.mark.parametrize("extras", [{}, {"secret_fd": "3"}])
def test_who_can_become_a_rank_is_who_reads_the_store_unless_the_launch_has_a_secret(
    meet, monkeypatch, caplog, extras
):
    """Of a launch with a secret, and of no launch, it was said that who knows its id can."""
    launch = LaunchInfo("ours", extras=extras)
    monkeypatch.setattr(store_meeting, "_own_launch", lambda: launch)
    monkeypatch.setattr(store_meeting, "launch_secret", lambda info: b"secret of the launch")
    hosts = iter(["one", "two"])
    monkeypatch.setattr(
        store_meeting, "_own_process", lambda _: replace(Peer.me(launch), host=next(hosts))
    )
    meet(HashStore(), range(2), world_size=2)
    assert caplog.text.count("whoever reaches the ranks' store can") == (not extras)
    assert "this launch id" not in caplog.text


def test_ranks_on_several_hosts_that_are_to_encrypt_need_more_than_the_store(meet, monkeypatch):
    launch = LaunchInfo("ours", extras={"encrypt": "1"})
    monkeypatch.setattr(store_meeting, "_own_launch", lambda: launch)
    hosts = iter(["one", "two"])
    monkeypatch.setattr(
        store_meeting, "_own_process", lambda _: replace(Peer.me(launch), host=next(hosts))
    )
    for error in meet(HashStore(), range(2), world_size=2):
        assert isinstance(error, CoordinatorError) and "torch's store" in str(error)
