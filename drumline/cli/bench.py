"""Speed of a model over the ranks: prefill and decode in tokens/s, memory, bytes per hop.

drumline bench --model DIR -n 2 --batch 8 --prompt-tokens 512
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from drumline.contact.releases import installed
from drumline.core.device_map import format_nbytes
from drumline.strategies.load import Memory
from drumline.strategies.with_model import (
    describe_peaks,
    describe_traffic,
    read_generator,
    with_model,
)

REPEATS = 3  # after a first run that warms up


class GenerationTiming(NamedTuple):
    """Seconds of a generate() to the first token of all sequences, and from there to the last."""

    first_token_s: float
    decode_s: float


def bench(
    model_path: str,
    batch: int = 1,
    prompt_tokens: int = 128,
    new_tokens: int = 64,
    memory: Memory | None = None,
    **options: Any,
) -> None:
    """Load the model over all ranks, and print its speed on random prompts. Collective.

    batch: sequences. memory: of each rank, as max_memory of `drumline.load`, which takes the
    options.
    """
    (model, timings), peaks = with_model(
        model_path,
        lambda model: (model, _measure_repeatedly(model, batch, prompt_tokens, new_tokens)),
        memory,
        before=lambda folder: read_generator(folder, prompt_tokens + new_tokens, **options),
        batch=batch,
        length=prompt_tokens + new_tokens,
        **options,
    )
    print(_report(model, batch, prompt_tokens, new_tokens, timings))
    rows = [
        (rank, model.device_map.holds(rank), text)
        for rank, text in enumerate(describe_peaks(peaks))
    ]
    print("\n" + markdown(("rank", "holds", "peak memory"), rows))


def _measure_repeatedly(
    model: Any, batch: int, prompt_tokens: int, new_tokens: int
) -> list[GenerationTiming]:
    torch.manual_seed(0)
    prompt = torch.randint(0, model.get_input_embeddings().num_embeddings, (batch, prompt_tokens))
    prompt = prompt.to(model.device)
    return [measure(model, prompt, new_tokens) for _ in range(1 + REPEATS)][1:]


def measure(model: Any, prompt: torch.Tensor, new_tokens: int) -> GenerationTiming:
    """Time generate() twice: for one token, and for new_tokens. prompt: [batch, prompt_tokens].

    Both are ordinary calls. A streamer that notes the first token would turn off what makes an
    ordinary call fast.
    """
    first_s, total_s = _generate(model, prompt, 1), _generate(model, prompt, new_tokens)
    return GenerationTiming(first_s, max(total_s - first_s, 1e-9))


def _generate(model: Any, prompt: torch.Tensor, num_tokens: int) -> float:
    """Seconds to generate num_tokens greedily, without a stop before."""
    start = time.perf_counter()
    mask = torch.ones_like(prompt)
    model.generate(
        prompt,
        attention_mask=mask,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        do_sample=False,
    )
    return time.perf_counter() - start


def _report(
    model: Any, batch: int, prompt_tokens: int, new_tokens: int, timings: list[GenerationTiming]
) -> str:
    facts = {
        "model": f"{type(model).__name__}, {format_nbytes(sum(model.device_map.nbytes.values()))}",
        "ranks": len(model.device_map.ranks),
        "versions": f"torch {torch.__version__}, transformers {installed('transformers')}",
        "threads": torch.get_num_threads(),
    }
    units = ("first token (ms)", "prefill (tokens/s)", "decode (tokens/s)", "per hop")
    head = ("batch", "prompt (tokens)", "new (tokens)", *units)
    row = (
        *(batch, prompt_tokens, new_tokens),
        _spread([1e3 * timing.first_token_s for timing in timings]),
        _spread([batch * prompt_tokens / timing.first_token_s for timing in timings]),
        _spread([batch * (new_tokens - 1) / timing.decode_s for timing in timings]),
        describe_traffic(model.traffic),
    )
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    return "\n".join(["## drumline bench", "", *lines, "", markdown(head, [row])])


def _spread(values: list[float]) -> str:
    """Median and range, such as 3.1 (2.9-3.4)."""
    return f"{statistics.median(values):.4g} ({min(values):.4g}-{max(values):.4g})"


def markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table with aligned columns."""
    grid = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = ["| " + " | ".join(map(str.rjust, row, widths)) + " |" for row in grid]
    lines.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join(lines)
