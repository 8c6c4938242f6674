"""One model over several ranks, beside one process, transformers' pipeline parallel and torch RPC.

    python -m benchmarks.inference
    python -m benchmarks.inference --repeats 3 --layers 12 --hidden 768 --save

Every process uses one thread, so that two ranks have twice the cores of one process, no more; one
process is measured with a thread for each of the ranks, too. All peers live in the same two
processes and take turns, pass by pass: a slow moment of the machine is one of all. "equal" says
whether the tokens are those of the one process. What being split costs is
measured on a model so small that its layers take next to no time.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import drumline
import launcher
from benchmarks import rpc_pipeline
from benchmarks.table import Table, spread
from coordinator import Coordinator

RANKS = 2
OURS, CUT, ONE = "drumline", "drumline, tp=2", "one process"
FASTEST = 'drumline, "fastest"'
READ = "drumline, disable_mmap=True"
THREADS = f"one process, {RANKS} threads"
WAKING = "one process, waking twice a token"
PIPELINE, RPC = "transformers' pipeline parallel", "torch RPC, as in Accelerate's PR 4066"
Case = tuple[str, int, int, int]  # name, batch, prompt, new tokens
LARGE: list[Case] = [
    ("decode, batch 1", 1, 16, 24),
    ("decode, batch 32", 32, 16, 12),
    ("prefill, 8 x 512", 8, 512, 1),
    ("prefill, 1 x 2048", 1, 2048, 1),
]
SMALL: list[Case] = [("a token of a tiny model", 1, 16, 64)]
Times = dict[str, list[dict[str, Any]]]  # by peer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument(
        "--save", action="store_true", help="write the tables to benchmarks/results"
    )
    options = parser.parse_args()
    speeds(options)
    costs(options)


def speeds(options: argparse.Namespace) -> None:
    columns = ("what", "over", "ranks a layer", "tokens/s", "first token (ms)", "ms per token")
    with tempfile.TemporaryDirectory() as folder:
        parameters = new_model(folder, options.layers, options.hidden)
        note = f"Llama of {parameters / 1e6:.0f} M parameters, fp32, half the layers on each rank, "
        note += 'with tp=2 half of each layer, with "fastest" what it finds to be faster; '
        note += "weights are pages of the files, as from_pretrained has them, but for disable_mmap="
        note += "True and where ranks share a layer; "
        note += "median and middle half of rounds in which all take turns; warmed up. Each process "
        note += f"has a thread, except {THREADS!r}. Cost: what a token takes more than in the one "
        note += "process of one thread."
        columns = (*columns, "equal", f"{ONE} (ms)", "cost (ms)", f"{ONE} / this")
        table = Table("inference", columns, note, options.save)
        for case in LARGE:  # a launch each, so that its rows are kept when it ends
            rounds = options.repeats * (3 if case[1:3] == (1, 16) else 1)  # which are short
            found = launch(folder, options.layers, [case], rounds)
            add(table, case, found[case[0]])
    table.end()


def add(table: Table, case: Case, times: Times) -> None:
    """A row for each peer."""
    name, batch, _, new_tokens = case
    for peer in times:
        first = [each["first"] for each in times[peer]]
        per_token = [each["ms"] / new_tokens for each in times[peer]]
        alone = [each["ms"] / new_tokens for each in times[ONE]]
        rounds = [*zip(alone, per_token, strict=True)]
        ratio = statistics.median(a / b for a, b in rounds)
        cost = statistics.median(b - a for a, b in rounds)
        rate = batch * 1000 / statistics.median(per_token)
        sharing = times[peer][0]["ranks a layer"]
        cells = (name, peer, sharing, rate, spread(first), spread(per_token), equal(times, peer))
        table.add(*cells, spread(alone), cost, ratio)


def costs(options: argparse.Namespace) -> None:
    """What a token pays for being split: its time less that of the same compute in one process."""
    layers = options.layers
    with tempfile.TemporaryDirectory() as folder:
        new_model(folder, layers, 64, vocabulary=512)
        found = launch(folder, layers, SMALL, 4 * options.repeats)
    columns = (
        "what",
        "over",
        "us per token",
        "equal",
        f"{ONE} (us)",
        "cost (us)",
        "drumline / this",
    )
    note = f"Llama of {layers} layers of width 64, half on each rank; cost of being split: the "
    note += "fastest round less that of the one process. The one that wakes sleeps where a rank "
    note += "waits for the other; its sleep is not counted, so its cost is what a machine charges."
    table = Table("inference-split", columns, note, options.save)
    for name, _, _, new_tokens in SMALL:
        times = found[name]
        micros = {
            peer: [each["ms"] * 1000 / new_tokens for each in rounds]
            for peer, rounds in times.items()
        }
        cost = {peer: min(values) - min(micros[ONE]) for peer, values in micros.items()}
        for peer in (OURS, WAKING, PIPELINE, RPC):
            cells = (name, peer, spread(micros[peer]), equal(times, peer), spread(micros[ONE]))
            table.add(*cells, cost[peer], cost[OURS] / cost[peer])
    table.end()


def equal(times: Times, peer: str) -> str:
    wanted = times[ONE][0]["tokens"]
    return "yes" if all(each["tokens"] == wanted for each in times[peer]) else "NO"


def new_model(folder: str, layers: int, hidden: int, vocabulary: int = 8192) -> int:
    """Save a Llama of random weights; its number of parameters."""
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 64),
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def launch(folder: str, layers: int, cases: list[Case], repeats: int) -> dict[str, Times]:
    for met in ("pipeline", "rpc"):  # where the ranks of an earlier launch did
        Path(folder, met).unlink(missing_ok=True)
    work = (folder, layers, [list(case) for case in cases], repeats)
    found: list[Any] = launcher.launch(rank, nprocs=RANKS, args=work, timeout_s=900)
    return found[0]  # type: ignore[no-any-return]


def rank(folder: str, layers: int, cases: list[Case], repeats: int) -> dict[str, Times] | None:
    """Both ranks hold their part of every peer; the master says whose turn it is."""
    torch.set_num_threads(1)
    is_small = cases == [list(case) for case in SMALL]
    halves = {"": 0, **{f"model.layers.{n}": 1 for n in range(layers // 2, layers)}}
    with (
        Coordinator() as orders,
        rpc_pipeline.joined(orders, folder),
        drumline.load(folder, tp=RANKS) as cut,
        contextlib.ExitStack() as stack,
    ):
        maps: dict[str, Any] = {OURS: halves}
        if not is_small:
            maps |= {READ: halves, FASTEST: "fastest"}
        driven = {name: over_both(orders, folder, name, how, stack) for name, how in maps.items()}
        both = {CUT: cut, PIPELINE: pipeline_parallel(folder, orders)}
        if not orders.is_master():
            obey(orders, both)
            return None
        plain = accelerate.dispatch_model(LlamaForCausalLM.from_pretrained(folder), {"": "cpu"})
        over_rpc = rpc_pipeline.master(LlamaForCausalLM.from_pretrained(folder), layers // 2)
        on_all_ranks = {name: OnAllRanks(orders, name, each) for name, each in both.items()}
        peers = {ONE: plain, **driven, **on_all_ranks, RPC: over_rpc}
        peers |= {WAKING: Waking(plain)} if is_small else {THREADS: Threads(plain)}
        found = take_turns(peers, cases, repeats)
        orders.broadcast_object(None)
        return found


def over_both(
    orders: Coordinator, folder: str, name: str, device_map: Any, stack: contextlib.ExitStack
) -> Any:
    """The model on the master; on the other rank, None, and a thread that serves it."""
    group = orders.split((0, 1))
    assert group is not None, "there are two ranks"
    stack.enter_context(group)
    model = None
    if orders.is_master():
        model = stack.enter_context(loaded(folder, name, device_map, group))
    else:
        serving = threading.Thread(target=serve, args=(folder, name, device_map, group))
        serving.start()
        stack.callback(serving.join)
    orders.barrier()  # nothing disturbs while speeds are measured
    return model


def serve(folder: str, name: str, device_map: Any, group: Coordinator) -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(drumline.WorkerExit):
        loaded(folder, name, device_map, group)


def loaded(folder: str, name: str, device_map: Any, group: Coordinator) -> Any:
    memory = [1 << 34] * RANKS
    return drumline.load(folder, device_map, group, max_memory=memory, disable_mmap=name == READ)


def pipeline_parallel(folder: str, orders: Coordinator) -> Any:
    """transformers' DistributedConfig(pp_size=...): every rank calls generate."""
    from transformers.distributed import DistributedConfig

    store = Path(folder) / "pipeline"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=orders.rank, world_size=RANKS
    )
    config = DistributedConfig(pp_size=RANKS)
    return LlamaForCausalLM.from_pretrained(folder, distributed_config=config)


