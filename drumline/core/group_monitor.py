"""Ends the waits of this rank when another rank of the model fails, and names that rank.

monitor = GroupMonitor(coor, [comm], layers_by_rank)     # coor: over all ranks of the model
token = monitor.waiting(lambda: comm.recv(token, 1))     # PeerLost names the first rank that failed

The failure detector is the Coordinator's: this subscribes to it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch

from communicator import Communicator, Unsupported
from coordinator import Coordinator, CoordinatorError, DrumlineError, FailureReason, RankFailure
from drumline.errors import PeerLost
from drumline.timings import TIMINGS

log = logging.getLogger("drumline")

T = TypeVar("T")


class GroupMonitor:
    """Aborts the communicators of this rank when a rank of the model fails.

    comms: in which this rank waits for others. layers_by_rank: in words, for errors.
    is_driven: only the first rank calls the model, and all others wait for it as long as it likes.
        So only that rank treats a host that does not answer as failed.

    A suspended rank fails the model whether anybody waits for it or not: the next call would.
    """

    def __init__(
        self,
        coor: Coordinator,
        comms: Iterable[Communicator],
        layers_by_rank: Mapping[int, str],
        *,
        is_driven: bool = True,
    ):
        self.coor, self.layers_by_rank, self._comms = coor, layers_by_rank, list(comms)
        self.waits: list[None] = []  # one for each thread that waits for other ranks
        self._may_wait = coor.rank == 0 or not is_driven
        self._subscription = coor.on_failure(self._on_failure, is_waiting=self._is_waiting)
        self._suspensions = coor.on_failure(self._on_suspended, unreachable_s=math.inf)

    def close(self) -> None:
        self._suspensions.close()
        self._subscription.close()

    @property
    def has_failed(self) -> bool:
        """True once a rank has failed, so that this one must not wait for others any longer."""
        reasons = (failure.reason for failure in self._subscription.failures)
        return any(reason is not FailureReason.LEFT for reason in reasons)

    def waiting(self, work: Callable[[], T]) -> T:
        """The result of work, which waits for other ranks; PeerLost if one of them fails."""
        self.waits.append(None)
        try:
            return work()
        except DrumlineError as error:
            self.raise_cause(error)
            raise
        finally:
            self.waits.pop()

    def broadcast(self, data: bytes) -> bytes:
        """The data of the first rank. Collective."""
        return self.waiting(lambda: self.coor.broadcast(data))

    def raise_cause(self, error: Exception) -> None:
        """Raise PeerLost for the rank whose failure an error follows from, if there is one."""
        # After a deadline there is nothing to wait for; a broken connection is noticed first.
        is_late = isinstance(error, TimeoutError)
        failures = _failures(self.coor, 0.0 if is_late else TIMINGS.failure_notice_s)
        if failures:
            me, layers = self.coor.ranks[self.coor.rank], self.layers_by_rank[failures[0].rank]
            raise PeerLost(
                f"rank {me} lost {failures[0]}, which holds {layers}, so the model cannot run any "
                "longer.",
                failures,
                advice=f"Start all ranks again. ({_group_error(self.coor) or error})",
            ) from error

    def _is_waiting(self) -> bool:
        return self._may_wait and (bool(self.waits) or any(map(_has_queued_work, self._comms)))

    def _on_suspended(self, failure: RankFailure) -> None:
        if failure.reason is FailureReason.SUSPENDED:
            self.coor.report_failure(failure.rank, failure.reason.value)

    def _on_failure(self, failure: RankFailure) -> None:
        # A rank that left in good order has sent all it had to, which may still be read.
        if failure.reason is FailureReason.LEFT:
            return
        # Reported before this rank aborts: for the others the abort would be the first failure.
        if failure.reason.may_recover:
            self.coor.report_failure(failure.rank, failure.reason.value)
        for comm in self._comms:
            try:
                comm.abort()
            except Unsupported as error:  # gloo, MPI: they notice the end of a process themselves
                if failure.reason.may_recover:
                    log.warning("%s keeps this rank waiting. %s", failure, error)


class MonitoredCommunicator:
    """The collectives that sharded layers call, ended by a GroupMonitor."""

    def __init__(self, comm: Communicator, monitor: GroupMonitor):
        self.comm, self.monitor = comm, monitor
        self.rank, self.world_size, self.coor = comm.rank, comm.world_size, comm.coor

    def allreduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.monitor.waiting(lambda: self.comm.allreduce(x))

    def allgather(self, x: torch.Tensor) -> torch.Tensor:
        return self.monitor.waiting(lambda: self.comm.allgather(x))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return self.monitor.waiting(lambda: self.comm.reduce_scatter(x))


@contextlib.contextmanager
def monitored_loading(coor: Coordinator, holds: Callable[[int], str]) -> Iterator[None]:
    """Within this block, a rank that dies or is suspended is PeerLost on every rank.

    holds: the part of the model that a rank is to get, in words, as far as that is known by then.
    """

    def report(failure: RankFailure) -> None:
        if failure.reason.may_recover:
            coor.report_failure(failure.rank, failure.reason.value)

    with coor.on_failure(report, unreachable_s=TIMINGS.busy_master_s):
        try:
            yield
        except PeerLost as error:
            failures = error.failures or _failures(coor, TIMINGS.failure_notice_s)
            parts = {failure.rank: holds(failure.rank) for failure in failures}
            lost = "".join(f" Rank {r} was to hold {part}." for r, part in parts.items() if part)
            raise PeerLost(f"{_group_error(coor) or error}{lost}", failures) from error


def _failures(coor: Coordinator, wait_s: float) -> tuple[RankFailure, ...]:
    """The failed ranks, the first to fail first; none if the Coordinator is closed."""
    try:
        return coor.failures(wait_s=wait_s)
    except CoordinatorError:
        return ()


def _group_error(coor: Coordinator) -> CoordinatorError | None:
    """The failure that broke the group, on all of its ranks."""
    try:
        coor.check()
    except CoordinatorError as error:
        return error
    return None


def _has_queued_work(comm: Communicator) -> bool:
    """On CUDA a call is only enqueued, and it is the stream that waits."""
    if comm.device.type != "cuda":
        return False
    try:
        return not torch.cuda.default_stream(comm.device).query()
    except RuntimeError:  # it is broken, or a graph is captured
        return True
