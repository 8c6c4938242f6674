"""Every layer measured in one run beside what one would use instead; tables, JSON lines, pictures.

    python -m benchmarks             # all of it, into build/benchmarks
    python -m benchmarks --quick     # less of everything
    python -m benchmarks startup coordinator
    python -m benchmarks big serve --llama-cpp llama.cpp/build/bin
    python -m benchmarks serve --peer 'vLLM=VENV/bin/vllm serve {folder} --port {port}'
    python -m benchmarks --renew     # the committed benchmarks/results, their page and the README

Each step is a command of its own, printed before it runs, and keeps every row as soon as it is
measured. One that fails or hangs does not keep the others from running, but is told of at the end,
on the page and by the exit code.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks import report, steps
from benchmarks.table import RESULTS

ROOT = Path(__file__).parents[1]
TRIAL = ROOT / "build" / "benchmarks"
STEP_S = 1800  # longer than any step takes: one that is not done has hung
FOR_FOUR = ["8", "4096", "65536", "1048576", "67108864"]  # bytes; on two cores they take long
SHORT_PROMPTS = ["--prefix", "20", "--long", "99", "--head-start", "0.2"]
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
        ["benchmarks.collectives", "-n", "4", "--dtypes", "float32", "--sizes", *FOR_FOUR],
        ["--sizes", "8", "--operations", "allreduce"],
    ),
    "network": (
        ["benchmarks.network"],
        ["--hosts", "2", "--per-host", "1", "--sizes", "65536", "--repeats", "1"],
    ),
    "encryption": (["benchmarks.encryption"], ["--repeats", "10"]),
    "shm-limits": (["benchmarks.shm_limits"], []),
    "calls": (["benchmarks.calls"], ["--repeats", "3"]),
    "torch-backend": (["benchmarks.torch_backend"], ["--repeats", "3"]),
    "inference": (["benchmarks.inference"], ["--repeats", "1", "--layers", "2", "--hidden", "96"]),
    "nano-engine": (
        ["benchmarks.nano_engine"],
        ["--repeats", "1", "--layers", "2", "--hidden", "96"],
    ),
    "model": (
        ["benchmarks.model"],
        ["--ranks", "1", "2", "--repeats", "1", "--layers", "2", "--hidden", "96"],
    ),
    "big": (
        ["benchmarks.big"],
        ["--limit", "0", "--layers", "4", "--hidden", "256", "--prompt", "16", "--new", "4"],
    ),
    "big-bfloat16": (
        ["benchmarks.big", "--dtype", "bfloat16"],
        ["--limit", "0", "--layers", "2", "--hidden", "256", "--prompt", "16", "--delays", "0"],
    ),
    "serve": (
        ["benchmarks.serve", "--repeats", "2"],
        ["--tiny", "--repeats", "1", "--clients", "2", "--new-tokens", "4", *SHORT_PROMPTS],
    ),
    "nd_loading": (["benchmarks.nd_loading"], ["--ranks", "2"]),
    "compile_once": (["benchmarks.compile_once"], ["--ranks", "2"]),
    "tracing": (["benchmarks.tracing"], ["--repeats", "20"]),
    "scale": (["benchmarks.scale"], ["--ranks", "4", "8", "16", "--repeats", "1"]),
}
WITH_LLAMA_CPP = {"big", "big-bfloat16", "serve"}
SLOW = {"nd_loading", "compile_once"}  # left out of a trial


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}; or all")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--renew", action="store_true", help="write the committed tables")
    parser.add_argument(
        "--llama-cpp",
        type=Path,
        metavar="FOLDER",
        help=f"of its programs, for a row in {', '.join(sorted(WITH_LLAMA_CPP))}; not with --quick",
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="for a row in serve; see benchmarks.serve",
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # steps end with us
    unknown = set(arguments.steps) - STEPS.keys()
    if unknown:
        parser.error(f"there is no step {', '.join(sorted(unknown))}: choose of {', '.join(STEPS)}")
    if arguments.renew and arguments.quick:
        parser.error("a quick run is too short for the committed tables: leave --quick or --renew")
    every = [name for name in STEPS if not (arguments.quick and name in SLOW)]
    folder = RESULTS if arguments.renew or "BENCHMARK_RESULTS" in os.environ else TRIAL
    peers = arguments.llama_cpp, tuple(arguments.peer)
    return run(arguments.steps or every, arguments.quick, folder, *peers)


def run(
    names: list[str],
    quick: bool,
    folder: Path,
    llama_cpp: Path | None = None,
    servers: Sequence[str] = (),
) -> int:
    """Run these steps and write the page after each; 1 if one of them failed."""
    print(steps.expected([] if quick else names, folder), file=sys.stderr)
    failed = {}
    for name in names:
        seconds, how = ran(name, options(name, quick, llama_cpp, servers), folder)
        steps.note(folder, name, how, seconds)
        report.write(folder)
        failed |= {} if how == steps.WELL else {name: how}
    draw(folder)
    print(f"written to {report.write(folder)}")
    for name, how in failed.items():
        print(f"failed: {name}: {how}", file=sys.stderr)
    return 1 if failed else 0


def draw(folder: Path) -> None:
    if not find_spec("matplotlib"):
        return print("no pictures: pip install matplotlib", file=sys.stderr)
    from benchmarks import plots

    plots.draw(folder)


def options(
    name: str, quick: bool, llama_cpp: Path | None, servers: Sequence[str] = ()
) -> list[str]:
    """The words of a step after python -m. servers: beside which it measures, as NAME=COMMAND."""
    peers = []
    if llama_cpp and name in WITH_LLAMA_CPP:
        peers = ["--llama-cpp", str(llama_cpp.resolve())]
    if name == "serve":
        peers += [word for server in servers for word in ("--peer", server)]
    return [*STEPS[name][0], *(STEPS[name][1] if quick else peers), "--save"]


def ran(name: str, words: list[str], folder: Path) -> tuple[float, str]:
    """Run one step, python -m WORDS; how many seconds it took, and how it ended."""
    command = ["-m", *words]
    print(f"== python {shlex.join(command)}", file=sys.stderr)
    began = time.monotonic()
    environ = {"BENCHMARK_RESULTS": str(folder), "PYTHONWARNINGS": "ignore"}  # rows alone are shown
    how = ended([sys.executable, *command], environ)
    seconds = time.monotonic() - began
    print(f"== {name}: {how}, {seconds:.0f} s", file=sys.stderr)
    return seconds, how


def ended(command: list[str], more: Mapping[str, str], limit_s: float = STEP_S) -> str:
    """How a command ended. One that hangs is ended with all that it has started."""
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, **more},
        start_new_session=True,
    ) as process:
        try:
            code = process.wait(limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return f"hung, and was ended after {limit_s:.0f} s"
            raise
    return steps.WELL if code == 0 else f"ended with {code}"


if __name__ == "__main__":
    sys.exit(main())