class Threads:
    """generate() with a thread for each of the ranks' cores."""

    def __init__(self, model: Any):
        self.model = model

    def generate(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        torch.set_num_threads(RANKS)
        try:
            tokens: torch.Tensor = self.model.generate(ids, **options)
        finally:
            torch.set_num_threads(1)
        return tokens


class Waking:
    """generate() that sleeps in every token where two ranks would wait, after each half of the
    layers, for as long as half a token takes: a core that has slept is slow at first."""

    def __init__(self, model: Any):
        self.model, self.slept_s = model, 0.0
        layers, tokens = model.model.layers, 16
        self.wakes = (layers[len(layers) // 2], model.model.norm)
        took_ms, _ = clock(lambda: greedy(model, 1, 16, tokens))
        self.half_s = took_ms / 1000 / tokens / 2

    def generate(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        with contextlib.ExitStack() as hooks:
            for module in self.wakes:
                hooks.callback(module.register_forward_pre_hook(self._sleep).remove)
            tokens: torch.Tensor = self.model.generate(ids, **options)
        return tokens

    def _sleep(self, *_: Any) -> None:
        start = time.perf_counter()
        time.sleep(self.half_s)
        self.slept_s += time.perf_counter() - start


class OnAllRanks:
    """generate() of a model that every rank has to call."""

    def __init__(self, orders: Coordinator, name: str, model: Any):
        self.orders, self.name, self.model = orders, name, model

    def generate(self, ids: torch.Tensor, max_new_tokens: int, **options: Any) -> torch.Tensor:
        self.orders.broadcast_object([self.name, *ids.shape, max_new_tokens])
        return greedy(self.model, *ids.shape, max_new_tokens)


def obey(orders: Coordinator, models: dict[str, Any]) -> None:
    while (order := orders.broadcast_object(None)) is not None:
        name, *call = order
        greedy(models[name], *call)


def take_turns(peers: dict[str, Any], cases: list[Case], repeats: int) -> dict[str, Times]:
    found: dict[str, Times] = {}
    for name, batch, length, new_tokens in cases:
        times = found[name] = {peer: [] for peer in peers}
        for model in peers.values():
            greedy(model, batch, min(length, 64), min(new_tokens, 3))
        for _ in range(repeats):
            for peer, model in peers.items():
                times[peer].append(timed(model, batch, length, new_tokens))
    return found


def timed(model: Any, batch: int, length: int, new_tokens: int) -> dict[str, Any]:
    first_ms, tokens = clock(lambda: greedy(model, batch, length, 1))
    took_ms, slept_s = first_ms, getattr(model, "slept_s", 0.0)
    if new_tokens > 1:
        took_ms, tokens = clock(lambda: greedy(model, batch, length, new_tokens))
        took_ms -= 1000 * (getattr(model, "slept_s", 0.0) - slept_s)
    found = {"first": first_ms, "ms": took_ms, "tokens": tokens[:, length:].tolist()}
    return {**found, "ranks a layer": sharing(model)}


def sharing(model: Any) -> int:
    """How many ranks work on one layer together."""
    mesh = getattr(model.model if isinstance(model, OnAllRanks) else model, "mesh", None)
    return mesh.axis_size("tp") if isinstance(mesh, drumline.Mesh) else 1


def clock(work: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    value = work()
    return (time.perf_counter() - start) * 1000, value


def greedy(model: Any, batch: int, length: int, new_tokens: int) -> torch.Tensor:
    ids = torch.randint(8, 512, (batch, length), generator=torch.Generator().manual_seed(0))
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    tokens: torch.Tensor = model.generate(ids, max_new_tokens=new_tokens, **options)
    return tokens


if __name__ == "__main__":
    main()
