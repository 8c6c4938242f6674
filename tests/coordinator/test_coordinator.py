"""The Coordinator with ranks as threads: no global may stand between them."""

import threading
import time
from functools import partial

import pytest
import torch.distributed

from coordinator import Coordinator, CoordinatorError, CoordinatorTimeout, PeerLost
from launcher import LaunchInfo

SIZES = [0, 1, 4083, 4084, 4085, 1_000_003]


@pytest.fixture(autouse=True, params=[{}, {"encrypt": True}, {"transport": "gloo"}], ids=str)
def kind(request, monkeypatch):
    """Every test is of each kind: of memory and connections, encrypted connections, and gloo."""
    monkeypatch.setitem(globals(), "Coordinator", partial(Coordinator, **request.param))
    return request.param


def test_every_rank_gets_the_bytes_of_the_source(ranks):
    def body(info):
        with Coordinator(info) as coor:
            results = []
            for src in range(coor.world_size):
                for size in SIZES:
                    data = bytes([src + 1]) * size
                    results.append(coor.broadcast(data if coor.rank == src else None, src) == data)
            return all(results) and len(results) == len(SIZES) * 4

    assert ranks(body, 4) == [True] * 4


def test_allgather_keeps_order_and_uneven_sizes(ranks):
    def body(info):
        with Coordinator(info) as coor:
            return coor.allgather(b"x" * SIZES[coor.rank])

    assert ranks(body, 5) == [[b"x" * size for size in SIZES[:5]]] * 5


def test_who_comes_and_leaves_while_another_looks_for_it_is_not_lost(ranks):
    looks, has_left = threading.Event(), threading.Event()

    def body(info):
        with Coordinator(info) as coor:
            if coor.rank == 0:
                monitor = coor._group.detector.monitor
                exited = monitor.exited

                def looked(among):
                    looks.set()
                    assert not among or has_left.wait(10)
                    return exited(among)

                monitor.exited = looked
            else:
                assert looks.wait(10)
            coor.barrier()
        has_left.set()
        return True

    assert ranks(body, 2) == [True, True]


def test_nobody_leaves_a_barrier_before_the_last_came(ranks):
    def body(info):
        with Coordinator(info) as coor:
            if coor.rank == 2:
                time.sleep(0.2)
            came = time.monotonic()
            coor.barrier()
            return came, time.monotonic()

    times = ranks(body, 4)
    assert min(left for _, left in times) >= max(came for came, _ in times)


def test_a_world_of_one_needs_no_network():
    with Coordinator(LaunchInfo("alone")) as coor:
        assert coor.is_master() and coor.is_local_master()
        assert coor.broadcast(b"a") == b"a"
        assert coor.allgather(b"b") == [b"b"]
        coor.barrier()
        coor.local_barrier()
        with coor.local_master_first():
            pass
        assert coor.split([0]).world_size == 1


def test_the_default_group_of_the_application_stays_free(ranks):
    def body(info):
        with Coordinator(info) as coor:
            coor.barrier()
            return torch.distributed.is_initialized()

    assert ranks(body, 2) == [False, False]


def test_local_ranks_follow_the_nodes(ranks):
    def body(info):
        with Coordinator(info) as coor:
            coor.local_barrier()
            return coor.rank, coor.local_rank, coor.local_world_size, coor.is_local_master()

    assert ranks(body, 5, nodes=[3, 2]) == [
        (0, 0, 3, True),
        (1, 1, 3, False),
        (2, 2, 3, False),
        (3, 0, 2, True),
        (4, 1, 2, False),
    ]


def test_local_barrier_waits_for_the_node_alone(ranks):
    others_have_met = threading.Barrier(4, timeout=20)
    order = []

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            coor.local_barrier()
            coor.barrier()
            if coor.rank == 4:
                others_have_met.wait()
            order.append(f"{coor.rank} comes")
            coor.local_barrier()
            order.append(f"{coor.rank} leaves")
            if coor.rank < 3:
                others_have_met.wait()

    ranks(body, 5, nodes=[3, 2])
    assert order.index("3 leaves") > order.index("4 comes")


def test_split_numbers_ranks_in_the_order_given(ranks):
    def body(info):
        with Coordinator(info) as coor:
            group = coor.split([3, 1])
            if group is None:
                return None
            with group:
                return group.rank, group.allgather(bytes([coor.rank]))

    assert ranks(body, 4) == [None, (1, [b"\x03", b"\x01"]), None, (0, [b"\x03", b"\x01"])]


def test_overlapping_and_nested_groups_do_not_meet(ranks):
    def body(info):
        with Coordinator(info) as coor:
            first, second = coor.split([0, 1, 2, 3]), coor.split([0, 1, 2])
            results = [first.allgather(b"a")]
            if second is not None:
                results.append(second.broadcast(b"b" if second.rank == 2 else None, 2))
                inner = second.split([2, 0])
                if inner is not None:
                    results.append(inner.allgather(bytes([inner.rank])))
            first.barrier()
            return results

    whole = [b"a"] * 4
    assert ranks(body, 4) == [
        [whole, b"b", [b"\x00", b"\x01"]],
        [whole, b"b"],
        [whole, b"b", [b"\x00", b"\x01"]],
        [whole],
    ]


def test_several_coordinators_in_one_launch_at_once_and_one_after_another(ranks):
    def body(info):
        results = []
        with Coordinator(info) as one, Coordinator(info) as two:
            results.append(two.allgather(b"2") + one.allgather(b"1"))
        for number in range(3):
            with Coordinator(info) as coor:
                results.append(coor.broadcast(bytes([number]) if coor.rank == 0 else None))
        return results

    assert ranks(body, 3) == [[[b"2"] * 3 + [b"1"] * 3, b"\x00", b"\x01", b"\x02"]] * 3


