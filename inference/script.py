"""What the ranks of the command line run."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, TextStreamer

from inference.errors import CheckpointError
from inference.load import load
from inference.plan import readable

PLANS = ("auto", "balanced", "sequential")


def generate_text(
    model_path: str, prompt: str, max_new_tokens: int, seed: int | None, memory: list[str] | None
) -> None:
    """Load the model over all ranks, stream what it says, and say how fast that was."""
    with load(model_path, max_memory=memory) as model:
        print(model.device_map, flush=True)
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        if seed is not None:
            torch.manual_seed(seed)
        start = time.monotonic()
        tokens = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=seed is not None,
            streamer=TextStreamer(tokenizer),
        )
        num_new = tokens.shape[1] - inputs["input_ids"].shape[1]
        print(_summary(model, num_new, time.monotonic() - start))


def _summary(model: Any, num_tokens: int, took_s: float) -> str:
    chosen = model.device_map
    used = ", ".join(f"rank {p[0]}: {readable(chosen.used(p))}" for p in sorted(chosen.room))
    text = f"{num_tokens} tokens in {took_s:.1f} s, {num_tokens / took_s:.1f} tokens/s; {used}"
    if model.traffic is not None:
        messages, sent = model.traffic
        text += f"; {readable(sent // max(messages, 1))} a hop"
    return text


def run_script(script: str, arguments: list[str]) -> None:
    """Run a script of the user, with models over all ranks where it asks for a device map."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    with models_over_all_ranks():
        runpy.run_path(script, run_name="__main__")


@contextlib.contextmanager
def models_over_all_ranks() -> Iterator[None]:
    """Within this block from_pretrained(device_map="auto") loads over every rank.

    For a process that runs one script: it changes transformers for the whole process.
    """
    original = PreTrainedModel.__dict__["from_pretrained"]

    def from_pretrained(cls: Any, path: Any, *args: Any, **options: Any) -> Any:
        if options.get("device_map") not in PLANS:
            return original.__func__(cls, path, *args, **options)
        return _load_everywhere(cls, path, options)

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = original


def _load_everywhere(cls: Any, path: Any, options: dict[str, Any]) -> Any:
    if not Path(path).is_dir():
        raise CheckpointError(
            f"{path!r} is no directory on this machine, so its ranks have nothing to read; "
            "download the model first and give the directory."
        )
    options.pop("config", None)
    dtype = options.pop("dtype", options.pop("torch_dtype", None))
    known = {key: options.pop(key) for key in ("device_map", "max_memory") if key in options}
    return load(path, cls=cls, dtype=dtype, **known, **options)
