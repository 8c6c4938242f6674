"""One model over several ranks, beside one process and transformers' own pipeline parallel.

    python -m benchmarks.inference
    python -m benchmarks.inference --ranks 2 --repeats 3 --layers 12 --hidden 768

Every process uses one thread, so that two ranks have twice the cores of one process, no more. The
peers take turns. "equal" says whether the tokens are those of the one process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import inference
import launcher
from benchmarks.table import Table, spread

NEW_TOKENS = 24
CASES: dict[str, tuple[int, int, int]] = {  # batch, prompt, new tokens
    "decode, batch 1": (1, 16, NEW_TOKENS),
    "decode, batch 32": (32, 16, NEW_TOKENS),
    "prefill, 8 x 512": (8, 512, 1),
}
Measured = dict[str, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        parameters = new_model(folder, arguments.layers, arguments.hidden)
        table = measure(folder, arguments.ranks, arguments.repeats, parameters)
    table.show()
    if arguments.save:
        table.save()


def new_model(folder: str, layers: int, hidden: int) -> int:
    """Save a Llama of random weights; its number of parameters."""
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=12,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def measure(folder: str, ranks: int, repeats: int, parameters: int) -> Table:
    columns = ("what", "over", "ms", "one process (ms)", "equal", "one process / ours")
    note = f"Llama of {parameters / 1e6:.0f} M parameters, fp32; ms per pass of the model, median."
    table = Table("inference", columns, note)
    peers = {"ours": (ours, ranks), "transformers' pipeline parallel": (pipeline, ranks)}
    rounds = [
        {name: run(work, size, folder) for name, (work, size) in {"one": (one, 1), **peers}.items()}
        for _ in range(repeats)
    ]
    for case in CASES:
        for name in peers:
            table.add(case, f"{ranks} ranks, {name}", *row(rounds, name, case))
    return table


def row(rounds: list[dict[str, Measured]], name: str, case: str) -> tuple[Any, ...]:
    """Milliseconds of a peer and of the one process, whether the tokens agree, and the ratio."""
    found, alone = [[each[peer][case] for each in rounds] for peer in (name, "one")]
    times, base = [[each["ms"] for each in side] for side in (found, alone)]
    equal = all(a["tokens"] == b["tokens"] for a, b in zip(found, alone, strict=True))
    ratio = statistics.median(base) / statistics.median(times)
    return spread(times), spread(base), "yes" if equal else "NO", ratio


def run(work: Callable[[str], Any], ranks: int, folder: str) -> Measured:
    results: list[Measured] = launcher.launch(work, nprocs=ranks, args=(folder,), timeout_s=900)
    return results[0]


def one(folder: str) -> Measured:
    torch.set_num_threads(1)
    return timed(LlamaForCausalLM.from_pretrained(folder))


def ours(folder: str) -> Measured:
    torch.set_num_threads(1)
    with inference.load(folder) as model:
        return timed(model)


def pipeline(folder: str) -> Measured:
    """transformers' DistributedConfig(pp_size=...): every rank calls generate."""
    from transformers.distributed import DistributedConfig

    torch.set_num_threads(1)
    info = launcher.current()
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{info.launch_id}",
        rank=info.rank,
        world_size=info.world_size,
    )
    config = DistributedConfig(pp_size=info.world_size)
    found = timed(LlamaForCausalLM.from_pretrained(folder, distributed_config=config))
    torch.distributed.destroy_process_group()
    return found


def timed(model: Any) -> Measured:
    """Each case once to warm up and once on the clock."""
    found = {}
    for case, (batch, length, new_tokens) in CASES.items():
        ids = torch.randint(8192, (batch, length), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        options = {"attention_mask": mask, "max_new_tokens": new_tokens, "do_sample": False}
        model.generate(ids, **{**options, "max_new_tokens": min(new_tokens, 3)})
        start = time.perf_counter()
        tokens = model.generate(ids, **options)
        took_ms = (time.perf_counter() - start) * 1000 / new_tokens
        found[case] = {"ms": took_ms, "tokens": tokens[:, length:].tolist()}
    return found


if __name__ == "__main__":
    main()