def test_the_local_master_goes_first(ranks):
    order = []

    def body(info):
        with Coordinator(info) as coor, coor.local_master_first():
            if coor.is_local_master():
                time.sleep(0.1)
            order.append(coor.rank)

    ranks(body, 4)
    assert order[0] == 0 and sorted(order) == [0, 1, 2, 3]


def test_a_failing_local_master_does_not_strand_the_others(ranks_or_errors):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor, coor.local_master_first():
            if coor.is_local_master():
                raise KeyError("no such file")
            return "ran"

    outcomes = ranks_or_errors(body, 3)
    assert isinstance(outcomes[0], KeyError)
    assert all(isinstance(error, CoordinatorError) for error in outcomes[1:])
    assert all("no such file" in str(error) for error in outcomes[1:])


def test_one_rank_of_a_node_holds_a_lock(ranks):
    held = []

    def body(info):
        with Coordinator(info) as coor:
            for _ in range(5):
                with coor.lock("build"):
                    held.append("in")
                    time.sleep(0.002)
                    held.append("out")

    ranks(body, 3)
    assert held == ["in", "out"] * 15


def test_a_lock_that_is_not_had_names_its_holder(ranks_or_errors):
    def body(info):
        with Coordinator(info, timeout_s=10) as coor:
            if coor.rank == 0:
                with coor.lock("model"):
                    coor.barrier()
                    coor.barrier()
                return None
            coor.barrier()
            try:
                with coor.lock("model", timeout_s=0.2):
                    return None
            except CoordinatorTimeout as error:
                coor.barrier()
                return str(error)

    _, message = ranks_or_errors(body, 2)
    assert "rank 0" in message and "model" in message and "since" in message


@pytest.mark.parametrize("operation", ["barrier", "allgather", "broadcast"])
def test_a_timeout_names_who_did_not_come(ranks_or_errors, operation, kind):
    """Over gloo each is known by its last heartbeat, which may be older than the call."""
    meeting = threading.Barrier(3, timeout=20)

    def body(info):
        with Coordinator(info, timeout_s=30) as coor:
            coor.barrier()
            if coor.rank == 2:
                meeting.wait()
                return "late"
            data = [b"x"] if operation == "allgather" else []
            if operation == "broadcast":
                data = [None, 2]
            try:
                getattr(coor, operation)(*data, timeout_s=1)
            finally:
                meeting.wait()

    outcomes = ranks_or_errors(body, 3)
    for error in outcomes[:2]:
        assert isinstance(error, CoordinatorTimeout), error
        assert f"{operation} #2 (test_coordinator.py:" in str(error)
        assert "rank 2 (host" in str(error)
        assert "rank 1 (" not in str(error).partition("for ")[2] or "transport" in kind


def test_ranks_in_different_calls_are_told_so(ranks_or_errors):
    def body(info):
        with Coordinator(info, timeout_s=30) as coor:
            if coor.rank == 1:
                coor.allgather(b"")
            else:
                coor.barrier()

    outcomes = ranks_or_errors(body, 2)
    assert "rank 1" in str(outcomes[0]) and "in allgather #1" in str(outcomes[0])
    assert "rank 0" in str(outcomes[1]) and "in barrier #1" in str(outcomes[1])


def test_an_exception_on_one_rank_reaches_the_others(ranks_or_errors):
    def body(info):
        with Coordinator(info, timeout_s=30) as coor:
            coor.barrier()
            if coor.rank == 1:
                raise ZeroDivisionError("by nothing")
            coor.barrier()

    start = time.monotonic()
    outcomes = ranks_or_errors(body, 3)
    assert time.monotonic() - start < 15
    assert isinstance(outcomes[1], ZeroDivisionError)
    for error in (outcomes[0], outcomes[2]):
        assert isinstance(error, PeerLost), error
        assert "rank 1" in str(error) and "by nothing" in str(error)


def test_a_broken_group_says_so_at_once(ranks_or_errors):
    gave_up = threading.Event()

    def body(info):
        with Coordinator(info, timeout_s=30) as coor:
            if coor.rank == 1:
                assert gave_up.wait(20)
                return None
            with pytest.raises(CoordinatorTimeout):
                coor.barrier(timeout_s=0.2)
            try:
                coor.barrier()
            finally:
                gave_up.set()

    error = ranks_or_errors(body, 2)[0]
    assert isinstance(error, CoordinatorError) and "desynchronised the ranks" in str(error)


def test_bad_arguments_raise_before_anything_moves(ranks):
    def body(info):
        with Coordinator(info) as coor:
            with pytest.raises(ValueError, match="not a rank of this group"):
                coor.broadcast(b"", 7)
            with pytest.raises(ValueError, match="not bytes"):
                coor.allgather("text")
            with pytest.raises(ValueError, match="distinct"):
                coor.split([0, 0])
            coor.barrier()
        with pytest.raises(CoordinatorError, match="closed"):
            coor.barrier()

    ranks(body, 2)


def test_a_missing_rank_is_named_at_the_start(ranks_or_errors):
    def body(info):
        if info.rank == 1:
            return None
        Coordinator(info, timeout_s=2)

    outcomes = ranks_or_errors(body, 3)
    for error in (outcomes[0], outcomes[2]):
        assert isinstance(error, CoordinatorTimeout) and "[1]" in str(error), error


def test_a_rank_that_ends_itself_with_success_strands_nobody(ranks_or_errors):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            coor.barrier()
            if coor.rank:
                raise SystemExit(0)
            return "done"

    outcomes = ranks_or_errors(body, 3)
    assert outcomes[0] == "done"
    assert all(isinstance(error, SystemExit) for error in outcomes[1:])
