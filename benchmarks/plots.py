"""Pictures of the tables: each drawn from the JSON lines beside it, as PNG and as SVG.

python -m benchmarks.plots        # draws again whatever tables there are
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.table import RESULTS

Row = dict[str, Any]
OURS = "#1b6ca8"
NOISE = 0.18  # the opacity of the middle half around a line
# The first that is a part of a name; a peer looks the same in every picture.
PEERS = {
    "MPICH": ("#d1495b", "s"),
    "Open MPI": ("#edae49", "^"),
    "Intel MPI": ("#8d6a9f", "D"),
    "oneCCL": ("#7a7a7a", "P"),
    "torchrun": ("#2a9d8f", "X"),
    "spawn": ("#7a7a7a", "v"),
    "gloo": ("#66a182", "v"),
    "torch.distributed": ("#3a5a40", "<"),
    "one process": ("#d1495b", "s"),
    "rank 0": ("#d1495b", "s"),
    "another rank": ("#edae49", "^"),
}
OTHER = ("#333333", "x")
INCHES = (4.2, 3.2)
DOTS_PER_INCH = 110
BYTES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
SCALE = {
    "drumline, wall time of all ranks": "all ranks (ms)",
    "rank 0, processor time": "rank 0 (ms)",
    "another rank, processor time": "other rank (ms)",
}
PICTURED_NBYTES = 1 << 20  # of calls between hosts
UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20}


def main() -> None:
    for path in draw(RESULTS):
        print(path, file=sys.stderr)


def draw(folder: Path) -> list[Path]:
    """Every picture that the tables in folder allow; the PNG of each."""
    found = []
    for picture in (startup, coordinator, collectives, network, model, scale):
        found += list(picture(folder))
    return found


def rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Median(float):
    """A point of a line, and the middle half of what was measured there."""

    low: float
    high: float

    @classmethod
    def of(cls, median: float, low: float, high: float) -> Median:
        point = cls(median)
        point.low, point.high = low, high
        return point


Lines = dict[str, list[tuple[float, Median]]]


def number(cell: Any) -> Median:
    """A cell as a number: that of a spread is its median."""
    if isinstance(cell, dict):
        return Median.of(cell["median"], cell["low"], cell["high"])
    return Median.of(cell, cell, cell)


def merged(lines: Lines) -> Lines:
    """Lines with one point at each place: of several, as ours beside each peer, the median."""
    found: Lines = {}
    for name, points in lines.items():
        at_place: dict[float, list[Median]] = defaultdict(list)
        for place, point in points:
            at_place[place].append(point)
        found[name] = [(place, middle(several)) for place, several in at_place.items()]
    return found


def middle(points: list[Median]) -> Median:
    low, high = min(point.low for point in points), max(point.high for point in points)
    return Median.of(statistics.median(points), low, high)


def startup(folder: Path) -> Iterable[Path]:
    table = rows(folder / "startup.jsonl")
    panels = {}
    for what in dict.fromkeys(row["what"] for row in table):
        lines: Lines = defaultdict(list)
        for row in (row for row in table if row["what"] == what):
            ranks = row["ranks"]
            for column in (column for column in row if column.startswith("drumline")):
                lines[column.removesuffix(" (s)")].append((ranks, number(row[column])))
            lines[row["peer"]].append((ranks, number(row["(s)"])))
        panels[what] = merged(lines)
    if panels:
        yield save(folder / "startup", panels, "ranks", "seconds")


def collectives(folder: Path) -> Iterable[Path]:
    for path in sorted(folder.glob("collectives-*.jsonl")):
        table = [row for row in rows(path) if row["dtype"] == "float32"]
        latency: dict[str, Lines] = {}
        for row in table:
            lines = latency.setdefault(row["operation"], defaultdict(list))
            lines[row["peer"]].append((row["bytes"], number(row["(us)"])))
            lines["drumline"].append((row["bytes"], number(row["drumline (us)"])))
        latency = {name: merged(lines) for name, lines in latency.items()}
        moving = {name: lines for name, lines in latency.items() if len(lines["drumline"]) > 1}
        if moving:
            yield save(folder / f"{path.stem}-latency", moving, "size", "microseconds")
            speed = {name: bandwidths(lines) for name, lines in moving.items()}
            yield save(folder / f"{path.stem}-bandwidth", speed, "size", "GB/s of a rank's tensor")


def bandwidths(lines: Lines) -> Lines:
    """Bytes of the tensor over the time of the call, in GB/s."""
    return {
        name: [
            (nbytes, Median.of(*(nbytes / time / 1000 for time in (us, us.high, us.low))))
            for nbytes, us in points
        ]
        for name, points in lines.items()
    }


def network(folder: Path) -> Iterable[Path]:
    """Times of calls of one size, over the time that the busiest link needs."""
    panels: dict[str, Lines] = {}
    for row in rows(folder / "network.jsonl"):
        if row["bytes"] != PICTURED_NBYTES or not row["limit (ms)"]:
            continue
        title = f"{row['operation']} of {sized(row['bytes'])}, {row['ranks a host']} a host"
        lines = panels.setdefault(title, defaultdict(list))
        for column in (column for column in row if column.endswith(" (ms)")):
            name = column.removesuffix(" (ms)")
            if name != "limit" and not isinstance(row[column], str):
                time = number(row[column])
                ratios = (at / row["limit (ms)"] for at in (time, time.low, time.high))
                lines[name].append((row["hosts"], Median.of(*ratios)))
    if panels:
        yield save(folder / "network", dict(sorted(panels.items())), "hosts", "time / limit")


def coordinator(folder: Path) -> Iterable[Path]:
    """Latency against size, from operations called like "broadcast 64 KB over TCP"."""
    for path in sorted(folder.glob("coordinator-*.jsonl")):
        panels: dict[str, Lines] = {}
        for row in rows(path):
            name, _, rest = row["operation"].partition(" ")
            size = rest.split()[:2]
            if len(size) < 2 or size[1] not in UNITS or not size[0].isdigit():
                continue
            title = f"{name} {' '.join(rest.split()[2:])}".strip()
            lines = panels.setdefault(title, defaultdict(list))
            for column, cell in row.items():
                peer, is_time, _ = column.replace("(us)", " (us)").partition(" (us)")
                peer = peer.strip() or row["peer"]
                if is_time and cell not in ("", "-"):
                    lines[peer].append((int(size[0]) * UNITS[size[1]], number(cell)))
        panels = {title: merged(lines) for title, lines in panels.items()}
        panels = {title: lines for title, lines in panels.items() if len(lines["drumline"]) > 1}
        if panels:
            yield save(folder / path.stem, panels, "size", "microseconds")


def model(folder: Path) -> Iterable[Path]:
    table = rows(folder / "model.jsonl")
    if not table:
        return
    load = "load and a token (s)"
    load = load if load in table[0] else "load (s)"  # a table that was measured before
    pairs = {
        "tokens a second": ("tokens/s", "plain tokens/s"),
        "first token (ms)": ("first token (ms)", "plain first (ms)"),
        load: (load, f"plain {load}"),
        "peak of a rank (MiB)": ("peak of a rank (MiB)", "plain peak (MiB)"),
    }
    panels: dict[str, Lines] = {
        title: {
            "drumline": [(row["ranks"], number(row[mine])) for row in table],
            "one process, in turns with each": [
                (row["ranks"], number(row[theirs])) for row in table
            ],
        }
        for title, (mine, theirs) in pairs.items()
    }
    yield save(folder / "model", panels, "ranks", None)


def scale(folder: Path) -> Iterable[Path]:
    panels: dict[str, Lines] = {}
    for row in rows(folder / "scale.jsonl"):
        lines = panels.setdefault(f"{row['what']}, {row['layout']}", defaultdict(list))
        for name, column in SCALE.items():
            lines[name].append((row["ranks"], number(row[column])))
    if panels:
        yield save(folder / "scale", panels, "ranks", "milliseconds")


def save(path: Path, panels: dict[str, Lines], x: str, y: str | None) -> Path:
    """A picture with a panel for each, as PNG and SVG; where the PNG is.

    Without y the titles name the units, and the scale of y begins at nothing; else it is of powers.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(panels), 4)
    lines_of = -(-len(panels) // columns)
    size = INCHES[0] * columns, INCHES[1] * lines_of + 0.4
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    shown: dict[str, Any] = {}
    for number_, (title, lines) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(lines_of, columns, number_)
        shown |= fill(axes, lines)
        scales(axes, sorted({at for points in lines.values() for at, _ in points}), x, y)
        axes.set(title=title, xlabel=x, ylabel=y or title)
    # One legend outside, so that it covers nothing.
    names = {"loc": "outside upper center", "ncols": min(len(shown), 2 * columns)}
    figure.legend(shown.values(), shown.keys(), fontsize="small", **names)
    picture = path.with_name(f"{path.name}.png")
    figure.savefig(picture, dpi=DOTS_PER_INCH)
    return picture


def fill(axes: Any, lines: Lines) -> dict[str, Any]:
    """Draw the lines, ours in front; by name, what stands for each in the legend."""
    drawn = {}
    for name in sorted(lines, key=lambda name: (not name.startswith("drumline"), name)):
        places, points = zip(*sorted(lines[name]), strict=True)
        (drawn[name],) = axes.plot(places, points, label=name, **look(name))
        ends = [point.low for point in points], [point.high for point in points]
        axes.fill_between(places, *ends, color=look(name)["color"], alpha=NOISE, linewidth=0)
    axes.grid(alpha=0.3)
    return drawn


def look(name: str) -> dict[str, Any]:
    if name.startswith("drumline"):
        usual = {"color": OURS, "marker": "o", "linewidth": 2.4, "zorder": 3}
        special = {"linestyle": "--", "markerfacecolor": "white"}
        return usual | (special if "preloaded" in name else {})
    colour, marker = next((PEERS[part] for part in PEERS if part in name), OTHER)
    return {"color": colour, "marker": marker, "linewidth": 1.3, "markersize": 5}


def scales(axes: Any, places: list[float], x: str, y: str | None) -> None:
    from matplotlib.ticker import LogFormatter

    axes.set_xscale("log", base=2)
    if x == "size":  # from 8 bytes to 64 MiB: every sixth power has a name
        places = [float(1 << power) for power in range(4, 31, 6) if 1 << power <= 2 * places[-1]]
    axes.set_xticks(places, [sized(at) if x == "size" else f"{at:g}" for at in places], minor=False)
    axes.minorticks_off()
    if y is None:
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(
            LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.4))
        )


def sized(nbytes: float) -> str:
    unit, name = next(pair for pair in BYTES if nbytes >= pair[0])
    return f"{nbytes / unit:g} {name}"


Picture = Callable[[Path], Iterable[Path]]

if __name__ == "__main__":
    main()
