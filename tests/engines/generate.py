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
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.distributed import get_tensor_model_parallel_rank

PROMPTS = [[5], [3, 1, 4, 1, 5, 9, 2, 6], [7, 7], [8, 2, 8, 1], [1, 2, 3, 4, 5]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("result")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--executor", default="uni")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--kill", type=int, help="kill this rank after the first tokens")
    return parser.parse_args()


def rank_and_pid(worker: object) -> tuple[int, int]:
    return get_tensor_model_parallel_rank(), os.getpid()


def open_engine(options: argparse.Namespace) -> LLM:
    return LLM(
        options.model,
        skip_tokenizer_init=True,
        tensor_parallel_size=options.tp,
        distributed_executor_backend=options.executor,
        dtype=options.dtype,
        enforce_eager=not options.compiled,
        max_model_len=4096,
        max_num_seqs=8,
        disable_log_stats=True,
        seed=0,
    )


def generate(engine: LLM, new_tokens: int) -> list[list[int]]:
    sampling = SamplingParams(
        temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def generate_and_lose(engine: LLM, rank: int) -> dict[str, object]:
    """The error of a generate() during which a worker is killed, and how long it took to come."""
    pid = dict(map(tuple, engine.collective_rpc(rank_and_pid)))[rank]
    killed_s = []

    def kill() -> None:
        killed_s.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    threading.Timer(3.0, kill).start()
    try:
        generate(engine, new_tokens=4000)
    except BaseException as error:
        took_s = time.monotonic() - killed_s[0]
        return {"error": f"{type(error).__name__}: {error}", "took_s": took_s}
    return {"error": "", "took_s": 0.0}


if __name__ == "__main__":
    options = parse()
    engine = open_engine(options)
    if options.kill is None:
        result = generate(engine, options.new_tokens)
    else:
        result = generate_and_lose(engine, options.kill)
    rank = os.environ.get("RANK", "0") if options.executor == "external_launcher" else "0"
    Path(f"{options.result}.{rank}").write_text(json.dumps(result))
    sys.stdout.flush()
