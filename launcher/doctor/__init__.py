"""The doctor: checks of this machine, and a remedy for each problem.

python -m launcher doctor             # exit code 0 if nothing is wrong, else 1
python -m launcher doctor --json      # an object per finding
python -m launcher doctor --quick     # without trying the backends
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

from launcher.doctor import finding, gpu_checks, launcher_checks, layer_checks, machine_checks
from launcher.doctor.finding import Finding

DoctorCheck = Callable[[], Iterator[Finding]]
QUICK_CHECKS: list[DoctorCheck] = [
    machine_checks.software,
    gpu_checks.gpu_devices,
    layer_checks.nccl,
    launcher_checks.launchers,
    layer_checks.network,
    machine_checks.ports_free,
    machine_checks.memory,
    machine_checks.limits,
    machine_checks.leftovers,
]


def checks(quick: bool) -> list[DoctorCheck]:
    """Every check, in the order in which the findings are shown."""
    return QUICK_CHECKS if quick else [*QUICK_CHECKS, layer_checks.models, layer_checks.backends]


def run_checks(checks: Iterable[DoctorCheck]) -> Iterator[Finding]:
    """The findings of each check; a check that raises is a finding itself."""
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            area = check.__name__.replace("_", " ")
            detail = f"the check failed: {type(error).__name__}: {error}"
            remedy = "python -m launcher doctor --json > doctor.json (and report it with that)"
            yield Finding(area, "check", False, detail, remedy)


def main(as_json: bool, quick: bool) -> int:
    """Print the findings as they come. Return 1 if one of them is wrong, else 0."""
    shown, kept = itertools.tee(run_checks(checks(quick)))
    for line in map(json.dumps, map(asdict, shown)) if as_json else finding.lines(shown):
        print(line, flush=True)
    return int(any(result.ok is False for result in kept))
