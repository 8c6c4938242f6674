"""Some rank first and the others after it, or some rank for all: through keys, not collectives.

Who fails says why, so that nobody waits for what will not come.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coordinator.blame import Watch
from coordinator.calls import caller
from coordinator.errors import CoordinatorError, CoordinatorTimeout, PeerLost
from coordinator.keys import Keys
from coordinator.vitals import Process
from coordinator.wire import pack, unpack

EXIT_S = 0.5  # a process that ends closes its connections first


class Turns:
    """What one rank needs to wait for another that does something first."""

    def __init__(self, keys: Keys, rank: int, watch: Watch | None) -> None:
        self._keys, self._rank, self._watch = keys, rank, watch

    @contextmanager
    def first(self, key: str, first: int, timeout_s: float) -> Iterator[None]:
        """Run the body on rank first, and on the others once it has ended there."""
        if self._rank != first:
            self._outcome(key, first, timeout_s)
            yield
            return
        try:
            yield
        except BaseException as error:
            self._put_failure(key, error)
            raise
        self._put(key, b"")

    def once(self, key: str, work: Callable[[], bytes], timeout_s: float) -> bytes:
        """What work returned to whoever came first."""
        mine = str(self._rank).encode()
        chosen = int(self._keys.swap(f"{key}/who", b"", mine))
        done = self._keys.get(key)
        if done is not None:
            return self._result(done, chosen)
        if chosen != self._rank:
            return self._outcome(key, chosen, timeout_s)
        try:
            found = work()
            if not isinstance(found, bytes):
                raise TypeError(f"the work of once() returned {type(found).__name__}, not bytes")
        except BaseException as error:
            self._put_failure(key, error)
            raise
        self._put(key, found)
        return found

    def _put(self, key: str, found: bytes) -> None:
        self._keys.put(key, pack((True, found)))

    def _put_failure(self, key: str, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        try:
            self._keys.put(key, pack((False, text.encode())))
        except CoordinatorError:
            pass  # rank 0 is gone, which the others see by themselves

    def _outcome(self, key: str, who: int, timeout_s: float) -> bytes:
        """What came of it at rank who. Raises CoordinatorError with its traceback if it failed."""
        assert self._watch is not None
        peer, lost = self._watch.peers[who], self._watch.session.lost
        process = Process(peer)
        since = time.monotonic()

        def gone() -> PeerLost:
            how = process.state() if process.is_dead() else "is gone"
            return PeerLost(
                f"rank {self._rank} waited {time.monotonic() - since:.1f} s ({caller()}) for "
                f"{peer}, which was to go first but {how}. Look at what it printed last."
            )

        def idle() -> None:
            if (process.is_dead() or peer.rank in lost) and self._keys.get(key) is None:
                raise gone()

        try:
            return self._result(self._keys.wait([key], timeout_s, idle)[0], who)
        except PeerLost as error:
            if not process.dies_within(EXIT_S):
                raise
            raise gone() from error
        except CoordinatorTimeout as error:
            raise CoordinatorTimeout(
                f"rank {self._rank} waited {timeout_s:g} s ({caller()}) for {peer} to go first; it "
                f"is {process.state()}. Give a longer timeout_s, or look at what it does."
            ) from error
        finally:
            process.close()

    def _result(self, found: bytes, who: int) -> bytes:
        good, data = unpack(found)
        if not good:
            peer = self._watch.peers[who] if self._watch is not None else "this rank"
            raise CoordinatorError(
                f"rank {self._rank}: {peer} went first and failed:\n{data.decode()}"
            )
        return bytes(data)
