"""A key-value store that the ranks of a group share: at rank 0, or here for a single rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coordinator.call_site import PendingCall
from coordinator.control.client import ServerLost
from coordinator.control.operations import BAD_REQUEST, Op
from coordinator.control.session import Session
from coordinator.control.tables import PENDING, KeyValueTable
from coordinator.errors import CoordinatorError, CoordinatorTimeout, PeerLost
from launcher import NoMessage, noop


class PrefixStore:
    """The values under a prefix; names may have any characters.

    rank: of the launch. Every method raises CoordinatorTimeout at the deadline of the call that it
    is part of, and PeerLost once rank 0 is gone.
    """

    def __init__(self, prefix: str, session: Session | None, rank: int) -> None:
        self.prefix, self._session, self._rank = prefix, session, rank
        self._local: KeyValueTable[None] = KeyValueTable(lambda requester, values: None)

    def child(self, *names: str) -> PrefixStore:
        """The store under these names within this one."""
        prefix = self.prefix + "".join(map(_quoted, names))
        store = PrefixStore(prefix, self._session, self._rank)
        store._local = self._local
        return store

    def put(self, key: str, value: bytes, pending: PendingCall) -> None:
        self._ask(pending, Op.SET, self._name(key), value)

    def get(self, key: str, pending: PendingCall) -> bytes | None:
        value = self._ask(pending, Op.GET, self._name(key))
        return None if value is None else bytes(value)

    def wait(
        self, keys: Sequence[str], pending: PendingCall, idle: Callable[[], None] = noop
    ) -> list[bytes]:
        """The values of all keys, once they are there. idle: as in Connection."""
        names = [self._name(key) for key in keys]
        values = self._ask(pending, Op.WAIT, names, idle=idle, keys=keys)
        if values is PENDING:
            self._local.forget(lambda _: True)
            missing = [key for key in keys if self.get(key, pending) is None]
            raise CoordinatorTimeout(
                f"rank {self._rank} would wait in {pending.call} for {missing} for ever: nobody "
                "but this rank could put it, and it has not"
            )
        return [values[name] for name in names]

    def add(self, key: str, amount: int, pending: PendingCall) -> int:
        return int(self._ask(pending, Op.ADD, self._name(key), amount))

    def swap(self, key: str, expected: bytes, value: bytes, pending: PendingCall) -> bytes:
        """Put value if the current one is expected (b"": none); the value afterwards."""
        return bytes(self._ask(pending, Op.SWAP, self._name(key), expected, value))

    def delete(self, key: str, pending: PendingCall) -> bool:
        return bool(self._ask(pending, Op.DELETE, self._name(key)))

    def count(self, pending: PendingCall) -> int:
        return int(self._ask(pending, Op.COUNT, self.prefix))

    def _name(self, key: str) -> str:
        return self.prefix + _quoted(key)

    def _ask(
        self,
        pending: PendingCall,
        op: Op,
        *arguments: Any,
        idle: Callable[[], None] = noop,
        keys: Sequence[str] = (),
    ) -> Any:
        if self._session is None:
            return self._ask_local(op, *arguments)
        try:
            return self._session.ask(op, *arguments, timeout_s=pending.left_s, idle=idle)
        except NoMessage as error:
            raise self._timeout(self._session, pending, keys) from error
        except ServerLost as error:
            master = self._session.describe_master()
            raise PeerLost(
                f"rank {self._rank} was in {pending.call} when {master} which keeps the values, "
                "was found to have ended. End the launch, and look at what rank 0 printed last."
            ) from error

    def _ask_local(self, op: Op, *arguments: Any) -> Any:
        try:
            return getattr(self._local, op.value)(None, *arguments)
        except BAD_REQUEST as error:
            raise CoordinatorError(f"rank {self._rank} cannot {op.value}: {error}") from error

    def _timeout(
        self, session: Session, pending: PendingCall, keys: Sequence[str]
    ) -> CoordinatorTimeout:
        """The error for a deadline: rank 0 does not answer, or nobody has put it."""
        waited = f"rank {self._rank} waited {pending.timeout_s:g} s in {pending.call} for"
        if keys and session.reports([session.info.master_rank], session.timings.last_answer_s):
            return CoordinatorTimeout(f"{waited} {list(keys)}, which nobody has put.")
        return CoordinatorTimeout(
            f"{waited} {session.describe_master()} which keeps the values: "
            f"{session.describe_silence()}. Give a longer timeout_s, or look at what it does."
        )


def _quoted(name: str) -> str:
    """The name after its length, so that no name can look like another with a suffix."""
    return f"{len(name)}:{name}/"
