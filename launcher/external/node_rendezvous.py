"""The rendezvous of nodes that have a launch command each, once, before any rank starts."""

from __future__ import annotations

import contextlib

from launcher import errors, timings
from launcher.external.node_follower import NodeFollower
from launcher.external.node_leader import NodeLeader
from launcher.job import Job
from launcher.system import stop_signals
from launcher.system.stop_signals import Stopped


def meet(job: Job) -> Job:
    """The job of this node's ranks, once the nodes have all come to the first, at master_addr.

    Prints every few seconds which nodes are awaited. Raises LaunchTimeout at the deadline, which is
    the job's, and LaunchError if this node does not belong to the launch that it finds.
    """
    limit_s = timings.TIMINGS.node_wait_s if job.timeout_s is None else job.timeout_s

    def stop(number: int) -> None:
        raise Stopped(number)

    try:
        with stop_signals.handled_by(stop):
            return _meet(job, limit_s)
    except Stopped as stopped:
        raise errors.interrupted(stopped.number) from None
    except errors.LaunchError as error:
        error.has_begun = False
        raise


def _meet(job: Job, limit_s: float) -> Job:
    if job.node_rank == 0:
        with contextlib.closing(NodeLeader(job)) as leader:
            try:
                return leader.meet(limit_s)
            except Stopped as stopped:
                how = errors.interrupted(stopped.number)
                leader.end(f"the command of the first node was {how}")
                raise
    with contextlib.closing(NodeFollower(job)) as follower:
        attempt = follower.join(limit_s)
    assert attempt is not None  # a leader that does not stay ends with an error alone
    return attempt
