"""The spans of a trace as they lie in each other: what is its own of each, and counts as what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Row = tuple[int, int]  # a rank, or -1 for the launcher; a thread of it


@dataclass
class Span:
    """kind: wait for all that happens within a wait. own_us: without the spans within it."""

    event: dict[str, Any]
    kind: str
    own_us: float

    @property
    def end_us(self) -> float:
        return float(self.event["ts"] + self.event["dur"])


def rows(trace: dict[str, Any]) -> dict[Row, list[Span]]:
    """The spans of each thread of each rank, in order; what lies within another comes after it."""
    found: dict[Row, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found.setdefault((event["pid"], event["tid"]), []).append(event)
    return {row: list(_nested(found[row])) for row in sorted(found)}


def _nested(events: list[dict[str, Any]]) -> Iterator[Span]:
    around: list[Span] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while around and around[-1].end_us <= event["ts"]:
            around.pop()
        kind = event["cat"]
        if around:
            around[-1].own_us -= event["dur"]
            kind = "wait" if around[-1].kind == "wait" else kind
        around.append(Span(event, kind, event["dur"]))
        yield around[-1]
