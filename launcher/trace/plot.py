"""A trace as a picture: a row for each rank, waiting in red."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.trace.recorder import rank_name
from launcher.trace.summary import ThreadKey, TraceSpan, spans_by_thread

COLOURS = {"start": "#c9c9c9", "wait": "#d1495b", "move": "#30638e", "work": "#8cb369"}
ROW_INCHES, WIDTH_INCHES = 0.5, 14


def draw(trace: dict[str, Any], picture: Path) -> None:
    """Draw the spans of a merged trace into a PNG (or SVG, by the ending of picture).

    Raises ImportError if matplotlib is not installed, ValueError if there is nothing to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = spans_by_thread(trace)
    if not rows:
        raise ValueError("the trace has no spans, so there is nothing to draw")
    figure = Figure(figsize=(WIDTH_INCHES, 1.2 + ROW_INCHES * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    _fill(figure.add_subplot(), rows)
    figure.savefig(picture, dpi=120)


def _fill(axes: Any, rows: dict[ThreadKey, list[TraceSpan]]) -> None:
    start = min(span.event["ts"] for spans in rows.values() for span in spans)
    for number, spans in enumerate(rows.values()):
        bars_ms = [((span.event["ts"] - start) / 1000, span.event["dur"] / 1000) for span in spans]
        colours = [COLOURS[span.kind] for span in spans]
        axes.broken_barh(bars_ms, (number - 0.4, 0.8), facecolors=colours)
    for kind, colour in COLOURS.items():
        axes.plot([], [], color=colour, linewidth=6, label=kind)
    names = [rank_name(rank) + f", thread {thread}" * bool(thread) for rank, thread in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.figure.legend(loc="outside upper right", ncols=len(COLOURS))
