"""Tables that rank 0 keeps for all ranks: values by name, and open rendezvous.

An operation that has to wait for another rank returns PENDING, and answers later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from coordinator.binomial_tree import children_of, parent_of

PENDING = object()  # the answer comes when another rank has done its part
COUNTS = (-(1 << 63), (1 << 63) - 1)  # as torch's Store.add

Requester = TypeVar("Requester")


class KeyValueTable(Generic[Requester]):
    """Values by name. answer(requester, values) is called for requesters that had to wait."""

    def __init__(self, answer: Callable[[Requester, Any], None]) -> None:
        self._answer = answer
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[Requester, Sequence[str]]]] = {}  # by a missing key

    def forget(self, has_given_up: Callable[[Requester], bool]) -> None:
        """Drop what requesters wait for that have given up."""
        for key, waiting in list(self._waiting.items()):
            self._waiting[key] = [entry for entry in waiting if not has_given_up(entry[0])]
            if not self._waiting[key]:
                del self._waiting[key]

    def set(self, _: Requester, key: str, value: bytes) -> None:
        self._values[key] = value
        for requester, keys in self._waiting.pop(key, []):
            values = self.wait(requester, keys)
            if values is not PENDING:
                self._answer(requester, values)

    def get(self, _: Requester, key: str) -> bytes | None:
        return self._values.get(key)

    def wait(self, requester: Requester, keys: Sequence[str]) -> Any:
        """The values by key once all are there, now or PENDING."""
        missing = next((key for key in keys if key not in self._values), None)
        if missing is None:
            return {key: self._values[key] for key in keys}
        self._waiting.setdefault(missing, []).append((requester, keys))
        return PENDING

    def add(self, requester: Requester, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        if not COUNTS[0] <= total <= COUNTS[1]:
            raise OverflowError(f"{key!r} would be {total}, and a counter has 64 bits")
        self.set(requester, key, str(total).encode())
        return total

    def swap(self, requester: Requester, key: str, expected: bytes, value: bytes) -> bytes:
        """Put value if the current one is as expected (b"": none), as torch's Store.compare_set."""
        current = self._values.get(key)
        if current is None and expected:
            return expected
        if (current or b"") == expected:
            self.set(requester, key, value)
            return value
        return current or b""

    def delete(self, _: Requester, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def count(self, _: Requester, prefix: str) -> int:
        return sum(key.startswith(prefix) for key in self._values)


@dataclass
class _OpenRendezvous(Generic[Requester]):
    size: int
    data: dict[int, bytes] = field(default_factory=dict)  # by place
    scopes: dict[int, str] = field(default_factory=dict)  # by place
    waiting: dict[int, Requester] = field(default_factory=dict)  # by place


class RendezvousTable(Generic[Requester]):
    """Ranks that give data each, and go on once all have: with what those of their scope gave.

    So each learns of its own node first, and the work for all ranks grows in step with them.
    answer(requesters, value) is called once for all that get the same, and on_nodes(key,
    requesters) before, where they are of several nodes.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[Requester], Any], None],
        on_nodes: Callable[[str, Sequence[Requester]], None],
    ) -> None:
        self._answer, self._on_nodes = answer, on_nodes
        self._open: dict[str, _OpenRendezvous[Requester]] = {}

    def rendezvous(
        self, requester: Requester, key: str, place: int, size: int, data: bytes, scope: str
    ) -> Any:
        """The data by place, of those of one scope that gave some, now or PENDING."""
        complete = self._come(requester, key, place, size, data, scope)
        if complete is not None:
            by_scope: dict[str, list[int]] = {}
            for member in range(size):
                by_scope.setdefault(complete.scopes[member], []).append(member)
            for members in by_scope.values():
                value = {member: complete.data[member] for member in members}
                self._answer(
                    [complete.waiting[member] for member in members],
                    {member: data for member, data in value.items() if data},
                )
        return PENDING

    def number(self, requester: Requester, key: str, place: int, size: int, data: bytes) -> Any:
        """Number those that give data as the nodes of a tree, in order of place.

        Each gets its number, how many there are, and by number what its neighbours gave; the root
        gets what all gave.
        """
        complete = self._come(requester, key, place, size, data, "")
        if complete is not None:
            self._on_nodes(key, [complete.waiting[member] for member in range(size)])
            firsts = [member for member in range(size) if complete.data[member]]
            nodes = {index: complete.data[member] for index, member in enumerate(firsts)}
            for index, member in enumerate(firsts):
                near = [parent_of(index), *children_of(index, len(nodes))] if index else nodes
                value = [index, len(nodes), {node: nodes[node] for node in near}]
                self._answer([complete.waiting.pop(member)], value)
            self._answer(list(complete.waiting.values()), [-1, len(nodes), {}])
        return PENDING

    def _come(
        self, requester: Requester, key: str, place: int, size: int, data: bytes, scope: str
    ) -> _OpenRendezvous[Requester] | None:
        """The rendezvous, if this makes it complete."""
        current = self._open.get(key) or _OpenRendezvous[Requester](size)
        if size != current.size or not 0 <= place < size:
            raise ValueError(f"place {place} of {size} in a rendezvous of {current.size}")
        self._open[key] = current
        current.data[place], current.scopes[place] = data, scope
        current.waiting[place] = requester
        return self._open.pop(key) if len(current.data) == size else None

    def forget(self, has_given_up: Callable[[Requester], bool]) -> None:
        """Drop the rendezvous in which all have given up."""
        for key, current in list(self._open.items()):
            if all(map(has_given_up, current.waiting.values())):
                del self._open[key]

    def cancel(self) -> list[Requester]:
        """Drop all that are open; those who wait there."""
        waiting = [member for current in self._open.values() for member in current.waiting.values()]
        self._open.clear()
        return waiting

    def arrived(self, _: Requester, key: str) -> list[int]:
        """The places that have given their data, of a rendezvous that is not over."""
        current = self._open.get(key)
        return sorted(current.data) if current else []
