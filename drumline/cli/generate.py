"""Text generated from a prompt, streamed to the terminal.

drumline generate --model DIR -n 2 --prompt "Once upon"
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from drumline.core.detokenize import IncrementalDetokenizer
from drumline.core.device_map import format_nbytes
from drumline.errors import DrumlineError
from drumline.strategies.load import Memory
from drumline.strategies.with_model import (
    Peaks,
    describe_peaks,
    describe_traffic,
    read_generator,
    read_model_tokenizer,
    with_model,
)


def generate_text(
    model_path: str,
    prompt: str,
    max_new_tokens: int = 64,
    seed: int | None = None,
    memory: Memory | None = None,
    **options: Any,
) -> None:
    """Load the model over all ranks, stream its text, and print its speed. Collective.

    seed: of the sampling; greedy if not given. memory: of each rank, as max_memory of
    `drumline.load`, which takes the options.
    """
    prepared: list[tuple[TimedStreamer, Any]] = []

    def prepare(folder: Path) -> None:
        tokenizer = read_model_tokenizer(folder, **options)
        inputs = _tokenize(tokenizer, prompt)
        read_generator(folder, inputs["input_ids"].shape[1] + max_new_tokens, **options)
        prepared.append((TimedStreamer(tokenizer), inputs))

    (model, summary), peaks = with_model(
        model_path,
        lambda model: (model, _stream(model, *prepared[0], max_new_tokens, seed)),
        memory,
        before=prepare,
        **options,
    )
    print("\n".join([summary, *_memory_lines(model.device_map, peaks)]))


def _tokenize(tokenizer: Any, prompt: str) -> Any:
    try:
        prompt.encode()
    except UnicodeError as error:
        raise DrumlineError(
            f"rank 0: the prompt {prompt!r} is not valid text ({error}); write it in UTF-8."
        ) from error
    inputs = tokenizer(prompt, return_tensors="pt")
    if inputs["input_ids"].shape[1] == 0:
        raise DrumlineError(
            f"rank 0: the prompt {prompt!r} has no tokens, so there is nothing to continue; give a "
            "longer one."
        )
    return inputs


def _stream(model: Any, streamer: Any, inputs: Any, max_new_tokens: int, seed: int | None) -> Any:
    """Print the text as it is generated; return a summary of its speed."""
    print(f"loaded in {time.monotonic() - streamer.start:.2f} s\n{model.device_map}", flush=True)
    inputs = inputs.to(model.device)
    if seed is not None:
        torch.manual_seed(seed)
    streamer.start = time.monotonic()
    model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=seed is not None,
        num_beams=1,  # whatever the checkpoint says: no text of several could be streamed
        num_return_sequences=1,
        streamer=streamer,
    )
    return streamer.summary(inputs["input_ids"].shape[1], model.traffic)


class TimedStreamer:
    """A streamer that prints the text of tokens as generate() makes them, and notes their times."""

    def __init__(self, tokenizer: Any) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        self.start = time.monotonic()
        self.times: list[float] = []  # of the prompt, or where a decoder begins, then of each token

    def put(self, value: torch.Tensor) -> None:
        self.times.extend([time.monotonic()] * (value.numel() if self.times else 1))
        text = "".join(map(self._detokenizer.add, value.flatten().tolist()))
        print(text, end="", flush=True)

    def end(self) -> None:
        print(self._detokenizer.flush(), flush=True)

    def summary(self, num_prompt: int, traffic: tuple[int, int] | None) -> str:
        """The speed as text. traffic: as of the model."""
        num_new, total_s = len(self.times) - 1, time.monotonic() - self.start
        line = f"{num_new} tokens in {total_s:.2f} s, {num_new / total_s:.1f} tokens/s"
        if num_new > 1 and self.times[1] < self.times[-1]:
            prompt_s = self.times[1] - self.start
            line += f"; prompt of {num_prompt} and first token in {1e3 * prompt_s:.0f} ms, then "
            line += f"{(len(self.times) - 2) / (self.times[-1] - self.times[1]):.1f} tokens/s"
        return line + f"; {describe_traffic(traffic)} per hop"


def _memory_lines(device_map: Any, peaks: Peaks) -> list[str]:
    """For each rank: the planned bytes of the model, and the peak memory of the process."""
    planned = {rank: 0 for rank in range(len(peaks))}
    for place in device_map.used_places():
        planned[place[0]] += device_map.used(place)
    return [
        f"rank {rank}: {format_nbytes(planned[rank])} of model, {text} of memory at most"
        for rank, text in enumerate(describe_peaks(peaks))
    ]
