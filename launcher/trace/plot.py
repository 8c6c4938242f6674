"""A trace as a picture, for whoever has no browser: ranks as rows, what is waited for in red."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.trace import spans
from launcher.trace.spans import Row, Span

COLOURS = {"start": "#c9c9c9", "wait": "#d1495b", "move": "#30638e", "work": "#8cb369"}
ROW_INCHES, WIDTH_INCHES = 0.5, 14


def draw(trace: dict[str, Any], picture: Path) -> None:
    """Draw the spans of a merged trace into a PNG (or SVG, by the ending of picture).

    Raises ValueError if matplotlib is not installed, or if there is nothing to draw.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a picture needs matplotlib: pip install matplotlib") from error
    rows = spans.rows(trace)
    if not rows:
        raise ValueError("the trace has no spans: was anything recorded?")
    figure = Figure(figsize=(WIDTH_INCHES, 1.2 + ROW_INCHES * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    _fill(figure.add_subplot(), rows)
    figure.savefig(picture, dpi=120)


def _fill(axes: Any, rows: dict[Row, list[Span]]) -> None:
    start = min(span.event["ts"] for row in rows.values() for span in row)
    for number, row in enumerate(rows.values()):
        times = [(span.event["ts"] - start, span.event["dur"]) for span in row]
        bars = [(begin / 1000, took / 1000) for begin, took in times]
        colours = [COLOURS[span.kind] for span in row]
        axes.broken_barh(bars, (number - 0.4, 0.8), facecolors=colours)
    for kind, colour in COLOURS.items():
        axes.plot([], [], color=colour, linewidth=6, label=kind)
    axes.set_yticks(range(len(rows)), [_name(*row) for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.figure.legend(loc="outside upper right", ncols=len(COLOURS))


def _name(rank: int, thread: int) -> str:
    name = f"rank {rank}" if rank >= 0 else "launcher"
    return f"{name}, thread {thread}" if thread else name
