"""An unmodified vLLM over drumline, beside its own shared memory: calls, decoding, starting.

    make engines-bench

Two ranks of vLLM's external_launcher, bfloat16, eager, on the model of tests/engines. Each rank
has both communicators of its group, so the two take turns in the same processes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.collectives import MARK, from_rank_0
from benchmarks.table import Table, alternate, spread
from tests.engines.check_vllm import ON, SETTINGS, make_model

OWN, OURS, BACKEND, GLOO = WAYS = "vLLM's own", "drumline", "backend", "gloo"
Call = Callable[[torch.Tensor], Any]
# What a call and decoding may take, in parts of the time of vLLM's own.
ALLREDUCE = {256: 0.3, 512: 0.3, 8192: 0.3, 16384: 0.3, 131072: 0.8, 524288: 0.8}
BACKEND_AT_MOST = 1.5
BATCHES = (1, 32)
NEW_TOKENS = 64
PRELOAD = "vllm.entrypoints.llm"
CALLS = (
    "engines-calls",
    (
        *("what", "elements", "right", f"{OWN} (us)", "drumline (us)", "backend (us)", "gloo (us)"),
        *("backend / own", "at most", "ratio"),
    ),
    "Two ranks; microseconds of a call on rank 0, median and middle half of turns. vLLM's own: its "
    "shared memory. drumline: the communicator that the adapter gives to vLLM. backend: "
    'torch.distributed on the backend "drumline". right: all gave the same. at most: '
    f"what the ratio may be; backend / own may be {BACKEND_AT_MOST}.",
)
DECODING = (
    "engines-decoding",
    ("batch", "right", f"{OWN} (tokens/s)", "drumline (tokens/s)", "drumline / own"),
    f"generate() of {NEW_TOKENS} tokens with either communicator, in turns; median and middle half "
    "of turns. right: the tokens are equal. Above 1 drumline is faster.",
)
STARTING = (
    "engines-starting",
    ("what", "seconds", "ratio"),
    "From the command until both ranks have generated a token and ended. ratio: divided by the "
    "first row.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--starts", type=int, default=3, help="of each kind")
    parser.add_argument("--save", action="store_true", help="write tables to benchmarks/results")
    parser.add_argument("--rank", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return be_rank(arguments.rank, arguments.repeats)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        measure_calls_and_decoding(folder, arguments)
        if arguments.starts:
            measure_starting(folder, arguments)


def measure_calls_and_decoding(model: str, arguments: argparse.Namespace) -> None:
    calls, decoding = (Table(*of, keep=arguments.save) for of in (CALLS, DECODING))
    rank = ["-m", "benchmarks.engines", "--rank", model, "--repeats", str(arguments.repeats)]
    for row in from_rank_0([*launch(), *rank], environ()):
        right, times = "yes" if row["right"] else "NO", row["values"]
        if row["what"] == "decoding":
            cells = (spread(times[OWN]), spread(times[OURS]), ratio(times, OURS))
            decoding.add(row["size"], right, *cells)
        else:
            cells = (spread(times[name]) if name in times else "" for name in WAYS)
            beside = ratio(times, BACKEND) if BACKEND in times else ""
            limit = ALLREDUCE[row["size"]] if BACKEND in times else ""
            calls.add(row["what"], row["size"], right, *cells, beside, limit, ratio(times, OURS))
    calls.end()
    decoding.end()


def ratio(values: dict[str, list[float]], name: str) -> float:
    return statistics.median(values[name]) / statistics.median(values[OWN])


def launch(*options: str) -> list[str]:
    return [sys.executable, "-m", "drumline", "run", "-n", "2", *options]


def environ() -> dict[str, str]:
    return {**os.environ, **SETTINGS, **ON, "VLLM_LOGGING_LEVEL": "ERROR"}


def measure_starting(model: str, arguments: argparse.Namespace) -> None:
    table = Table(*STARTING, keep=arguments.save)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    commands = {
        "torchrun": torchrun,
        "drumline run": launch(),
        f"drumline run --preload {PRELOAD}": launch("--preload", PRELOAD),
    }
    cases = {name: partial(start_s, command, model) for name, command in commands.items()}
    times = alternate(cases, arguments.starts)
    for name, took in times.items():
        table.add(name, spread(took), ratio({OWN: times["torchrun"], name: took}, name))
    table.end()


def start_s(command: list[str], model: str) -> float:
    script = ["tests/engines/generate.py", model, f"{model}/tokens", "--tp", "2"]
    script += ["--executor", "external_launcher", "--new-tokens", "1"]
    start = time.monotonic()
    subprocess.run([*command, *script], env=environ(), stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - start


def be_rank(model: str, repeats: int) -> None:
    from vllm.distributed import get_tp_group

    from tests.engines.generate import open_engine  # which imports vLLM

    options = {"tp": 2, "pp": 1, "executor": "external_launcher", "dtype": "bfloat16"}
    engine = open_engine(argparse.Namespace(model=model, compiled=False, **options))
    group = get_tp_group()
    ways = {OWN: own_communicator(group), OURS: group.device_communicator}
    sums = {name: way.all_reduce for name, way in ways.items()}
    sums |= {BACKEND: torch_sum("drumline"), GLOO: torch_sum("gloo")}
    compare(group, "all_reduce", [(size,) for size in ALLREDUCE], sums, 4 * repeats)
    joins = {name: way.all_gather for name, way in ways.items()}
    compare(group, "all_gather", [(batch, 512) for batch in BATCHES], joins, 4 * repeats)
    for batch in BATCHES:
        compare_decoding(engine, group, ways, batch, repeats)


def own_communicator(group: Any) -> Any:
    """vLLM's for CPUs, over its own shared memory."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    os.environ["VLLM_DIST_IDENT"] = os.environ["MASTER_PORT"]  # of the names of its segments
    own = CpuCommunicator(group.cpu_group, group.device, group.device_group, "tp:own")
    assert own.supports_tensor_dict, "vLLM does not use its shared memory"
    return own


