"""Every layer measured in one run beside what one would use instead; tables, JSON lines, pictures.

    python -m benchmarks             # all of it; writes benchmarks/results and benchmarks/README.md
    python -m benchmarks --quick     # less of everything, to see that it runs
    python -m benchmarks startup coordinator

Each step is a command of its own, printed before it runs. One that fails does not keep the others
from running, but is the exit code of all.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from benchmarks import report
from benchmarks.table import RESULTS

ROOT = Path(__file__).parents[1]
# What each step runs: all of it, and what stands for it in a trial.
STEPS = {
    "startup": (
        ["benchmarks.startup", "--repeats", "3"],
        ["-n", "2", "--dying", "2", "--repeats", "1"],
    ),
    "coordinator": (["benchmarks.coordinator"], []),
    "coordinator-peers": (["benchmarks.coordinator_peers"], ["--repeats", "20"]),
    "collectives": (
        ["benchmarks.collectives", "-n", "2"],
        ["--sizes", "8", "65536", "--operations", "allreduce", "--dtypes", "float32"],
    ),
    "collectives-4": (
        ["benchmarks.collectives", "-n", "4", "--dtypes", "float32"],
        ["--sizes", "8", "--operations", "allreduce"],
    ),
    "shm-limits": (["benchmarks.shm_limits"], []),
    "inference": (["benchmarks.inference"], ["--repeats", "1", "--layers", "2", "--hidden", "96"]),
    "model": (
        ["benchmarks.model"],
        ["--ranks", "1", "2", "--repeats", "1", "--layers", "2", "--hidden", "96"],
    ),
    "nd_loading": (["benchmarks.nd_loading"], ["--ranks", "2"]),
    "compile_once": (["benchmarks.compile_once"], ["--ranks", "2"]),
    "tracing": (["benchmarks.tracing"], ["--repeats", "20"]),
    "scale": (["benchmarks.scale"], ["--ranks", "4", "8", "16", "--repeats", "1"]),
}
SLOW = {"nd_loading", "compile_once"}  # left out of a trial


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}; or all")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    arguments = parser.parse_args()
    unknown = set(arguments.steps) - STEPS.keys()
    if unknown:
        parser.error(f"there is no step {', '.join(sorted(unknown))}: choose of {', '.join(STEPS)}")
    every = [name for name in STEPS if not (arguments.quick and name in SLOW)]
    failed = [name for name in arguments.steps or every if not ran(name, arguments.quick)]
    if find_spec("matplotlib"):
        from benchmarks import plots

        plots.draw(RESULTS)
    else:
        print("no pictures: pip install matplotlib", file=sys.stderr)
    print(f"written to {report.write()}")
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    return 1 if failed else 0


def ran(name: str, quick: bool) -> bool:
    """Run one step; whether it ended well."""
    command = ["-m", *STEPS[name][0], *(STEPS[name][1] if quick else []), "--save"]
    print(f"== python {shlex.join(command)}", file=sys.stderr)
    began = time.monotonic()
    done = subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, cwd=ROOT)
    print(f"== {name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
