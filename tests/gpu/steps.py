"""The steps of `make gpu`: python -m tests.gpu.steps RESULTS.tgz [PART ...]

The parts come in order, most worth first, and each ends within nine minutes. All together end
within half an hour, or within --seconds: a step that might not is not begun. What is left then is
named, and the same command goes on with it. Every step's output and tables are in the archive
before the next step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import table

ROOT = Path(__file__).parents[2]
PART_S, TOTAL_S = 540, 1740
INTERRUPTED_S = 10.0  # for what is interrupted to say where it was
FRESH_S = 3600.0  # a step that ended longer ago is run again
PYTHON = sys.executable
# The plugins and options of this repository's own environment may be missing on that machine.
PYTEST = (
    f"{PYTHON} -m pytest -v -o addopts='--import-mode=importlib -ra' -o timeout=90 "
    "--continue-on-collection-errors"
)
# What NCCL needs where the driver's memory mapping is not passed on to virtual machines.
WITHOUT_MAPPED_MEMORY = {"NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0"}

FACTS = f"""
uname -a; nvidia-smi; nvidia-smi topo -m; nvcc --version; df -h . /dev/shm; {PYTHON} -V
{PYTHON} -c '
import torch, transformers, msgpack, pytest, drumline
from communicator.backends.nccl import nccl_library
print("torch", torch.__version__, torch.version.cuda, "transformers", transformers.__version__)
print("GPUs that torch sees:", torch.cuda.device_count())
print("NCCL:", nccl_library.find().path)
print("not in the driver:", nccl_library.missing_graph_functions() or "nothing that is needed")
' || exit
timeout 30 {PYTHON} -m drumline doctor || true
"""

# By `make gpu-parts`: native parts of these sources, and wheels where packages are missing or too
# old. Without them, what was carried here serves where there is no compiler.
PARTS_BROUGHT, SITE = ROOT / ".gpu", ROOT / "build" / "gpu-site"
CHECK_NATIVE = f"""{PYTHON} -c '
import communicator._native, coordinator._node_shm
from communicator.backends import nccl
communicator._native.open(nccl.Nccl.path)
'"""
BUILD = f"""
test ! -d {PARTS_BROUGHT} || {PYTHON} -m pip install --quiet --no-index --no-deps --no-compile \
    --upgrade --target {SITE} {PARTS_BROUGHT}/*.whl || echo '== taking the packages that are here'
if test "$(cat {PARTS_BROUGHT}/native.digest)" = "$(csrc/scripts/digest.sh)" &&
    tar xzf {PARTS_BROUGHT}/native.tgz && {CHECK_NATIVE}; then exit 0; fi
test ! -d {PARTS_BROUGHT} || echo '== .gpu is of other sources: building. Run make gpu-parts again'
{PYTHON} setup.py --quiet build_ext --inplace || echo '== not built: taking what is here'
csrc/scripts/build_cuda.sh || echo '== no new kernel: taking what is here'
{CHECK_NATIVE}
"""


@dataclass(frozen=True)
class Step:
    """A shell command. retry: variables with which a failed one is run again, and all after it."""

    name: str
    command: str
    limit_s: int
    retry: Mapping[str, str] | None = None


def tests(files: str, words: str) -> str:
    return f"{PYTEST} {files} -k '{words}'"


NCCL, ONESHOT = "tests/gpu/test_nccl.py", "tests/gpu/test_oneshot.py"
FIRST, SLOW = "registered_memory or sample", "conform or compiled or behind"
PARTS = {
    "facts": [
        Step("build", BUILD, 180),
        Step("facts", FACTS, 60),
        Step("first-sums", tests(NCCL, FIRST), 100, WITHOUT_MAPPED_MEMORY),
    ],
    "tests": [
        Step("oneshot", tests(ONESHOT, "not process and not thousand"), 100),
        Step("oneshot-processes", tests(ONESHOT, "process or thousand"), 120),
        Step("nccl", tests(NCCL, f"not ({SLOW}) and not ({FIRST})"), 320),
    ],
    "tables": [
        Step("costs", f"{PYTHON} -m benchmarks.gpu costs", 100),
        Step("vllm", f"test ! -d {PARTS_BROUGHT} || {PYTHON} -m benchmarks.gpu vllm", 60),
        Step("calls", f"{PYTHON} -m benchmarks.gpu calls", 90),
        Step("small", f"{PYTHON} -m benchmarks.gpu small", 90),
    ],
    "models": [
        Step("models", f"{PYTHON} -m benchmarks.gpu models", 200),
        Step("stages", f"{PYTEST} tests/gpu/test_stages.py", 240),
    ],
    "conformance": [Step("conformance", tests(NCCL, "conform"), 500)],
    "long": [
        Step("compiled", tests(NCCL, "compiled or behind"), 240),
        Step("lives", f"{PYTHON} -m benchmarks.gpu lives", 300),
    ],
    "sanitizer": [
        Step("sanitizer", f"{PYTHON} -m benchmarks.gpu sanitizer", 400),
        Step(
            "without-gpu",
            "command -v gcc || { echo 'left out: needs gcc, for stand-ins'; exit 0; }; "
            f"{PYTEST} tests/communicator/backends/nccl/test_nccl_without_gpu.py",
            140,
        ),
    ],
}


