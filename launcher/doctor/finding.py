"""Finding: one result of a check, and its format on the screen."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata

WIDTH = 110
MARKS = {True: "ok", False: "WRONG", None: "-"}


@dataclass(frozen=True)
class Finding:
    """ok: None for something optional that is absent. detail: the state. remedy: a line to type."""

    area: str
    name: str
    ok: bool | None
    detail: str
    remedy: str = ""


def lines(findings: Iterable[Finding]) -> Iterator[str]:
    """A line each, under its area; below a problem, the line to type."""
    area, num_problems = "", 0
    for finding in findings:
        if finding.area != area:
            area = finding.area
            yield area
        line = f"  {MARKS[finding.ok]:>5}  {finding.name}: {finding.detail}"
        yield from textwrap.wrap(line, WIDTH, subsequent_indent=" " * 9)
        if finding.remedy:
            yield f"         -> {finding.remedy}"
        num_problems += finding.ok is False
    yield f"{num_problems} wrong" if num_problems else "nothing is wrong"


def installed_version(distribution: str) -> str:
    """The version of an installed distribution; empty if it is missing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
