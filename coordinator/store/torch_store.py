"""A torch Store over the PrefixStore of a group, for libraries that need one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count

from torch.distributed import DistNetworkError, DistStoreError, Store

from coordinator.call_site import PendingCall, begin_call
from coordinator.errors import CoordinatorError, CoordinatorTimeout, PeerLost
from coordinator.store.prefix_store import PrefixStore

Wait = Callable[[PrefixStore, Sequence[str], PendingCall], list[bytes]]


class StoreTimeout(CoordinatorTimeout, DistStoreError):
    """A deadline passed: our error, and torch's."""


class StoreLost(PeerLost, DistNetworkError):
    """Rank 0 is gone: our error, and torch's."""


class StoreFailed(CoordinatorError, DistStoreError):
    """Any other error: a closed Coordinator, or a request that rank 0 cannot serve."""


class TorchStore(Store):
    """torch's Store, which only ranks that know the launch secret can reach."""

    def __init__(self, store: PrefixStore, wait: Wait, timeout_s: float) -> None:
        """wait: waits for keys, and raises once a rank that could put them has died."""
        super().__init__()
        self._store, self._wait_for = store, wait
        self._numbers = count(1)
        self.set_timeout(timedelta(seconds=timeout_s))

    @contextmanager
    def _call(self, name: str, timeout: timedelta | None = None) -> Iterator[PendingCall]:
        limit: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        try:
            yield begin_call(f"store.{name}", next(self._numbers), limit.total_seconds())
        except CoordinatorTimeout as error:
            raise StoreTimeout(str(error)) from error
        except PeerLost as error:
            raise StoreLost(str(error), error.failures) from error
        except CoordinatorError as error:
            raise StoreFailed(str(error)) from error

    def set(self, key: str, value: bytes | str) -> None:
        with self._call("set") as call:
            self._store.put(key, _bytes(value), call)

    def get(self, key: str) -> bytes:
        with self._call("get") as call:
            return self._wait_for(self._store, [key], call)[0]

    def add(self, key: str, amount: int) -> int:
        with self._call("add") as call:
            return self._store.add(key, amount, call)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        with self._call("compare_set") as call:
            return self._store.swap(key, _bytes(expected), _bytes(desired), call)

    def check(self, keys: Sequence[str]) -> bool:
        with self._call("check") as call:
            return all(self._store.get(key, call) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        with self._call("wait", timeout) as call:
            self._wait_for(self._store, list(keys), call)

    def delete_key(self, key: str) -> bool:
        with self._call("delete_key") as call:
            return self._store.delete(key, call)

    def num_keys(self) -> int:
        with self._call("num_keys") as call:
            return self._store.count(call)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._call("multi_get") as call:
            return self._wait_for(self._store, list(keys), call)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
