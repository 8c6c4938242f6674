"""Pictures of a device map: a bar of memory for each place, with the modules on it."""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path
from string import Template

from drumline.core.device_map import DeviceMap, Place, format_nbytes, sort_places

WIDTH_INCHES, ROW_INCHES = 12, 0.5
DOTS_PER_INCH = 120
COLOURS = ("#4a90d9", "#7bb0e6")  # of neighbours
PAGE = Path(__file__).with_name("plan_page.html")
ROW = """<div class="row"><span class="name">rank {rank} {device}</span>
<span class="size">{used} of {free}</span>
<span class="space"><span class="bar" style="width:{width:.3f}%">{modules}</span></span></div>"""
MODULE = '<span class="module" title="{name}: {size}" style="width:{width:.3f}%"></span>'


def write_html(device_map: DeviceMap, text: str, page: Path) -> None:
    """Write a page that needs nothing else; text: below the bars."""
    template, (colour, even) = Template(PAGE.read_text()), COLOURS
    parts = {"rows": "\n".join(_rows(device_map)), "text": html.escape(text)}
    page.write_text(template.substitute(parts, colour=colour, even_colour=even))


def _rows(device_map: DeviceMap) -> Iterator[str]:
    sizes = _sizes(device_map)
    most = max(sizes.values(), default=0) or 1
    for (rank, device), nbytes in sizes.items():
        modules = "".join(
            MODULE.format(
                name=html.escape(name), size=format_nbytes(size), width=100 * size / (nbytes or 1)
            )
            for name, size in _modules(device_map, (rank, device))
        )
        used = format_nbytes(device_map.used((rank, device)))
        free = format_nbytes(device_map.free_nbytes.get((rank, device), 0))
        fields = {"rank": rank, "device": html.escape(device), "used": used, "free": free}
        yield ROW.format(**fields, width=100 * nbytes / most, modules=modules)


def draw(device_map: DeviceMap, picture: Path) -> None:
    """Draw a PNG (or SVG, by the ending). Raises ImportError if matplotlib is not installed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = _sizes(device_map)
    figure = Figure(figsize=(WIDTH_INCHES, 1 + ROW_INCHES * len(sizes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, (place, nbytes) in enumerate(sizes.items()):
        axes.barh(row, nbytes / (1 << 30), color="none", edgecolor="gray")
        begin = 0
        for number, (_, size) in enumerate(_modules(device_map, place)):
            axes.barh(row, size / (1 << 30), left=begin / (1 << 30), color=COLOURS[number % 2])
            begin += size
    names = [
        f"rank {place[0]} {place[1]}\n{format_nbytes(device_map.used(place))} of "
        f"{format_nbytes(device_map.free_nbytes.get(place, 0))}"
        for place in sizes
    ]
    axes.set_yticks(range(len(sizes)), names)
    axes.invert_yaxis()
    axes.set_xlabel("GiB")
    figure.savefig(picture, dpi=DOTS_PER_INCH)


def _sizes(device_map: DeviceMap) -> dict[Place, int]:
    """The bytes of every place: its memory, or what it holds if that is more."""
    places = {**dict.fromkeys(device_map.places.values(), 0), **device_map.free_nbytes}
    return {
        place: max(nbytes, device_map.used(place)) for place, nbytes in sort_places(places).items()
    }


def _modules(device_map: DeviceMap, place: Place) -> list[tuple[str, int]]:
    return [(n, device_map.nbytes[n]) for n, where in device_map.places.items() if where == place]
