"""A trace as a table: how long each rank started, waited, moved data and worked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launcher.trace.recorder import rank_name

KINDS = ("start", "wait", "move", "work")
VIEWERS = "https://ui.perfetto.dev or chrome://tracing"

ThreadKey = tuple[int, int]  # a rank, or -1 for the launcher; a thread of it


@dataclass
class TraceSpan:
    """An event with its duration. kind: wait for all within a wait. own_us: without inner spans."""

    event: dict[str, Any]
    kind: str
    own_us: float

    @property
    def end_us(self) -> float:
        return float(self.event["ts"] + self.event["dur"])


def spans_by_thread(trace: dict[str, Any]) -> dict[ThreadKey, list[TraceSpan]]:
    """The spans of each thread of each rank, in order; an inner span comes after its outer."""
    events: dict[ThreadKey, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            events.setdefault((event["pid"], event["tid"]), []).append(event)
    return {key: list(_nested(events[key])) for key in sorted(events)}


def _nested(events: list[dict[str, Any]]) -> Iterator[TraceSpan]:
    outer: list[TraceSpan] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while outer and outer[-1].end_us <= event["ts"]:
            outer.pop()
        kind = event["cat"]
        if outer:
            outer[-1].own_us -= event["dur"]
            kind = "wait" if outer[-1].kind == "wait" else kind
        outer.append(TraceSpan(event, kind, event["dur"]))
        yield outer[-1]


def lines(trace: dict[str, Any]) -> Iterator[str]:
    """A line for each rank, in seconds."""
    ranks: dict[int, list[TraceSpan]] = defaultdict(list)
    for (rank, _), spans in spans_by_thread(trace).items():
        ranks[rank] += spans
    heads = " ".join(f"{kind + ' (s)':>9}" for kind in KINDS)
    yield f"{'':>10} {'spans':>7} {heads}  longest wait"
    for rank, spans in ranks.items():
        yield _line(rank, spans)


def _line(rank: int, spans: list[TraceSpan]) -> str:
    total_s: dict[str, float] = defaultdict(float)
    for span in spans:
        total_s[span.kind] += span.own_us / 1e6
    waits = [span.event for span in spans if span.kind == "wait"]
    longest = max(waits, key=lambda event: float(event["dur"]), default=None)
    wait = "" if longest is None else f"{longest['name']}, {longest['dur'] / 1e6:.3f} s"
    seconds = " ".join(f"{total_s[kind]:9.3f}" for kind in KINDS)
    return f"{rank_name(rank):>10} {len(spans):7} {seconds}  {wait}".rstrip()
