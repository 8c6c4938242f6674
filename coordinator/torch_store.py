"""The keys of a group as a torch Store, for libraries that meet in one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from coordinator.keys import Keys


class TorchStore(Store):
    """torch's Store over ours: only ranks that know the launch secret reach it."""

    def __init__(self, keys: Keys, timeout_s: float) -> None:
        super().__init__()
        self._keys = keys
        self.set_timeout(timedelta(seconds=timeout_s))

    def _limit_s(self) -> float:
        limit: timedelta = self.timeout  # type: ignore[attr-defined]
        return limit.total_seconds()

    def set(self, key: str, value: bytes | str) -> None:
        self._keys.put(key, _bytes(value))

    def get(self, key: str) -> bytes:
        return self._keys.wait([key], self._limit_s())[0]

    def add(self, key: str, amount: int) -> int:
        return self._keys.add(key, amount)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._keys.swap(key, _bytes(expected), _bytes(desired))

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._keys.get(key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit_s = self._limit_s() if timeout is None else timeout.total_seconds()
        self._keys.wait(list(keys), limit_s)

    def delete_key(self, key: str) -> bool:
        return self._keys.delete(key)

    def num_keys(self) -> int:
        return self._keys.count()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._keys.wait(list(keys), self._limit_s())

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
