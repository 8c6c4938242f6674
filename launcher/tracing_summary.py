"""A trace in a few lines of text: how long each rank started, waited, moved data and worked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from launcher import tracing_spans
from launcher.tracing_spans import Span

KINDS = ("start", "wait", "move", "work")
VIEWERS = "https://ui.perfetto.dev or chrome://tracing"


def lines(trace: dict[str, Any]) -> Iterator[str]:
    """A row for each rank, in seconds."""
    ranks: dict[int, list[Span]] = defaultdict(list)
    for (rank, _), spans in tracing_spans.rows(trace).items():
        ranks[rank] += spans
    heads = " ".join(f"{kind + ' (s)':>9}" for kind in KINDS)
    yield f"{'':>10} {'spans':>7} {heads}  longest wait"
    for rank, spans in ranks.items():
        yield _row(rank, spans)


def _row(rank: int, spans: list[Span]) -> str:
    took: dict[str, float] = defaultdict(float)
    for span in spans:
        took[span.kind] += span.own_us / 1e6
    waits = [span.event for span in spans if span.kind == "wait"]
    longest = max(waits, key=lambda event: float(event["dur"]), default=None)
    told = "" if longest is None else f"{longest['name']}, {longest['dur'] / 1e6:.3f} s"
    name = "launcher" if rank < 0 else f"rank {rank}"
    seconds = " ".join(f"{took[kind]:9.3f}" for kind in KINDS)
    return f"{name:>10} {len(spans):7} {seconds}  {told}".rstrip()
