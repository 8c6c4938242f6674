"""Values by name that the ranks of a group share: at rank 0, or here if there is but one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coordinator.client import HubGone
from coordinator.errors import CoordinatorTimeout, PeerLost
from coordinator.session import Session
from coordinator.wire import Late, nothing

ANSWER_S = 60.0  # for what rank 0 answers at once, unless it is stopped


class Keys:
    """The values of one group, under names of their own."""

    def __init__(self, prefix: str, session: Session | None, rank: int) -> None:
        self.prefix, self._session, self._rank = prefix, session, rank
        self._alone: dict[str, bytes] = {}

    def below(self, name: str) -> Keys:
        """Those whose names begin with name/."""
        found = Keys(f"{self.prefix}/{name}", self._session, self._rank)
        found._alone = self._alone
        return found

    def put(self, key: str, value: bytes) -> None:
        if self._session is None:
            self._alone[self._name(key)] = value
        else:
            self._ask("set", self._name(key), value)

    def get(self, key: str) -> bytes | None:
        if self._session is None:
            return self._alone.get(self._name(key))
        found = self._ask("get", self._name(key))
        return None if found is None else bytes(found)

    def wait(
        self, keys: Sequence[str], timeout_s: float, idle: Callable[[], None] = nothing
    ) -> list[bytes]:
        """The values of all of them, once there. idle is called now and then, and may raise."""
        names = [self._name(key) for key in keys]
        if self._session is not None:
            return list(self._ask("await", names, timeout_s=timeout_s, idle=idle, what=keys))
        missing = [key for key in keys if self._name(key) not in self._alone]
        if missing:
            raise CoordinatorTimeout(
                f"rank {self._rank}: nobody but this rank could put {missing}, and it has not"
            )
        return [self._alone[name] for name in names]

    def add(self, key: str, amount: int) -> int:
        if self._session is not None:
            return int(self._ask("add", self._name(key), amount))
        total = int(self._alone.get(self._name(key), b"0")) + amount
        self._alone[self._name(key)] = str(total).encode()
        return total

    def swap(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Put value if expected is there (nothing: if nothing is); what is there afterwards."""
        if self._session is not None:
            return bytes(self._ask("swap", self._name(key), expected, value))
        there = self._alone.get(self._name(key))
        if there is None and expected:
            return expected
        if (there or b"") == expected:
            self._alone[self._name(key)] = value
            return value
        return there or b""

    def delete(self, key: str) -> bool:
        if self._session is None:
            return self._alone.pop(self._name(key), None) is not None
        return bool(self._ask("delete", self._name(key)))

    def count(self) -> int:
        if self._session is None:
            return sum(name.startswith(f"{self.prefix}/") for name in self._alone)
        return int(self._ask("count", f"{self.prefix}/"))

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def _ask(
        self,
        op: str,
        *arguments: Any,
        timeout_s: float = ANSWER_S,
        idle: Callable[[], None] = nothing,
        what: Any = "",
    ) -> Any:
        assert self._session is not None
        try:
            return self._session.ask(op, *arguments, timeout_s=timeout_s, idle=idle)
        except Late as error:
            raise CoordinatorTimeout(
                f"rank {self._rank} waited {timeout_s:g} s for {what or 'an answer of rank 0'}. "
                "Nobody has put it, or rank 0 is stopped or cut off: look at what it does."
            ) from error
        except HubGone as error:
            raise PeerLost(
                f"rank {self._rank}: rank 0 of the launch, which keeps what ranks put, is gone "
                f"({error}). Look at what it printed last."
            ) from error
