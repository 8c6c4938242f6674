"""What the operations give, on one node and over two, for bytes and values of all sizes."""

import hashlib
import os
import threading
import time
from functools import partial

import pytest

from coordinator import Coordinator, CoordinatorError, CoordinatorTimeout
from coordinator.control import client
from launcher import LaunchInfo

LAYOUTS = [[4], [2, 2], [3, 1, 1], [1, 1, 1, 1, 1]]
SIZES = [0, 1, 4095, 4096, 4097, 1 << 20, (1 << 20) + 1, 2_300_003]
nodes = pytest.mark.parametrize("nodes", LAYOUTS, ids=str)


GLOO = pytest.param({"transport": "gloo"}, marks=pytest.mark.soak)


@pytest.fixture(autouse=True, params=[{}, {"encrypt": True}, GLOO], ids=str)
def kind(request, monkeypatch):
    """Every test is of each kind: of memory and connections, encrypted connections, and gloo."""
    monkeypatch.setitem(globals(), "Coordinator", partial(Coordinator, **request.param))
    return request.param


def payload(rank, size):
    return bytes([rank + 1]) * size


@nodes
def test_every_size_arrives_whole_from_and_to_every_rank(ranks, nodes):
    def body(info):
        with Coordinator(info) as coor:
            size = coor.world_size
            for nbytes in SIZES:
                for root in (0, size - 1):
                    mine = payload(coor.rank, nbytes)
                    expected = [payload(rank, nbytes) for rank in range(size)]
                    assert (
                        coor.broadcast(mine if coor.rank == root else None, root)
                        == (expected[root])
                    )
                    results = coor.gather(mine, root)
                    assert results == (expected if coor.rank == root else None)
                    parts = expected if coor.rank == root else None
                    assert coor.scatter(parts, root) == mine
                assert coor.allgather(payload(coor.rank, nbytes)) == expected

    ranks(body, sum(nodes), nodes)


@nodes
def test_sizes_may_differ_from_rank_to_rank(ranks, nodes):
    def body(info):
        with Coordinator(info) as coor:
            payloads = [payload(rank, SIZES[-1 - rank]) for rank in range(coor.world_size)]
            assert coor.allgather(payloads[coor.rank]) == payloads
            assert coor.scatter(payloads if coor.rank == 1 else None, 1) == payloads[coor.rank]

    ranks(body, sum(nodes), nodes)


@nodes
def test_values_travel_as_msgpack(ranks, nodes):
    value = {"name": "x", "shape": [1, 2], "data": b"\x00", "none": None, "scale": 0.5}

    def body(info):
        with Coordinator(info) as coor:
            last = coor.world_size - 1
            assert coor.broadcast_object(value if coor.rank == last else None, last) == value
            assert coor.allgather_object(coor.rank) == list(range(coor.world_size))
            results = coor.gather_object([coor.rank], 1)
            assert results == ([[rank] for rank in range(last + 1)] if coor.rank == 1 else None)
            assert coor.scatter_object([value] * (last + 1) if coor.rank == 0 else None) == value

    ranks(body, sum(nodes), nodes)


@nodes
def test_agreement_is_the_value_and_a_vote_is_unanimous(ranks, nodes):
    def body(info):
        with Coordinator(info) as coor:
            assert coor.agree({"layers": 32}) == {"layers": 32}
            return coor.all_true(True), coor.all_true(coor.rank != 1), coor.all_true(False)

    assert ranks(body, sum(nodes), nodes) == [(True, False, False)] * sum(nodes)


def test_a_value_that_cannot_be_read_again_fails_on_all_ranks_and_leaves_the_group_whole(ranks):
    """A tuple as a key, which arrives as a list, was a TypeError of msgpack's."""

    def body(info):
        with Coordinator(info) as coor:
            with pytest.raises(CoordinatorError, match="other keys than tuples"):
                coor.broadcast_object({(1, 2): 3})
            coor.barrier()

    ranks(body, 2)


def test_dicts_agree_in_whatever_order_their_keys_were_set(ranks):
    def body(info):
        with Coordinator(info) as coor:
            items = [("lr", 1), ("bs", {"a": 2, 3: b"c"})]
            value = dict(items if coor.rank else items[::-1])
            assert coor.agree(value) is value
            with pytest.raises(CoordinatorError, match="do not agree"):
                coor.agree({"lr": 1 if coor.rank else True})

    ranks(body, 2)


def test_disagreement_lists_who_gave_what_and_leaves_the_group_whole(ranks):
    def body(info):
        with Coordinator(info) as coor:
            with pytest.raises(CoordinatorError, match=r"32 by ranks \[0, 2\]; 33 by ranks \[1\]"):
                coor.agree(33 if coor.rank == 1 else 32)
            coor.barrier()

    ranks(body, 3)


