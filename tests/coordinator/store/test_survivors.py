"""Ranks that go on after a failure, in a launch of their own."""

import os
import signal

import launcher
from coordinator import Coordinator, PeerLost


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
