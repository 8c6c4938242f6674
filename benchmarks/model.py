"""One model over 1, 2 and 4 ranks beside transformers alone: speed, first token, load, memory.

    python -m benchmarks.model
    python -m benchmarks.model --ranks 2 --layers 4 --hidden 256

Every rank uses one thread, so that more ranks have more cores as long as there are any.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaForCausalLM

import drumline
import launcher
from benchmarks.inference import new_model
from benchmarks.memory import Peak
from benchmarks.table import Table, spread

BATCH, PROMPT, NEW_TOKENS = 8, 32, 24
MIB = 1 << 20
COLUMNS = (
    *("ranks", "equal", "tokens/s", "first token (ms)"),
    *("load (s)", "load and a token (s)", "peak of a rank (MiB)"),
    *("plain tokens/s", "plain first (ms)"),
    *("plain load (s)", "plain load and a token (s)", "plain peak (MiB)", "peak ratio"),
)
Found = dict[str, Any]
load = drumline.load  # which is imported here, before the ranks are forked, as LlamaForCausalLM is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        parameters = new_model(folder, arguments.layers, arguments.hidden)
        table = measure(folder, arguments, parameters)
    table.end()


def measure(folder: str, arguments: argparse.Namespace, parameters: int) -> Table:
    note = (
        f"Llama of {parameters / 1e6:.0f} M parameters, {parameters * 4 / MIB:.0f} MiB in fp32; "
        f"batch {BATCH}, {PROMPT} tokens of prompt, {NEW_TOKENS} new ones. plain: from_pretrained "
        "in one process, in turns with us. Both map the files, so a token, which reads all weights "
        "but the embeddings, is timed with the load, too. peak: of resident memory, while loading "
        "and generating, above what the process held before, files it maps included; of the rank "
        "with most."
    )
    table = Table("model", COLUMNS, note, keep=arguments.save)
    for ranks in arguments.ranks:
        repeats = range(arguments.repeats)
        rounds = [(run(plain, 1, folder), run(ours, ranks, folder)) for _ in repeats]
        table.add(ranks, *row([alone for alone, _ in rounds], [found for _, found in rounds]))
    return table


def row(alone: list[list[Found]], found: list[list[Found]]) -> tuple[Any, ...]:
    equal = all(a[0]["tokens"] == b[0]["tokens"] for a, b in zip(alone, found, strict=True))
    mine, plain = [[columns(each, key) for key in KEYS] for each in (found, alone)]
    ratio = statistics.median(mine[-1]) / statistics.median(plain[-1])
    return ("yes" if equal else "NO", *map(spread, mine), *map(spread, plain), ratio)


KEYS = ("tokens_per_s", "first_ms", "load_s", "first_use_s", "peak_mib")


def columns(rounds: list[list[Found]], key: str) -> list[float]:
    """One value a round: the master's, and of memory that of the rank that has most."""
    if key == "peak_mib":
        return [max(rank[key] for rank in ranks) for ranks in rounds]
    return [ranks[0][key] for ranks in rounds]


def run(work: Callable[[str], Found], ranks: int, folder: str) -> list[Found]:
    return launcher.launch(work, nprocs=ranks, args=(folder,), timeout_s=900)


def ours(folder: str) -> Found:
    try:
        with Peak() as peak:
            found = timed(lambda: load(folder))
    except drumline.WorkerExit:  # a rank that is not the master
        found = {}
    return {**found, "peak_mib": peak.nbytes / MIB}


def plain(folder: str) -> Found:
    with Peak() as peak:
        found = timed(lambda: LlamaForCausalLM.from_pretrained(folder))
    return {**found, "peak_mib": peak.nbytes / MIB}


def timed(load: Callable[[], Any]) -> Found:
    """Load, generate once to warm up, and then on the clock: the first token, and all of them."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    model = load()
    loaded_s = time.perf_counter() - start
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long))
    first_use_s = time.perf_counter() - start
    ids = torch.randint(8192, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0))
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    model.generate(ids, max_new_tokens=3, **options)
    first_s, _ = on_the_clock(lambda: model.generate(ids, max_new_tokens=1, **options))
    all_s, tokens = on_the_clock(lambda: model.generate(ids, max_new_tokens=NEW_TOKENS, **options))
    if hasattr(model, "close"):
        model.close()
    speeds = {"tokens_per_s": BATCH * NEW_TOKENS / all_s, "first_ms": first_s * 1000}
    loading = {"load_s": loaded_s, "first_use_s": first_use_s}
    return {**speeds, **loading, "tokens": tokens[:, PROMPT:].tolist()}


def on_the_clock(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    main()