@pytest.mark.parametrize("nodes", [[2], [1, 1]], ids=str)
def test_sixty_four_megabytes_arrive_whole(coordinated, nodes):
    def body(coor):
        data = coor.broadcast(bytes(range(256)) * (1 << 18) if coor.rank == 0 else None)
        return hashlib.sha256(data).hexdigest()

    expected = hashlib.sha256(bytes(range(256)) * (1 << 18)).hexdigest()
    assert [outcome.value for outcome in coordinated(body, 2, nodes)] == [expected] * 2


@pytest.mark.parametrize("nbytes", [1 << 26, pytest.param(1 << 30, marks=pytest.mark.soak)])
def test_a_large_broadcast_arrives_whole(coordinated, nbytes):
    def body(coor):
        data = coor.broadcast(bytes(nbytes - 1) + b"x" if coor.rank == 0 else None)
        return len(data), data[-1:] == b"x", data[:4096] == bytes(4096)

    outcomes = coordinated(body, 2, timeout_s=60)
    assert [outcome.value for outcome in outcomes] == [[nbytes, True, True]] * 2


@nodes
def test_keys_are_waited_for_and_belong_to_the_group(ranks, nodes):
    def body(info):
        with Coordinator(info) as coor:
            assert coor.get("id") is None
            coor.barrier()
            if coor.rank == 1:
                coor.put("id", b"\x00" * 128)
            assert coor.wait("id") == b"\x00" * 128
            assert coor.get("id") == b"\x00" * 128
            with Coordinator(info) as other:
                assert other.get("id") is None
            coor.barrier()

    ranks(body, sum(nodes), nodes)


def test_a_key_that_nobody_puts_is_named(ranks):
    def body(info):
        with Coordinator(info) as coor, pytest.raises(CoordinatorTimeout, match="unique id"):
            coor.wait("unique id", timeout_s=0.2)

    ranks(body, 2)


def test_the_torch_store_is_a_torch_store(ranks):
    def body(info):
        with Coordinator(info) as coor:
            store = coor.store("x")
            store.set(f"key{coor.rank}", b"a\x00b")
            store.wait(["key0", "key1"])
            assert store.get("key1") == b"a\x00b"
            assert store.check(["key0"]) and not store.check(["key0", "none"])
            coor.barrier()
            assert coor.store("x").check(["key0"]) is False  # the second is another
            total = store.add("n", coor.rank + 1)
            coor.barrier()
            assert total <= store.add("n", 0) == 3
            assert store.compare_set("c", "", str(coor.rank)) in (b"0", b"1")
            return store.num_keys()

    assert ranks(body, 2) == [4, 4]


@nodes
def test_node_and_leaders_are_groups_of_their_own(ranks, nodes):
    def body(info):
        with Coordinator(info) as coor:
            node, leaders = coor.node, coor.leaders
            assert node.allgather_object(coor.rank) == coor.nodes[coor.node_index]
            assert (leaders is None) == (not coor.is_local_master())
            if leaders is not None:
                assert leaders.allgather_object(coor.rank) == [node[0] for node in coor.nodes]
            return node.world_size

    expected = [size for size in nodes for _ in range(size)]
    assert ranks(body, sum(nodes), nodes) == expected


def test_one_rank_of_each_node_does_it_once(ranks):
    done = []

    def body(info):
        with Coordinator(info) as coor:

            def work():
                done.append(coor.rank)
                time.sleep(0.1)
                return f"by {coor.rank}".encode()

            results = [coor.once("download", work) for _ in range(2)]
            assert results[0] == results[1]
            coor.barrier()
            return results[0].decode()

    results = ranks(body, 5, [3, 2])
    assert len(done) == 2
    assert len(set(results[:3])) == 1 and len(set(results[3:])) == 1


def test_what_fails_once_fails_for_all_with_its_traceback(ranks_or_errors):
    """Of a file whose name is not UTF-8, the others waited for their deadline."""

    def body(info):
        with Coordinator(info) as coor:

            def work():
                raise OSError("disk full: \udcff")

            try:
                coor.once("download", work)
            finally:
                coor.barrier()

    outcomes = ranks_or_errors(body, 3)
    assert sorted(type(error).__name__ for error in outcomes) == [
        "CoordinatorError", "CoordinatorError", "OSError",
    ]  # fmt: skip
    assert all("disk full" in str(error) for error in outcomes)


def test_a_result_that_is_too_large_fails_once_for_all(ranks_or_errors, monkeypatch):
    """The others waited for it until their deadline."""
    monkeypatch.setattr(client, "MAX_REQUEST_NBYTES", 20_000)

    def body(info):
        with Coordinator(info) as coor:
            try:
                coor.once("download", lambda: bytes(20_000), timeout_s=3)
            finally:
                coor.barrier()

    outcomes = ranks_or_errors(body, 2)
    assert [type(error) for error in outcomes] == [CoordinatorError] * 2
    assert all("which takes at most 20000 at once" in str(error) for error in outcomes), outcomes


