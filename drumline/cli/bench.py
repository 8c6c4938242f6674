"""How fast a model is over the ranks: prompt and tokens a second, memory, bytes a hop.

python -m drumline bench --model DIR -n 2 --batch 8 --prompt-tokens 512
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from drumline.core.device_map import format_nbytes
from drumline.strategies.load import Memory
from drumline.strategies.with_model import (
    describe_peaks,
    describe_traffic,
    read_generator,
    with_model,
)

REPEATS = 3  # after one that warms up


@dataclass(frozen=True)
class Speed:
    """Of generate(): seconds to the first token of all rows, and from there to the last."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    first_s: float
    rest_s: float

    @property
    def prefill(self) -> float:
        """Tokens of prompt a second."""
        return self.batch * self.prompt_tokens / self.first_s

    @property
    def decode(self) -> float:
        """Tokens a second after the first of each row."""
        return self.batch * (self.new_tokens - 1) / self.rest_s


def bench(
    model_path: str,
    batch: int = 1,
    prompt_tokens: int = 128,
    new_tokens: int = 64,
    memory: Memory | None = None,
) -> None:
    """Load the model over all ranks, time it on prompts drawn at random, print it. Collective."""
    (model, speeds), peaks = with_model(
        model_path,
        lambda model: (model, _repeated(model, batch, prompt_tokens, new_tokens)),
        memory,
        before=lambda: read_generator(model_path, prompt_tokens + new_tokens),
        batch=batch,
        length=prompt_tokens + new_tokens,
    )
    print(_report(model, speeds))
    rows = [
        (rank, model.device_map.holds(rank), text)
        for rank, text in enumerate(describe_peaks(peaks))
    ]
    print("\n" + markdown(("rank", "holds", "memory at most"), rows))


def _repeated(model: Any, batch: int, prompt_tokens: int, new_tokens: int) -> list[Speed]:
    torch.manual_seed(0)
    prompt = torch.randint(0, model.get_input_embeddings().num_embeddings, (batch, prompt_tokens))
    prompt = prompt.to(model.device)
    return [measure(model, prompt, new_tokens) for _ in range(1 + REPEATS)][1:]


def measure(model: Any, prompt: torch.Tensor, new_tokens: int) -> Speed:
    """Greedy, once for one token and once for so many of each row of prompt.

    As an ordinary generate() each, so that what speeds those up counts; a clock in between would
    not be ordinary.
    """
    first_s, whole_s = _generate(model, prompt, 1), _generate(model, prompt, new_tokens)
    batch, prompt_tokens = prompt.shape
    return Speed(batch, prompt_tokens, new_tokens, first_s, max(whole_s - first_s, 1e-9))


def _generate(model: Any, prompt: torch.Tensor, num: int) -> float:
    """The seconds that so many tokens take, without an end before."""
    begun = time.perf_counter()
    mask = torch.ones_like(prompt)
    model.generate(
        prompt, attention_mask=mask, min_new_tokens=num, max_new_tokens=num, do_sample=False
    )
    return time.perf_counter() - begun


def _report(model: Any, speeds: list[Speed]) -> str:
    facts = {
        "model": f"{type(model).__name__}, {format_nbytes(sum(model.device_map.nbytes.values()))}",
        "ranks": len(model.device_map.ranks),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "threads": torch.get_num_threads(),
    }
    units = ("first token (ms)", "prefill (tokens/s)", "decode (tokens/s)", "a hop")
    head = ("batch", "prompt (tokens)", "new (tokens)", *units)
    one = speeds[0]
    row = (
        one.batch,
        one.prompt_tokens,
        one.new_tokens,
        _spread([1e3 * speed.first_s for speed in speeds]),
        _spread([speed.prefill for speed in speeds]),
        _spread([speed.decode for speed in speeds]),
        describe_traffic(model.traffic),
    )
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    return "\n".join(["## inference", "", *lines, "", markdown(head, [row])])


def _spread(values: list[float]) -> str:
    """Median, and the range of all: 3.1 (2.9-3.4)."""
    return f"{statistics.median(values):.4g} ({min(values):.4g}-{max(values):.4g})"


def markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table that is read as it is, too."""
    grid = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = ["| " + " | ".join(map(str.rjust, row, widths)) + " |" for row in grid]
    lines.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join(lines)
