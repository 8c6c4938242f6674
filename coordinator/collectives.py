"""The collective calls of a group: bytes, values, agreement and work, over one exchange."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pprint import saferepr
from typing import Any

from coordinator.call_site import caller
from coordinator.control.group_member import GroupMember
from coordinator.errors import CoordinatorError, RemoteError
from coordinator.transport.group import ALL_RANKS, NOTHING, Exchange, pack_parts
from coordinator.transport.object_codec import packed, unpacked, why_unsendable
from coordinator.work_outcome import ErrorClasses, WorkOutcome, raise_first_failure

CLOCK_READINGS = 9

_new = tuple.__new__


class Collectives(GroupMember):
    """The collective calls of a Coordinator."""

    nodes: list[list[int]]

    @abstractmethod
    def _exchange(self, name: str, exchange: Exchange, timeout_s: float | None) -> list[bytes]: ...

    def run_on_all_ranks(
        self,
        work: Callable[[], Any],
        *,
        error_class: ErrorClasses = RemoteError,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Run work() on every rank and return every rank's result, in order of rank. Collective.

        If it raises on one rank, all ranks raise: that rank its own exception; the others
        RemoteError with the exception's type, text and traceback, or PeerLost if work() failed
        everywhere only because ranks were lost. Results are values as those of broadcast_object.
        error_class: raised in place of RemoteError: of several, the one that work() raised, by its
        name, with its text; otherwise the first, with the text of RemoteError.
        The time that work() takes is not part of timeout_s, which begins when this rank has ended
        its own; the others wait at most so long.
        """
        outcome = WorkOutcome.of(work)
        try:
            packets = self.allgather(outcome.packed(self.ranks[self.rank]), timeout_s=timeout_s)
        except CoordinatorError as error:
            if outcome.error is None:
                raise
            if error.__cause__ is not outcome.error:  # which has broken the group by itself
                raise outcome.error from error
        if outcome.error is not None:
            raise outcome.error
        self._check_sendable(packets[self.rank])
        outcomes = [WorkOutcome.unpacked(packet, self.ranks[self.rank]) for packet in packets]
        raise_first_failure(outcomes, self.rank, self.peers, error_class)
        return [outcome.result for outcome in outcomes]

    def allgather_object(self, value: Any, *, timeout_s: float | None = None) -> list[Any]:
        """The value of every rank, in order of rank; as allgather."""
        data = self._packed(value)
        gathered = self.allgather(data, timeout_s=timeout_s)
        self._check_sendable(data)
        return [self._unpacked(data) for data in gathered]

    def _packed(self, value: Any) -> bytes:
        return packed(value, self.ranks[self.rank])

    def _unpacked(self, data: bytes) -> Any:
        return unpacked(data, self.ranks[self.rank])

    def _check_sendable(self, data: bytes | None) -> None:
        """Raise if this rank's value cannot be sent, after the call, so that nobody waits."""
        why = why_unsendable(data or b"")
        if why:
            raise ValueError(f"{why}. Only None, bool, int, float, str, bytes, lists and dicts go")

    # ---- bytes ----

    def broadcast(
        self, data: bytes | None = None, src: int = 0, *, timeout_s: float | None = None
    ) -> bytes:
        """The data of rank src, on every rank. Collective; only src needs to give data.

        Raises ValueError if src is not a rank of the group or gives no bytes.
        """
        if self.rank == src:
            own = data if type(data) is bytes else self._bytes(data, "broadcasts")
        else:
            self._check_rank(src, "src")
            own = b""
        # As Exchange(own, src), in half the time.
        exchange = _new(Exchange, (own, src, ALL_RANKS, False))
        return self._exchange("broadcast", exchange, timeout_s)[src]

    def allgather(self, data: bytes, *, timeout_s: float | None = None) -> list[bytes]:
        """The data of every rank, in order of rank, on every rank. Collective; sizes may differ."""
        return self._exchange("allgather", Exchange(self._bytes(data, "gathers")), timeout_s)

    def gather(
        self, data: bytes, dst: int = 0, *, timeout_s: float | None = None
    ) -> list[bytes] | None:
        """The data of every rank, in order of rank, on rank dst; None elsewhere. Collective."""
        self._check_rank(dst, "dst")
        exchange = Exchange(self._bytes(data, "gathers"), root=dst, reader=dst)
        gathered = self._exchange("gather", exchange, timeout_s)
        return gathered if self.rank == dst else None

    def scatter(
        self, data: Sequence[bytes] | None = None, src: int = 0, *, timeout_s: float | None = None
    ) -> bytes:
        """data[rank] of rank src. Collective; only src needs to give data, for each rank one."""
        self._check_rank(src, "src")
        packed = b""
        if self.rank == src:
            parts = [self._bytes(part, "scatters") for part in data or ()]
            if len(parts) != self.world_size:
                raise ValueError(
                    f"{self._me} scatters {len(parts)} parts among {self.world_size} ranks"
                )
            packed = pack_parts(parts)
        exchange = Exchange(packed, root=src, is_scattered=True)
        return self._exchange("scatter", exchange, timeout_s)[src]

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return once every rank of the group has called. Collective."""
        self._exchange("barrier", NOTHING, timeout_s)

    # ---- agreement ----

    def agree(self, value: Any, *, timeout_s: float | None = None) -> Any:
        """value, if every rank gave the same. Collective. Values are those of broadcast_object.

        Dicts may have their keys in another order; each rank gets its own. Raises CoordinatorError
        on every rank, listing who gave what, if not.
        """
        own = self._packed(value)
        gathered = self._exchange("agree", Exchange(own), timeout_s)
        self._check_sendable(own)
        if all(data == own for data in gathered):
            return value
        # With dicts in the order of their keys.
        texts = {data: saferepr(self._unpacked(data)) for data in {*gathered}}
        by_value: dict[str, list[int]] = {}
        for rank, data in zip(self.ranks, gathered, strict=True):
            by_value.setdefault(texts[data], []).append(rank)
        if len(by_value) == 1:
            return value
        text = "; ".join(f"{value:.200} by ranks {ranks}" for value, ranks in by_value.items())
        raise CoordinatorError(
            f"{self._me}: the ranks do not agree ({caller()}). Given were {text}. "
            "Start all ranks with the same arguments and the same files."
        )

    def all_true(self, ok: bool, *, timeout_s: float | None = None) -> bool:
        """True if ok is true on every rank: the same answer on every rank. Collective."""
        gathered = self._exchange("all_true", Exchange(b"y" if ok else b"n"), timeout_s)
        return all(data == b"y" for data in gathered)

    # ---- values: None, bool, int, float, str, bytes, lists and dicts of them ----

    def broadcast_object(
        self, value: Any = None, src: int = 0, *, timeout_s: float | None = None
    ) -> Any:
        """The value of rank src, on every rank; as broadcast. A tuple arrives as a list.

        A value that cannot be sent raises on every rank: ValueError on src, else CoordinatorError.
        """
        data = self._packed(value) if self.rank == src else None
        received = self.broadcast(data, src, timeout_s=timeout_s)
        self._check_sendable(data)
        return self._unpacked(received)

    def gather_object(
        self, value: Any, dst: int = 0, *, timeout_s: float | None = None
    ) -> list[Any] | None:
        """The value of every rank, in order of rank, on rank dst; as gather."""
        data = self._packed(value)
        gathered = self.gather(data, dst, timeout_s=timeout_s)
        self._check_sendable(data)
        return None if gathered is None else [self._unpacked(data) for data in gathered]

    def scatter_object(
        self, values: Sequence[Any] | None = None, src: int = 0, *, timeout_s: float | None = None
    ) -> Any:
        """values[rank] of rank src; as scatter."""
        data = [self._packed(value) for value in values or ()] if self.rank == src else None
        received = self.scatter(data, src, timeout_s=timeout_s)
        for part in data or ():
            self._check_sendable(part)
        return self._unpacked(received)

    def _offset_to_master_ns(self) -> int:
        """The nanoseconds by which this host's clock is behind rank 0's: the median of several
        readings, each at the end of a barrier."""
        if len(self.nodes) == 1:
            return 0
        offsets = []
        for _ in range(CLOCK_READINGS):
            self.barrier()
            now_ns = time.monotonic_ns()
            clocks = self.allgather(now_ns.to_bytes(8, "little"))
            offsets.append(int.from_bytes(clocks[0], "little") - now_ns)
        return sorted(offsets)[CLOCK_READINGS // 2]
