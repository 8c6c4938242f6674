"""Values by name that the ranks of a group share: at rank 0, or here if there is but one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coordinator.call_site import Waiting
from coordinator.control.client import HubGone
from coordinator.control.framing import Late, nothing
from coordinator.control.session import Session
from coordinator.errors import CoordinatorTimeout, PeerLost
from coordinator.failure.detector import LAST_ANSWER_S

KEPT = "which keeps what ranks put"


class Keys:
    """The values below some names, which are told apart whatever characters they have.

    rank: of the launch. Every method raises CoordinatorTimeout at the deadline of the call that it
    is part of, and PeerLost once rank 0 is gone.
    """

    def __init__(self, prefix: str, session: Session | None, rank: int) -> None:
        self.prefix, self._session, self._rank = prefix, session, rank
        self._alone: dict[str, bytes] = {}

    def below(self, *names: str) -> Keys:
        found = Keys(self.prefix + "".join(map(_quoted, names)), self._session, self._rank)
        found._alone = self._alone
        return found

    def put(self, key: str, value: bytes, waiting: Waiting) -> None:
        if self._session is None:
            self._alone[self._name(key)] = value
        else:
            self._ask(waiting, "set", self._name(key), value)

    def get(self, key: str, waiting: Waiting) -> bytes | None:
        if self._session is None:
            return self._alone.get(self._name(key))
        found = self._ask(waiting, "get", self._name(key))
        return None if found is None else bytes(found)

    def wait(
        self, keys: Sequence[str], waiting: Waiting, idle: Callable[[], None] = nothing
    ) -> list[bytes]:
        """The values of all of them, once there. idle is called now and then, and may raise."""
        names = [self._name(key) for key in keys]
        if self._session is not None:
            return list(self._ask(waiting, "wait", names, idle=idle, what=keys))
        missing = [key for key in keys if self._name(key) not in self._alone]
        if missing:
            raise CoordinatorTimeout(
                f"rank {self._rank} would wait in {waiting.call} for {missing} for ever: nobody "
                "but this rank could put it, and it has not"
            )
        return [self._alone[name] for name in names]

    def add(self, key: str, amount: int, waiting: Waiting) -> int:
        if self._session is not None:
            return int(self._ask(waiting, "add", self._name(key), amount))
        total = int(self._alone.get(self._name(key), b"0")) + amount
        self._alone[self._name(key)] = str(total).encode()
        return total

    def swap(self, key: str, expected: bytes, value: bytes, waiting: Waiting) -> bytes:
        """Put value if expected is there (nothing: if nothing is); what is there afterwards."""
        if self._session is not None:
            return bytes(self._ask(waiting, "swap", self._name(key), expected, value))
        there = self._alone.get(self._name(key))
        if there is None and expected:
            return expected
        if (there or b"") == expected:
            self._alone[self._name(key)] = value
            return value
        return there or b""

    def delete(self, key: str, waiting: Waiting) -> bool:
        if self._session is None:
            return self._alone.pop(self._name(key), None) is not None
        return bool(self._ask(waiting, "delete", self._name(key)))

    def count(self, waiting: Waiting) -> int:
        if self._session is None:
            return sum(name.startswith(self.prefix) for name in self._alone)
        return int(self._ask(waiting, "count", self.prefix))

    def _name(self, key: str) -> str:
        return self.prefix + _quoted(key)

    def _ask(
        self,
        waiting: Waiting,
        op: str,
        *arguments: Any,
        idle: Callable[[], None] = nothing,
        what: Sequence[str] = (),
    ) -> Any:
        assert self._session is not None
        try:
            return self._session.ask(op, *arguments, timeout_s=waiting.left_s, idle=idle)
        except Late as error:
            raise self._late(waiting, what) from error
        except HubGone as error:
            raise PeerLost(
                f"rank {self._rank} was in {waiting.call} when {self._session.master()} {KEPT}, "
                "was found to be gone. End the launch, and look at what rank 0 printed last."
            ) from error

    def _late(self, waiting: Waiting, what: Sequence[str]) -> CoordinatorTimeout:
        """The error for a deadline: rank 0 does not answer, or nobody has put it."""
        assert self._session is not None
        waited = f"rank {self._rank} waited {waiting.timeout_s:g} s in {waiting.call} for"
        if what and self._session.membership(LAST_ANSWER_S):
            return CoordinatorTimeout(f"{waited} {list(what)}, which nobody has put.")
        return CoordinatorTimeout(
            f"{waited} {self._session.master()} {KEPT} and does not answer: it is stopped, busy or "
            "cut off. Give a longer timeout_s, or look at what it does."
        )


def _quoted(name: str) -> str:
    """With its length in front, so that no name can look like another with something behind."""
    return f"{len(name)}:{name}/"
