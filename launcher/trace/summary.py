"""A trace in a few lines of text: how long each rank started, waited, moved data and worked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from launcher.trace import spans
from launcher.trace.spans import Span

KINDS = ("start", "wait", "move", "work")
VIEWERS = "https://ui.perfetto.dev or chrome://tracing"


def lines(trace: dict[str, Any]) -> Iterator[str]:
    """A row for each rank, in seconds."""
    ranks: dict[int, list[Span]] = defaultdict(list)
    for (rank, _), row in spans.rows(trace).items():
        ranks[rank] += row
    heads = " ".join(f"{kind + ' (s)':>9}" for kind in KINDS)
    yield f"{'':>10} {'spans':>7} {heads}  longest wait"
    for rank, row in ranks.items():
        yield _row(rank, row)


def _row(rank: int, row: list[Span]) -> str:
    took: dict[str, float] = defaultdict(float)
    for span in row:
        took[span.kind] += span.own_us / 1e6
    waits = [span.event for span in row if span.kind == "wait"]
    longest = max(waits, key=lambda event: float(event["dur"]), default=None)
    told = "" if longest is None else f"{longest['name']}, {longest['dur'] / 1e6:.3f} s"
    name = "launcher" if rank < 0 else f"rank {rank}"
    seconds = " ".join(f"{took[kind]:9.3f}" for kind in KINDS)
    return f"{name:>10} {len(row):7} {seconds}  {told}".rstrip()