def test_who_waits_for_another_to_go_first_hears_why_the_group_has_failed(ranks_or_errors):
    """It said that the first rank had not gone in all of its time."""

    def body(info):
        with Coordinator(info) as coor:
            if coor.rank == 1:
                with coor.master_first():
                    pass
            elif coor.rank == 2:
                coor.barrier(timeout_s=0.3)
            else:
                coor.wait("never")

    error = ranks_or_errors(body, 3)[1]
    assert isinstance(error, CoordinatorTimeout) and "waited 300 s" not in str(error)
    assert "rank 2 had already given up, in barrier" in str(error)


def test_the_master_goes_first_over_all_nodes(ranks):
    order = []

    def body(info):
        with Coordinator(info) as coor:
            for _ in range(3):
                with coor.master_first():
                    time.sleep(0.02 * coor.is_master())
                    order.append(coor.rank)
                coor.barrier()

    ranks(body, 4, [2, 2])
    assert [order[index] for index in (0, 4, 8)] == [0, 0, 0]


def test_a_dead_master_is_not_waited_for(fork):
    def body(info):
        with Coordinator(info, timeout_s=30) as coor:
            coor.barrier()  # who joins still hears of its end in other words
            with coor.local_master_first():
                if coor.is_local_master():
                    time.sleep(0.2)
                    os._exit(7)

    start = time.monotonic()
    outcomes = fork(body, 3).outcomes()
    assert time.monotonic() - start < 15
    assert [outcome.error for outcome in outcomes[1:]] == ["PeerLost"] * 2
    assert all("exited with code 7" in outcome.text for outcome in outcomes[1:]), outcomes


def test_a_coordinator_serves_whichever_thread_comes(ranks):
    def body(info):
        with Coordinator(info) as coor:
            results = []
            for number in range(4):
                thread = threading.Thread(
                    target=lambda n=number: results.append(coor.allgather_object(n))
                )
                thread.start()
                thread.join()
            return results

    assert ranks(body, 2) == [[[n, n] for n in range(4)]] * 2


def test_no_two_groups_share_their_keys(ranks):
    """The eleventh group without a name was that named "1"."""

    def body(info):
        with Coordinator(info) as coor:
            groups = [coor.split([0, 1]) for _ in range(11)]
            groups[10].put("key", b"x")
            return coor.split([0, 1], name="1").get("key")

    assert ranks(body, 2) == [None, None]


def test_groups_close_in_any_order(ranks):
    def body(info):
        coor = Coordinator(info)
        group = coor.split([1, 0])
        inner = group.split([0, 1])
        other = Coordinator(info)
        order = [coor, inner, other, group] if coor.rank else [group, other, coor, inner]
        coor.barrier()
        for each in order:
            each.close()
        with Coordinator(info) as again:
            again.barrier()

    ranks(body, 2)


def test_a_group_of_one_rank_that_is_closed_last_names_who_has_not_closed(ranks):
    """It was an AssertionError without a text."""
    has_closed = threading.Event()

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            if coor.rank:
                return has_closed.wait(20)
            alone = coor.split([0])
        with pytest.raises(CoordinatorTimeout, match=r"waited 0\.3 s in close .* for rank 1\."):
            alone.close(timeout_s=0.3)
        return has_closed.set()

    assert ranks(body, 2) == [None, True]


def test_a_world_of_one_has_every_operation():
    with Coordinator(LaunchInfo("alone")) as coor:
        assert coor.gather(b"a") == [b"a"] and coor.scatter([b"b"]) == b"b"
        assert coor.agree(1) == 1 and coor.all_true(True) and not coor.all_true(False)
        assert coor.once("x", lambda: b"y") == b"y"
        coor.put("k", b"v")
        assert coor.wait("k") == b"v" and coor.get("none") is None
        assert coor.node.world_size == coor.leaders.world_size == 1
        with coor.master_first():
            coor.store("s").set("a", "b")
        assert "alone" in coor.diagnose()


def test_torch_may_be_the_only_one_to_keep_a_store():
    """It keeps the half in C++, so `init_process_group(store=coor.store("x"))` lost the other."""
    from torch.distributed import PrefixStore

    with Coordinator(LaunchInfo("alone")) as coor:
        within = PrefixStore("within", coor.store("x"))
        within.set("a", "b")
        assert within.get("a") == b"b"


def test_a_senseless_request_harms_only_who_makes_it(ranks):
    def body(info):
        with Coordinator(info) as coor:
            store = coor.store("x")
            if coor.rank == 1:
                store.set("word", b"no number")
                with pytest.raises(CoordinatorError):
                    store.add("word", 1)
            coor.barrier()
            coor.put(f"key{coor.rank}", b"still served")
            return coor.wait("key0") == coor.wait("key1")

    assert ranks(body, 2) == [True, True]
