"""A trace as a picture, for whoever has no browser: ranks as rows, what is waited for in red."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COLOURS = {"wait": "#d1495b", "work": "#2e933c", "move": "#30638e"}
ROW_INCHES, WIDTH_INCHES = 0.5, 14


def draw(trace: Path, picture: Path) -> None:
    """Draw the spans of a merged trace into a PNG (or SVG, by the ending of picture).

    Raises RuntimeError if matplotlib is not installed, ValueError if there is nothing to draw.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("a picture needs matplotlib: pip install matplotlib") from error
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    if not spans:
        raise ValueError(f"{trace} has no spans: was anything recorded?")
    rows = sorted({event["pid"] for event in spans})
    figure = Figure(figsize=(WIDTH_INCHES, 1.2 + ROW_INCHES * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    _fill(figure.add_subplot(), spans, rows)
    figure.savefig(picture, dpi=120)


def _fill(axes: Any, spans: list[dict[str, Any]], rows: list[int]) -> None:
    start = min(event["ts"] for event in spans)
    for kind, colour in COLOURS.items():
        for number, row in enumerate(rows):
            bars = [
                ((event["ts"] - start) / 1000, event["dur"] / 1000)
                for event in spans
                if event["pid"] == row and event["cat"] == kind
            ]
            axes.broken_barh(bars, (number - 0.4, 0.8), facecolors=colour)
        axes.plot([], [], color=colour, linewidth=6, label=kind)
    axes.set_yticks(range(len(rows)), [f"rank {row}" if row >= 0 else "launcher" for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.legend(loc="upper right", ncols=len(COLOURS))
