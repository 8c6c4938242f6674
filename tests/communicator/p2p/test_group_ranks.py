"""Groups of some ranks of a Coordinator, which meet when they are first used."""

import threading

import pytest
import torch
from torch.distributed import HashStore

from communicator import Communicator, CommunicatorError, CommunicatorTimeout
from communicator.p2p.group_ranks import GroupRanks, meet
from communicator.torch_interop.lazy_communicators import LazyCommunicators

WORLD = 4


def on_threads(call, items):
    """What call(item) returns or raises for each item, at the same time."""
    found = {}

    def rank_of(index, item):
        try:
            found[index] = call(item)
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=rank_of, args=pair) for pair in enumerate(items)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(len(items))]


@pytest.fixture
def wholes():
    """The Coordinators of ranks that met in a store."""
    store = HashStore()
    coordinators = on_threads(lambda rank: meet(store, rank, WORLD, 20.0), range(WORLD))
    yield coordinators
    for coor in coordinators:
        coor.close()


def test_a_group_exchanges_nothing_until_it_is_used_and_names_a_rank_that_stays_away(wholes):
    pair = [GroupRanks(wholes[rank], [3, 1], "pair", 20.0) for rank in (3, 1)]
    assert [(ranks.rank, ranks.rank_name()) for ranks in pair] == [(0, "rank 3"), (1, "rank 1")]
    gathered = on_threads(lambda ranks: ranks.coordinator().allgather(b"%d" % ranks.rank), pair)
    assert gathered == [[b"0", b"1"]] * 2
    alone = GroupRanks(wholes[3], [3, 1], "other", 0.3)
    with pytest.raises(CommunicatorTimeout, match=r"rank 3 .* rank 1 \(host .*, pid"):
        alone.coordinator()


def test_groups_of_the_same_ranks_meet_by_name_in_whatever_order_they_are_first_used(wholes):
    """Each is used by a thread of its own, so that nothing orders them."""

    def use(coor, names):
        groups = {name: GroupRanks(coor, [0, 1], name, 20.0) for name in "ab"}
        on_threads(lambda name: groups[name].coordinator(), names)
        return {name: groups[name].coordinator().broadcast(name.encode()) for name in "ab"}

    heard = on_threads(lambda pair: use(*pair), [(wholes[0], "ab"), (wholes[1], "ba")])
    assert heard == [{"a": b"a", "b": b"b"}] * 2


def test_a_group_heeds_what_its_caller_noticed_as_long_as_it_meets(wholes):
    ranks = GroupRanks(wholes[0], [0, 1], "pair", 20.0)

    def fail():
        raise CommunicatorError("rank 1 has left")

    ranks.check_more = fail
    with pytest.raises(CommunicatorError, match="rank 1 has left"):
        ranks.coordinator()


def test_a_wait_ends_when_its_group_is_closed_and_other_groups_meet_meanwhile(wholes):
    waiting = GroupRanks(wholes[0], [0, 1], "pair", 60.0)
    errors = []

    def wait():
        with pytest.raises(CommunicatorError, match="destroyed") as caught:
            waiting.coordinator()
        errors.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    others = [GroupRanks(coor, [0, 1], "other", 20.0) for coor in wholes[:2]]
    gathered = on_threads(lambda ranks: ranks.coordinator().allgather(b""), others)
    assert gathered == [[b"", b""]] * 2
    waiting.close()
    thread.join()
    assert errors


def test_close_ends_a_communicator_that_is_being_opened(wholes):
    """Rank 1 has met the group, and does not choose a backend."""
    pair = [GroupRanks(coor, [0, 1], "pair", 60.0) for coor in wholes[:2]]
    on_threads(lambda ranks: ranks.coordinator(), pair)
    comms = LazyCommunicators(pair[0], ("cpu",))
    errors = []

    def open_cpu():
        try:
            comms.of("cpu")
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=open_cpu)
    thread.start()
    while pair[0].coordinator().pending_call() is None and thread.is_alive():
        pass
    comms.close()
    thread.join()
    assert len(errors) == 1


def test_ranks_of_a_store_sum_over_connections_of_their_own(wholes):
    def total(coor):
        with Communicator(coor, "tcp") as comm:
            return comm.allreduce(torch.tensor([float(comm.rank)])).item()

    assert on_threads(total, wholes) == [6.0] * WORLD


def test_a_communicator_over_a_store_closes_the_coordinator_that_it_made():
    store = HashStore()

    def total(rank):
        with Communicator.over(store, rank, 2, timeout_s=20.0) as comm:
            sum_ = comm.allreduce(torch.tensor([float(rank)])).item()
        with pytest.raises(Exception, match="closed Coordinator"):
            comm.coor.barrier()
        return sum_

    assert on_threads(total, range(2)) == [1.0, 1.0]