def torch_sum(backend: str) -> Call:
    group = dist.new_group(backend=backend)

    def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=group)
        return tensor

    return all_reduce


def compare(
    group: Any, what: str, shapes: list[tuple[int, ...]], calls: dict[str, Call], repeats: int
) -> None:
    """All sizes in each turn: where the hypervisor has placed the two processes counts for all."""
    is_right = {shape: gives_the_same(group, shape, calls) for shape in shapes}
    cases = {
        f"{shape} {name}": partial(call_us, group, call, shape, num_calls(name, shape))
        for shape in shapes
        for name, call in calls.items()
    }
    times = alternate(cases, repeats)
    for shape in shapes:
        values = {name: times[f"{shape} {name}"] for name in calls}
        tell(group, what, math.prod(shape), is_right[shape], values)


def gives_the_same(group: Any, shape: tuple[int, ...], calls: dict[str, Call]) -> bool:
    values = (torch.arange(math.prod(shape)) % 7 + group.rank_in_group).view(shape).bfloat16()
    results = [call(values.clone()) for call in calls.values()]
    return all(torch.equal(result, results[0]) for result in results)


def num_calls(name: str, shape: tuple[int, ...]) -> int:
    """So many that a turn takes milliseconds: within it the machine is the same for all."""
    return max(10, min(1000, (8 << 20) // math.prod(shape)) // (20 if name == GLOO else 1))


def call_us(group: Any, call: Call, shape: tuple[int, ...], calls: int) -> float:
    tensor = torch.zeros(shape, dtype=torch.bfloat16)
    dist.barrier(group=group.cpu_group)
    call(tensor)
    start = time.perf_counter_ns()
    for _ in range(calls):
        call(tensor)
    return (time.perf_counter_ns() - start) / 1000 / calls


def compare_decoding(
    engine: Any, group: Any, ways: dict[str, Any], batch: int, repeats: int
) -> None:
    from tests.engines.generate import generate

    tokens: dict[str, Any] = {}

    def tokens_per_s(name: str) -> float:
        group.device_communicator = ways[name]
        dist.barrier(group=group.cpu_group)
        start = time.perf_counter()
        tokens[name] = generate(engine, NEW_TOKENS, [[5 + row] for row in range(batch)])
        return batch * NEW_TOKENS / (time.perf_counter() - start)

    cases = {name: partial(tokens_per_s, name) for name in ways}
    alternate(cases, 1)  # the first of a batch's size compiles what it needs
    speeds = alternate(cases, 3 * repeats)  # they differ by less than their noise
    tell(group, "decoding", batch, tokens[OWN] == tokens[OURS], speeds)


def tell(group: Any, what: str, size: int, right: bool, values: dict[str, list[float]]) -> None:
    if group.rank_in_group == 0:
        row = {"what": what, "size": size, "right": right, "values": values}
        print(MARK + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
