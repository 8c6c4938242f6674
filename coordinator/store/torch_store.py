"""The keys of a group as a torch Store, for libraries that meet in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count

from torch.distributed import DistNetworkError, DistStoreError, Store

from coordinator.call_site import Waiting, waiting
from coordinator.errors import CoordinatorError, CoordinatorTimeout, PeerLost
from coordinator.store.prefix_store import Keys

Wait = Callable[[Keys, Sequence[str], Waiting], list[bytes]]


class StoreTimeout(CoordinatorTimeout, DistStoreError):
    """A deadline passed: for those who know our errors, and for those who know torch's."""


class StoreLost(PeerLost, DistNetworkError):
    """Rank 0 is gone: for those who know our errors, and for those who know torch's."""


class StoreFailed(CoordinatorError, DistStoreError):
    """What is left: a closed Coordinator, or what rank 0 cannot do."""


class TorchStore(Store):
    """torch's Store over ours: only ranks that know the launch secret reach it."""

    def __init__(self, keys: Keys, wait: Wait, timeout_s: float) -> None:
        """wait: for keys that somebody shall put, unless one of those who could has died."""
        super().__init__()
        self._keys, self._wait_for = keys, wait
        self._numbers = count(1)
        self.set_timeout(timedelta(seconds=timeout_s))

    @contextmanager
    def _call(self, name: str, timeout: timedelta | None = None) -> Iterator[Waiting]:
        limit: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        try:
            yield waiting(f"store.{name}", next(self._numbers), limit.total_seconds())
        except CoordinatorTimeout as error:
            raise StoreTimeout(str(error)) from error
        except PeerLost as error:
            raise StoreLost(str(error), error.failures) from error
        except CoordinatorError as error:
            raise StoreFailed(str(error)) from error

    def set(self, key: str, value: bytes | str) -> None:
        with self._call("set") as call:
            self._keys.put(key, _bytes(value), call)

    def get(self, key: str) -> bytes:
        with self._call("get") as call:
            return self._wait_for(self._keys, [key], call)[0]

    def add(self, key: str, amount: int) -> int:
        with self._call("add") as call:
            return self._keys.add(key, amount, call)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        with self._call("compare_set") as call:
            return self._keys.swap(key, _bytes(expected), _bytes(desired), call)

    def check(self, keys: Sequence[str]) -> bool:
        with self._call("check") as call:
            return all(self._keys.get(key, call) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        with self._call("wait", timeout) as call:
            self._wait_for(self._keys, list(keys), call)

    def delete_key(self, key: str) -> bool:
        with self._call("delete_key") as call:
            return self._keys.delete(key, call)

    def num_keys(self) -> int:
        with self._call("num_keys") as call:
            return self._keys.count(call)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._call("multi_get") as call:
            return self._wait_for(self._keys, list(keys), call)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
