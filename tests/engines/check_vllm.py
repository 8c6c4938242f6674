"""An unmodified vLLM over drumline beside itself: equal tokens, lost workers named, nothing left.

make engines
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
TIMEOUT_S = 900
ENDED_S = 60.0  # the last processes of a run end after its first one
MARK = "CHECK_VLLM_RUN"  # a variable that every process of a run inherits
NOT_OURS = ("mpich", "sm_segment")  # of MPI, which no run starts
SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # generate.py asks its workers for their pids
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
}
ON = {"DRUMLINE_VLLM": "1"}
SOON = {**ON, "DRUMLINE_VLLM_TIMEOUT_S": "10"}
LAUNCHED = ("-m", "drumline", "run", "-n", "2")


@dataclass(frozen=True)
class Run:
    """One vLLM. same_as: the run whose tokens it must generate. python: what starts the script."""

    name: str
    options: str
    environ: dict[str, str]
    same_as: str = ""
    python: tuple[str, ...] = ()


RUNS = [
    Run("one rank", "--executor uni", {}),
    Run("own", "--tp 2 --executor mp", {}, "one rank"),
    Run("ours", "--tp 2 --executor mp", ON, "one rank"),
    Run("launched", "--tp 2 --executor external_launcher", ON, "one rank", LAUNCHED),
    Run("one rank, asked", "--executor uni", ON, "one rank"),
    Run("own, compiled", "--tp 2 --executor mp --compiled", {}),
    Run("ours, compiled", "--tp 2 --executor mp --compiled", ON, "own, compiled"),
    Run("own, bfloat16", "--tp 2 --executor mp --dtype bfloat16", {}),
    Run("ours, bfloat16", "--tp 2 --executor mp --dtype bfloat16", ON, "own, bfloat16"),
    Run("a worker killed", "--tp 2 --executor mp --lose 1 --by SIGKILL", SOON),
    Run("a worker stopped", "--tp 2 --executor mp --lose 1 --by SIGSTOP", SOON),
]


def make_model(folder: Path) -> None:
    if not (folder / "config.json").exists():
        config = LlamaConfig(
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=1024,
            max_position_embeddings=4096,
        )
        LlamaForCausalLM(config).save_pretrained(folder)


def left_behind(mark: str, before: set[str]) -> list[str]:
    """Processes of the run that still live, and its names in shared memory."""
    names = [entry.name for entry in os.scandir("/dev/shm") if entry.is_file()]
    left = [name for name in names if not name.startswith(NOT_OURS) and name not in before]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                left.append(f"process {process.name}: {command}")
        except OSError:  # it has ended, or is somebody else's
            continue
    return left


def wait_for_ends(mark: str) -> None:
    """Let stopped workers of the run go on: they see that vLLM has ended, and end.

    vLLM waits a few seconds for its workers and kills them, unless it is killed before itself.
    """
    deadline_s = time.monotonic() + ENDED_S
    while time.monotonic() < deadline_s and (
        left := left_behind(mark, set(os.listdir("/dev/shm")))
    ):
        for name in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(name.split()[1].rstrip(":")), signal.SIGCONT)
        time.sleep(0.2)


def generate(run: Run, model: Path, folder: Path) -> tuple[dict[str, object], str]:
    """The result of a run, and all that it printed."""
    path = folder / f"{run.name}.json"
    script = [str(HERE / "generate.py"), str(model), str(path), *run.options.split()]
    mark, before = uuid.uuid4().hex, set(os.listdir("/dev/shm"))
    log = path.with_suffix(".log")
    with log.open("w") as output:  # no pipe, which a worker that is left would keep open
        done = subprocess.run(
            [sys.executable, *run.python, *script],
            env={**os.environ, **SETTINGS, **run.environ, MARK: mark},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        )
    wait_for_ends(mark)
    printed = log.read_text()
    if done.returncode:
        sys.exit(f"{run.name}: exit code {done.returncode}\n{printed[-6000:]}")
    left = left_behind(mark, before)
    if run.environ and left:
        sys.exit(f"{run.name}: left behind: {left}")
    results = [json.loads(result.read_text()) for result in folder.glob(f"{run.name}.json.*")]
    if any(result != results[0] for result in results):
        sys.exit(f"{run.name}: its ranks differ: {results}")
    return results[0], printed


def check_tokens(run: Run, results: dict[str, dict[str, object]]) -> str:
    result = results[run.name]
    expected = "VllmCommunicator" if run.environ else "CpuCommunicator"
    used = set(result["communicators"])
    if "--tp" in run.options and used != {expected}:
        sys.exit(f"{run.name}: its workers used {used}")
    if run.same_as and result["tokens"] != results[run.same_as]["tokens"]:
        sys.exit(f"{run.name}: other tokens than {run.same_as}: {results}")
    return f"tokens as {run.same_as}" if run.same_as else "the reference"


def check_loss(run: Run, result: dict[str, object], printed: str) -> str:
    """generate() raised in time, and the log names the rank."""
    kind = "PeerLost: rank 0: rank 1 (pid" if "KILL" in run.options else "CommunicatorTimeout: "
    lines = [line for line in printed.splitlines() if kind in line and "rank 1" in line]
    if not lines or not result["error"]:
        sys.exit(f"{run.name}: {result}, and no line with {kind}")
    return (
        f"{result['error'][:16]} after {result['took_s']:.1f} s; {lines[0][lines[0].index(kind) :]}"
    )


def check(folder: Path, only: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    make_model(model)
    results: dict[str, dict[str, object]] = {}
    for run in RUNS:
        if only and run.name not in only:
            continue
        results[run.name], printed = generate(run, model, folder)
        is_loss = "--lose" in run.options
        verdict = check_loss(run, results[run.name], printed) if is_loss else ""
        print(f"{run.name}: {verdict or check_tokens(run, results)}", flush=True)


if __name__ == "__main__":
    check(Path(sys.argv[1]).absolute(), sys.argv[2:])
