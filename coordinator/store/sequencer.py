"""Sequencing: one rank runs a block before the others, or one rank for all, through the store.

It needs no collective call: ranks of other nodes need not take part. A rank that fails stores why,
so that nobody waits for what will not come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from coordinator.call_site import PendingCall, traceback_of
from coordinator.control.framing import pack, unpack
from coordinator.errors import CoordinatorError, CoordinatorTimeout, PeerLost
from coordinator.failure.detector import FailureDetector
from coordinator.store.prefix_store import PrefixStore
from coordinator.timings import DEFAULT

OUTCOME, FIRST = "outcome", "first"  # keys: what came of the block, and the rank that runs it


class Sequencer:
    """Lets one rank run a block before the others. Ranks are those of the launch.

    store: of this one block. detector: of the group, None if that is this rank alone.
    """

    def __init__(self, store: PrefixStore, rank: int, detector: FailureDetector | None) -> None:
        self._store, self._rank, self._detector = store, rank, detector

    @contextmanager
    def first(self, first: int, pending: PendingCall) -> Iterator[None]:
        """Run the body on rank first, and on the others once it has ended there."""
        if self._rank != first:
            self._wait_for_outcome(first, pending)
            yield
            return
        with self._storing_failure(pending):
            yield
        self._put(b"", pending)

    def once(self, work: Callable[[], bytes], pending: PendingCall) -> bytes:
        """The result of work() on the rank that came first."""
        first = int(self._store.swap(FIRST, b"", str(self._rank).encode(), pending))
        outcome = self._store.get(OUTCOME, pending)
        if outcome is not None:
            return self._result(outcome, first, pending)
        if first != self._rank:
            return self._wait_for_outcome(first, pending)
        with self._storing_failure(pending):
            result = work()
            if not isinstance(result, bytes):
                raise TypeError(
                    f"rank {self._rank}: the work of once() returned {type(result).__name__}, not "
                    "bytes"
                )
        try:
            self._put(result, pending)
        except (CoordinatorTimeout, PeerLost):  # it may be there nevertheless
            raise
        except CoordinatorError as error:
            self._put_failure(error, pending)
            raise
        return result

    @contextmanager
    def _storing_failure(self, pending: PendingCall) -> Iterator[None]:
        """Run the body; if it raises, store why for the others."""
        try:
            yield
        except BaseException as error:
            self._put_failure(error, pending)
            raise

    def _put(self, result: bytes, pending: PendingCall) -> None:
        """Store the result; the time of the body is not part of the deadline."""
        self._store.put(OUTCOME, pack((True, result)), pending.restarted())

    def _put_failure(self, error: BaseException, pending: PendingCall) -> None:
        outcome = pack((False, traceback_of(error).encode(errors="backslashreplace")))
        with suppress(CoordinatorError):  # rank 0 is gone, which the others see by themselves
            self._store.put(OUTCOME, outcome, pending.restarted(DEFAULT.failed_turn_s))

    def _wait_for_outcome(self, first: int, pending: PendingCall) -> bytes:
        """The result of rank first. Raises CoordinatorError with its traceback if it failed."""
        assert self._detector is not None
        try:
            (outcome,) = self._store.wait([OUTCOME], pending, lambda: self._check(first, pending))
        except CoordinatorTimeout as error:
            raise CoordinatorTimeout(
                f"rank {self._rank} waited {pending.waited_s:.1f} s in {pending.call} for "
                f"{self._detector.monitor.describe([first])} to go first. Give a longer timeout_s, "
                f"or look at what it does. ({error})"
            ) from error
        return self._result(outcome, first, pending)

    def _check(self, first: int, pending: PendingCall) -> None:
        """Raise if rank first failed before it could store an outcome."""
        assert self._detector is not None
        self._detector.check_members(
            [first], pending, lambda: self._store.get(OUTCOME, pending) is not None
        )

    def _result(self, outcome: bytes, first: int, pending: PendingCall) -> bytes:
        is_ok, data = unpack(outcome)
        if not is_ok:
            peer = "this rank"
            if self._detector is not None:
                peer = next(str(peer) for peer in self._detector.peers if peer.rank == first)
            raise CoordinatorError(
                f"rank {self._rank}: {peer} went first in {pending.call} and failed:\n"
                f"{data.decode()}"
            )
        return bytes(data)
