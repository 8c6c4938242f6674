"""Tokens of an unmodified vLLM, and what a killed worker does to it.

python generate.py MODEL tokens.json --tp 2 --executor mp --dtype bfloat16
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.distributed import get_pp_group, get_tp_group

PROMPTS = [[5], [3, 1, 4, 1, 5, 9, 2, 6], [7, 7], [8, 2, 8, 1], [1, 2, 3, 4, 5]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("result")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--executor", default="uni")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--lose", type=int, help="signal this rank after the first tokens")
    parser.add_argument("--by", default="SIGKILL")
    return parser.parse_args()


def worker(_: object) -> tuple[int, int, str]:
    """Rank, process and communicator of a worker, as it sees itself."""
    group = get_tp_group() if get_tp_group().world_size > 1 else get_pp_group()
    return group.rank_in_group, os.getpid(), type(group.device_communicator).__name__


def open_engine(options: argparse.Namespace) -> LLM:
    return LLM(
        options.model,
        skip_tokenizer_init=True,
        tensor_parallel_size=options.tp,
        pipeline_parallel_size=options.pp,
        distributed_executor_backend=options.executor,
        dtype=options.dtype,
        enforce_eager=not options.compiled,
        max_model_len=4096,
        max_num_seqs=32,
        disable_log_stats=True,
        seed=0,
    )


def generate(
    engine: LLM, new_tokens: int, prompts: Sequence[list[int]] = PROMPTS
) -> list[list[int]]:
    sampling = SamplingParams(
        temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.generate(inputs, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def generate_and_lose(engine: LLM, rank: int, signum: int) -> dict[str, object]:
    """The error of a generate() during which a worker is lost, and how long it took to come."""
    pid = engine.collective_rpc(worker)[rank][1]
    generate(engine, new_tokens=1)
    sent_s = []

    def send() -> None:
        sent_s.append(time.monotonic())
        os.kill(pid, signum)

    threading.Timer(1.0, send).start()
    try:
        generate(engine, new_tokens=4000)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "took_s": time.monotonic() - sent_s[0]}
    return {"error": "", "took_s": 0.0}


if __name__ == "__main__":
    options = parse()
    engine = open_engine(options)
    if options.lose is not None:
        result = generate_and_lose(engine, options.lose, signal.Signals[options.by])
    else:
        communicators = [name for _, _, name in engine.collective_rpc(worker)]
        tokens = generate(engine, options.new_tokens)
        result = {"tokens": tokens, "communicators": communicators}
    rank = os.environ.get("RANK", "0")
    Path(f"{options.result}.{rank}").write_text(json.dumps(result))
    sys.stdout.flush()
