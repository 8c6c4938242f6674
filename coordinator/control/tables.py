"""What rank 0 keeps for the others: values by name, and what is given in meetings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from coordinator.call_site import CallStatus

LEFT, SUSPENDED = "left", "suspended"  # notes of a RankReport
LATER = object()  # the answer comes when somebody else has spoken
COUNTS = (-(1 << 63), (1 << 63) - 1)  # as torch's Store.add

Asker = TypeVar("Asker")
Answer = Callable[[Asker, Any], None]


class RankReport(NamedTuple):
    """A rank as rank 0 knows it.

    silent_s: since its last heartbeat. calls: of each of its groups, by key. note: LEFT, SUSPENDED
    or nothing. lost_s: since its last connection broke, or -1. is_unreachable: its host does not
    acknowledge what was sent to it.
    """

    silent_s: float
    calls: Mapping[str, CallStatus] | None
    note: str
    lost_s: float
    is_unreachable: bool

    @classmethod
    def from_wire(cls, fields: Sequence[Any]) -> RankReport:
        silent_s, calls, note, lost_s, is_unreachable = fields
        if calls is not None:
            calls = {key: CallStatus(*status) for key, status in calls.items()}
        return cls(silent_s, calls, note, lost_s, is_unreachable)


Membership = Mapping[int, RankReport]  # by rank of the launch; empty if rank 0 does not answer


class Values(Generic[Asker]):
    """Values by name. answer(asker, values) is called for those that had to wait."""

    def __init__(self, answer: Answer[Asker]) -> None:
        self._answer = answer
        self._values: dict[str, bytes] = {}
        self._wanted: dict[str, list[tuple[Asker, Sequence[str]]]] = {}

    def set(self, _: Asker, key: str, value: bytes) -> None:
        self._values[key] = value
        for asker, keys in self._wanted.pop(key, []):
            found = self.wait(asker, keys)
            if found is not LATER:
                self._answer(asker, found)

    def get(self, _: Asker, key: str) -> bytes | None:
        return self._values.get(key)

    def wait(self, asker: Asker, keys: Sequence[str]) -> Any:
        """The values of all keys, now or LATER."""
        missing = next((key for key in keys if key not in self._values), None)
        if missing is None:
            return [self._values[key] for key in keys]
        self._wanted.setdefault(missing, []).append((asker, keys))
        return LATER

    def add(self, asker: Asker, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        if not COUNTS[0] <= total <= COUNTS[1]:
            raise OverflowError(f"{key!r} would be {total}, and a counter has 64 bits")
        self.set(asker, key, str(total).encode())
        return total

    def swap(self, asker: Asker, key: str, expected: bytes, value: bytes) -> bytes:
        """As torch's Store.compare_set: an empty expectation is that there is no value."""
        there = self._values.get(key)
        if there is None and expected:
            return expected
        if (there or b"") == expected:
            self.set(asker, key, value)
            return value
        return there or b""

    def delete(self, _: Asker, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def count(self, _: Asker, prefix: str) -> int:
        return sum(key.startswith(prefix) for key in self._values)


@dataclass
class _Meeting(Generic[Asker]):
    given: dict[int, bytes] = field(default_factory=dict)
    waiting: list[Asker] = field(default_factory=list)


class Meetings(Generic[Asker]):
    """Ranks that give something each, and go on once they have what everybody gave.

    answer(askers, given) is called once for all of them.
    """

    def __init__(self, answer: Callable[[Sequence[Asker], list[bytes]], None]) -> None:
        self._answer = answer
        self._open: dict[str, _Meeting[Asker]] = {}

    def meet(self, asker: Asker, key: str, place: int, size: int, data: bytes) -> Any:
        meeting: _Meeting[Asker] = self._open.setdefault(key, _Meeting())
        meeting.given[place] = data
        meeting.waiting.append(asker)
        if len(meeting.given) == size:
            del self._open[key]
            self._answer(meeting.waiting, [meeting.given[place] for place in range(size)])
        return LATER

    def came(self, _: Asker, key: str) -> list[int]:
        """The places that have given their data, of a meeting that is not over."""
        meeting = self._open.get(key)
        return sorted(meeting.given) if meeting else []
