"""What one asks for first when something does not run: one screen, and for each fault the remedy.

python -m launcher doctor             # exit code 0 if nothing is wrong, else 1
python -m launcher doctor --json      # an object per finding
python -m launcher doctor --quick     # without trying the backends
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

from launcher.doctor import gpu_checks, launcher_checks, layer_checks, machine_checks
from launcher.doctor.finding import Finding

WIDTH = 110
MARKS = {True: "ok", False: "WRONG", None: "-"}
Look = Callable[[], Iterator[Finding]]


def looks(quick: bool) -> list[Look]:
    """Every look that is taken, in the order they are shown in."""
    return [
        *(
            machine_checks.software,
            gpu_checks.gpu_devices,
            layer_checks.nccl,
            launcher_checks.engines,
        ),
        *(layer_checks.network, machine_checks.ports_free, machine_checks.memory),
        *(machine_checks.limits, machine_checks.left_behind),
        *([] if quick else [layer_checks.backends]),
    ]


def examine(looks: Iterable[Look]) -> Iterator[Finding]:
    """What each look finds; one that breaks is a finding itself, and not the end."""
    for look in looks:
        try:
            yield from look()
        except Exception as error:
            area = look.__name__.replace("_", " ")
            found = f"looking at it failed: {type(error).__name__}: {error}"
            yield Finding(
                area,
                "look",
                False,
                found,
                "python -m launcher doctor --json > doctor.json (and report it with that)",
            )


def lines(findings: Iterable[Finding]) -> Iterator[str]:
    """A line each, under its area; below what is wrong, the line to type."""
    area, wrong = "", 0
    for finding in findings:
        if finding.area != area:
            area = finding.area
            yield area
        yield from _wrapped(f"  {MARKS[finding.ok]:>5}  {finding.name}: {finding.found}", 9)
        if finding.remedy:
            yield f"         -> {finding.remedy}"
        wrong += finding.ok is False
    yield f"{wrong} wrong" if wrong else "nothing is wrong"


def _wrapped(line: str, indent: int) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * indent, drop_whitespace=True)


def main(as_json: bool, quick: bool) -> int:
    """Print the findings as they come. 1 if one of them is wrong, else 0."""
    found: list[Finding] = []

    def kept() -> Iterator[Finding]:
        for finding in examine(looks(quick)):
            found.append(finding)
            yield finding

    told = (json.dumps(asdict(one)) for one in kept()) if as_json else lines(kept())
    for line in told:
        print(line, flush=True)
    return 1 if any(finding.ok is False for finding in found) else 0
