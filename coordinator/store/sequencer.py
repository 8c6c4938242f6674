"""Some rank first and the others after it, or some rank for all: through keys, not collectives.

Who fails says why, so that nobody waits for what will not come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coordinator.call_site import Waiting, traceback_of
from coordinator.control.framing import pack, unpack
from coordinator.errors import CoordinatorError, CoordinatorTimeout
from coordinator.failure.detector import FailureDetector
from coordinator.store.prefix_store import Keys

TELL_S = 5.0  # for saying that it failed, whatever its own deadline
OUTCOME, WHO = "outcome", "who"


class Turns:
    """What one rank needs to wait for another that does something first.

    Ranks are those of the launch. keys: of this one turn.
    """

    def __init__(self, keys: Keys, rank: int, detector: FailureDetector | None) -> None:
        self._keys, self._rank, self._detector = keys, rank, detector

    @contextmanager
    def first(self, first: int, waiting: Waiting) -> Iterator[None]:
        """Run the body on rank first, and on the others once it has ended there."""
        if self._rank != first:
            self._outcome(first, waiting)
            yield
            return
        with self._telling(waiting):
            yield
        self._put(b"", waiting)

    def once(self, work: Callable[[], bytes], waiting: Waiting) -> bytes:
        """What work returned to whoever came first."""
        chosen = int(self._keys.swap(WHO, b"", str(self._rank).encode(), waiting))
        done = self._keys.get(OUTCOME, waiting)
        if done is not None:
            return self._result(done, chosen, waiting)
        if chosen != self._rank:
            return self._outcome(chosen, waiting)
        with self._telling(waiting):
            found = work()
            if not isinstance(found, bytes):
                raise TypeError(
                    f"rank {self._rank}: the work of once() returned {type(found).__name__}, not "
                    "bytes"
                )
        self._put(found, waiting)
        return found

    @contextmanager
    def _telling(self, waiting: Waiting) -> Iterator[None]:
        """If the body raises, the others hear why."""
        try:
            yield
        except BaseException as error:
            self._put_failure(error, waiting)
            raise

    def _put(self, found: bytes, waiting: Waiting) -> None:
        """The body has a time of its own: what it took is not taken from the deadline."""
        self._keys.put(OUTCOME, pack((True, found)), waiting.anew())

    def _put_failure(self, error: BaseException, waiting: Waiting) -> None:
        told = pack((False, traceback_of(error).encode()))
        try:
            self._keys.put(OUTCOME, told, waiting.anew(TELL_S))
        except CoordinatorError:
            pass  # rank 0 is gone, which the others see by themselves

    def _outcome(self, who: int, waiting: Waiting) -> bytes:
        """What came of it at rank who. Raises CoordinatorError with its traceback if it failed."""
        assert self._detector is not None
        try:
            (found,) = self._keys.wait([OUTCOME], waiting, lambda: self._look(who, waiting))
        except CoordinatorTimeout as error:
            raise CoordinatorTimeout(
                f"rank {self._rank} waited {waiting.timeout_s:g} s in {waiting.call} for "
                f"{self._detector.describe_ranks([who])} to go first. Give a longer timeout_s, or "
                "look at what it does."
            ) from error
        return self._result(found, who, waiting)

    def _look(self, who: int, waiting: Waiting) -> None:
        """Raise if rank who will not say any more how it went."""
        assert self._detector is not None
        is_done = lambda: self._keys.get(OUTCOME, waiting) is not None  # noqa: E731
        self._detector.check_members([who], waiting, is_done)

    def _result(self, found: bytes, who: int, waiting: Waiting) -> bytes:
        good, data = unpack(found)
        if not good:
            peer = "this rank"
            if self._detector is not None:
                peer = next(str(peer) for peer in self._detector.peers if peer.rank == who)
            raise CoordinatorError(
                f"rank {self._rank}: {peer} went first in {waiting.call} and failed:\n"
                f"{data.decode()}"
            )
        return bytes(data)
