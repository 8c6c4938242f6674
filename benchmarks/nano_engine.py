"""The engine of examples/nano_engine beside transformers' own tensor parallelism, on gloo.

    python -m benchmarks.nano_engine

Two ranks of one thread each, which hold both models and take turns, float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.collectives import MARK, from_rank_0
from benchmarks.table import Table, alternate, spread
from communicator import Communicator
from coordinator import Coordinator

NANO, OWN = "nano_engine", "transformers, gloo"
BATCHES = (1, 8)
PROMPT_TOKENS, NEW_TOKENS = 8, 32
EXAMPLE = Path(__file__).parents[1] / "examples" / "nano_engine"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--save", action="store_true", help="write a table to benchmarks/results")
    parser.add_argument("--rank", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return be_rank(options.rank, options.repeats)
    columns = ("batch", "equal", f"{OWN} (tokens/s)", f"{NANO} (tokens/s)", f"{NANO} / {OWN}")
    note = f"{NEW_TOKENS} tokens after {PROMPT_TOKENS}, each layer cut over two ranks, prompts "
    note += "included; median and middle half of turns. equal: the tokens. Above 1 ours is faster."
    table = Table("inference-nano", columns, note, options.save)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, options.layers, options.hidden)
        command = [
            sys.executable,
            "-m",
            "drumline",
            "run",
            "-n",
            "2",
            "-m",
            "benchmarks.nano_engine",
        ]
        command += ["--rank", folder, "--repeats", str(options.repeats)]
        for row in from_rank_0(command):
            own, nano = row["values"][OWN], row["values"][NANO]
            ratio = statistics.median(nano) / statistics.median(own)
            table.add(row["batch"], row["equal"], spread(own), spread(nano), ratio)
    table.end()


def save_model(folder: str, layers: int, hidden: int) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 8192}
    LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.1)).save_pretrained(folder)


def be_rank(folder: str, repeats: int) -> None:
    sys.path.insert(0, str(EXAMPLE))
    from engine import Engine

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore", FutureWarning)  # of tp_plan, whose successor 5.21 lacks
    whole = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32).eval()
    with Coordinator() as coor, Communicator(coor) as comm:
        engine = Engine(folder, coor, comm, slots=max(BATCHES), length=PROMPT_TOKENS + NEW_TOKENS)
        for batch in BATCHES:
            prompts = torch.randint(8192, (batch, PROMPT_TOKENS)).tolist()
            ways = {OWN: partial(by_transformers, whole), NANO: partial(by_engine, engine)}
            compare(coor, prompts, ways, repeats)


def by_transformers(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    tokens = torch.tensor(prompts)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        whole = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), eos_token_id=None, **options
        )
    return whole[:, PROMPT_TOKENS:].tolist()  # type: ignore[no-any-return]


def by_engine(engine: Any, prompts: list[list[int]]) -> list[list[int]]:
    return engine.generate(prompts, NEW_TOKENS)  # type: ignore[no-any-return]


def compare(
    coor: Coordinator, prompts: list[list[int]], ways: dict[str, Any], repeats: int
) -> None:
    prompts = coor.broadcast_object(prompts)
    tokens = {}

    def tokens_per_s(name: str) -> float:
        coor.barrier()
        start = time.perf_counter()
        tokens[name] = ways[name](prompts)
        return len(prompts) * NEW_TOKENS / (time.perf_counter() - start)

    cases = {name: partial(tokens_per_s, name) for name in ways}
    alternate(cases, 1)  # warms up
    values = alternate(cases, repeats)
    if coor.is_master():
        equal = "yes" if tokens[OWN] == tokens[NANO] else "NO"
        row = {"batch": len(prompts), "equal": equal, "values": values}
        print(MARK + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