class Results:
    """A folder of what the steps printed and measured, and an archive of it that is always whole.

    The folder outlives the process, so that the archive of a later part has the earlier ones too.
    On a machine without it, the archive of another is taken that was brought along.
    """

    def __init__(self, archive: Path) -> None:
        self.archive, self.folder = archive.absolute(), ROOT / "build" / archive.stem
        brought = PARTS_BROUGHT / archive.name
        if brought.exists() and not self.folder.exists():
            with tarfile.open(brought) as tar:
                tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4
                tar.extractall(self.folder.parent)
            (self.folder.parent / "gpu").rename(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._environ = self.folder / "environ.json"

    def environ(self) -> dict[str, str]:
        """The variables that a step needed, for the later ones."""
        return json.loads(self._environ.read_text()) if self._environ.exists() else {}

    def keep_environ(self, environ: Mapping[str, str]) -> None:
        self._environ.write_text(json.dumps(dict(environ)))

    def has_ended(self, name: str) -> bool:
        """True if the step ran to its end within the last hour."""
        log = self.folder / f"{name}.log"
        is_fresh = log.exists() and time.time() - log.stat().st_mtime < FRESH_S
        return is_fresh and f"== {name}: exit" in log.read_text(errors="replace")

    def save(self) -> None:
        self.archive.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.archive.with_suffix(".part")
        with tarfile.open(unfinished, "w:gz") as tar:
            tar.add(self.folder, "gpu")
        unfinished.replace(self.archive)


def run_step(step: Step, results: Results) -> bool:
    """Run a step, and once more with its retry variables if it failed. True if it passed."""
    environ = results.environ()
    passed = _run_command(step, step.name, environ, results)
    if passed or step.retry is None or step.retry.items() <= environ.items():
        return passed
    print(f"== {step.name} once more with {dict(step.retry)}", flush=True)
    if _run_command(step, f"{step.name}-again", step.retry, results):
        results.keep_environ(step.retry)
    return False


def run_steps(steps: list[Step], results: Results, total_s: float) -> tuple[list[str], list[str]]:
    """The names of the steps that failed, and of those that might not have ended in time.

    The first, which builds, and the next are run in any case: whoever has less time than a step has
    the rest of it later. Without the first nothing runs.
    """
    end, failed = time.monotonic() + total_s, []
    for at, step in enumerate(steps):
        if at > 1 and step.limit_s > end - time.monotonic():
            return failed, [step.name for step in steps[at:]]
        if not run_step(step, results):
            failed.append(step.name)
            if at == 0 and len(steps) > 1:
                print(f"== nothing can run without {step.name}", flush=True)
                break
    return failed, []


def _run_command(step: Step, name: str, environ: Mapping[str, str], results: Results) -> bool:
    print(f"== {name} (at most {step.limit_s} s)", flush=True)
    start = time.monotonic()
    log = results.folder / f"{name}.log"
    defaults = {"NCCL_DEBUG": "WARN", "PYTHONUNBUFFERED": "1"}
    defaults |= {"BENCHMARK_RESULTS": str(results.folder), "STEP_S": str(step.limit_s)}
    path = os.pathsep.join(filter(None, [str(SITE), str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        ["bash", "-c", f"set -o pipefail; {{ {step.command}\n}} 2>&1 | tee -i {log}"],
        # Bytecode is written, or every process would compile what it imports.
        env=defaults
        | os.environ
        | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": ""}
        | dict(environ),
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        code = process.wait(step.limit_s)
    except subprocess.TimeoutExpired:
        code = -signal.SIGKILL
        _end(process)
    ending = f"== {name}: exit {code} after {time.monotonic() - start:.0f} s"
    with log.open("a") as file:
        print(ending, file=file)
    print(ending, flush=True)
    results.save()
    return code == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a step, so that pytest says what has failed and ranks where they are; then kill."""
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(INTERRUPTED_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", type=Path)
    parser.add_argument("--seconds", type=int, default=TOTAL_S, help="for all of them")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all if none is named")
    arguments = parser.parse_args()
    if table.commit() == "unknown":
        print("== the tables will not say their commit: set BENCHMARK_COMMIT", flush=True)
    results = Results(arguments.archive)
    build = next(iter(PARTS.values()))[0]
    others = [step for part in arguments.parts or PARTS for step in PARTS[part] if step != build]
    if not arguments.parts:
        others = [step for step in others if not results.has_ended(step.name)] or others
    slow = 4 if os.environ.get("GPU_STAND_IN") else 1  # where no time on a GPU is at stake
    steps = [replace(step, limit_s=slow * step.limit_s) for step in [build, *others]]
    failed, left_out = run_steps(steps, results, slow * arguments.seconds)
    if left_out:
        print(f"== left out, for the time is over: {', '.join(left_out)}. Run it once more")
    print(f"== failed: {', '.join(failed) or 'nothing'}. All results: {results.archive}")
    return len(failed + left_out) > 0


if __name__ == "__main__":
    sys.exit(main())
