"""Text from a prompt, streamed to the terminal as it comes.

python -m drumline generate --model DIR -n 2 --prompt "Once upon"
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import TextStreamer

from drumline.checkpoint.config_files import read_tokenizer
from drumline.core.device_map import format_nbytes
from drumline.errors import DrumlineError
from drumline.strategies.load import Memory
from drumline.strategies.with_model import (
    Peaks,
    describe_peaks,
    describe_traffic,
    read_generator,
    with_model,
)


def generate_text(
    model_path: str,
    prompt: str,
    max_new_tokens: int = 64,
    seed: int | None = None,
    memory: Memory | None = None,
) -> None:
    """Load the model over all ranks, stream what it says, and say how fast that was. Collective.

    seed: samples with it; greedy if not given. memory: room of each rank, as max_memory of load.
    """
    asked: list[tuple[Any, Any]] = []

    def prepare() -> None:
        tokenizer = read_tokenizer(model_path)
        inputs = _tokens(tokenizer, prompt)
        read_generator(model_path, inputs["input_ids"].shape[1] + max_new_tokens)
        asked.append((tokenizer, inputs))

    (model, said), peaks = with_model(
        model_path,
        lambda model: (model, _say(model, *asked[0], max_new_tokens, seed)),
        memory,
        before=prepare,
    )
    print("\n".join([said, *_memory_lines(model.device_map, peaks)]))


def _tokens(tokenizer: Any, prompt: str) -> Any:
    try:
        prompt.encode()
    except UnicodeError as error:
        raise DrumlineError(
            f"rank 0: {prompt!r} holds what is no text ({error}); write the prompt in UTF-8."
        ) from error
    inputs = tokenizer(prompt, return_tensors="pt")
    if inputs["input_ids"].shape[1] == 0:
        raise DrumlineError(
            f"rank 0: {prompt!r} has no tokens, so there is nothing to continue; give a longer one."
        )
    return inputs


def _say(model: Any, tokenizer: Any, inputs: Any, max_new_tokens: int, seed: int | None) -> str:
    """Stream the text; how fast it was, in words."""
    print(model.device_map, flush=True)
    inputs = inputs.to(model.device)
    if seed is not None:
        torch.manual_seed(seed)
    clock = Clock(tokenizer)
    tokens = model.generate(
        **inputs, max_new_tokens=max_new_tokens, do_sample=seed is not None, streamer=clock
    )
    num_prompt = inputs["input_ids"].shape[1]
    return clock.summary(num_prompt, tokens.shape[1] - num_prompt, model.traffic)


class Clock(TextStreamer):  # type: ignore[misc]
    """Prints tokens as they come, and notes when the first one did."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.begun = time.monotonic()
        self.times: list[float] = []  # of the prompt, then of each token

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.monotonic())
        super().put(value)

    def summary(self, num_prompt: int, num_new: int, traffic: tuple[int, int] | None) -> str:
        whole_s = time.monotonic() - self.begun
        line = f"{num_new} tokens in {whole_s:.2f} s, {num_new / whole_s:.1f} tokens/s"
        if len(self.times) > 2:
            first_s, rest_s = self.times[1] - self.begun, self.times[-1] - self.times[1]
            line += (
                f"; {num_prompt} of prompt and the first token in {1e3 * first_s:.0f} ms, then "
                f"{(len(self.times) - 2) / rest_s:.1f} tokens/s"
            )
        return line + f"; {describe_traffic(traffic)} a hop"


def _memory_lines(device_map: Any, peaks: Peaks) -> list[str]:
    """What each rank was planned to hold, and the most it took with all its libraries."""
    planned = {rank: 0 for rank in range(len(peaks))}
    for place in {*device_map.places.values()}:
        planned[place[0]] += device_map.used(place)
    return [
        f"rank {rank}: {format_nbytes(planned[rank])} of model, {text} of memory at most"
        for rank, text in enumerate(describe_peaks(peaks))
    ]
