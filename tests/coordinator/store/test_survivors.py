"""Ranks that go on after a failure, in a launch of their own."""

import os
import signal
import threading
import time

import launcher
from coordinator import Coordinator, CoordinatorTimings, PeerLost


def regroup(victims):
    """The ranks that go on, and this one's place; None on a rank that is released."""
    with Coordinator() as coor:
        if coor.is_master():
            launcher.outlive_failures(coor.info)
        coor.barrier()
        if coor.rank in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            coor.barrier()
        except PeerLost:
            pass
        info = coor.survivors(release=not victims)
        if info is None:
            return None
        with Coordinator(info) as now:
            places = [now.rank, now.local_rank, now.local_world_size]
            return [places, [int(rank) for rank in now.allgather(str(coor.rank).encode())]]


def test_the_others_go_on_whichever_ranks_are_killed():
    ranks = launcher.launch(regroup, 5, args=([1, 3],))
    assert ranks == [[[0, 0, 3], [0, 2, 4]], None, [[1, 1, 3], [0, 2, 4]], None] + [
        [[2, 2, 3], [0, 2, 4]]
    ]


def test_rank_0_can_release_the_others():
    assert launcher.launch(regroup, 3, args=([],)) == [[[0, 0, 1], [0]], None, None]


def test_a_rank_that_calls_before_rank_0_goes_on_though_another_never_calls(ranks):
    """It gave up at its deadline, shortly before that of rank 0, which answered only then."""
    all_done = threading.Barrier(3)

    def body(info):
        with Coordinator(info) as coor:
            place = None
            if coor.rank < 2:
                time.sleep(0.2 * coor.is_master())
                now = coor.survivors(timeout_s=2)
                os.close(int(now.extras.get("master_fd", os.dup(0))))
                place = now.rank, now.world_size
            all_done.wait(20)
            return place

    assert ranks(body, 3) == [(0, 2), (1, 2), None]


def test_a_host_that_does_not_answer_is_waited_for_as_long_as_silence_is_borne(ranks):
    """After two seconds the others went on without its ranks, whatever the patience."""

    def body(info):
        with Coordinator(info, timings=CoordinatorTimings(silent_s=60.0)) as coor:
            if coor.is_master():
                table = coor._session.server._membership
                table._silent_s, table._is_unreachable = lambda: 0.0, lambda member: True
            coor.barrier()
            time.sleep(0.5 * (not coor.is_master()))
            now = coor.survivors(timeout_s=5)
            os.close(int(now.extras.get("master_fd", os.dup(0))))
            return now.world_size

    assert ranks(body, 2) == [2, 2]


def test_a_rank_that_dies_after_it_has_called_does_not_go_on(fork):
    """The others waited for it in their new launch, where nobody could see that it had ended."""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            coor.barrier()
            if coor.rank == 2:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
            time.sleep(1.0 * (coor.rank == 1))
            now = coor.survivors()
            os.close(int(now.extras.get("master_fd", os.dup(0))))
            return now.world_size

    assert [rank.value for rank in fork(body, 3).outcomes()] == [2, 2, None]
