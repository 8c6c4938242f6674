"""Agreement between ranks: equal facts, and work that succeeds everywhere or raises everywhere.

check_same_on_all_ranks(coor, model_facts(model, torch.bfloat16))
config = run_on_all_ranks(coor, lambda: read_config("checkpoint"))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import transformers

from coordinator import Coordinator
from drumline.errors import CheckpointError, DrumlineError, said, story

T = TypeVar("T")
CONTEXT = (40, 80)
"""Characters shown of a text before and from where it begins to differ from another."""


def model_facts(model: Any, dtype: torch.dtype) -> dict[str, str]:
    """Settings and versions that must be equal on all ranks for the parts to make one model."""
    return {
        "config": model.config.to_json_string(),
        "attn_implementation": str(model.config._attn_implementation),
        "dtype": str(dtype),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def check_same_on_all_ranks(coor: Coordinator, facts: Mapping[str, str]) -> None:
    """Raise on every rank, naming fact and rank, unless all have equal facts. Collective."""
    facts_by_rank = coor.allgather_object(dict(facts))
    for rank, other in enumerate(facts_by_rank):
        for name, first in facts_by_rank[0].items():
            if other[name] != first:
                raise DrumlineError(
                    f"rank {coor.rank}: {name} is {_excerpt(first, other[name])} on rank 0 and "
                    f"{_excerpt(other[name], first)} on rank {rank}, so the parts would not make "
                    "one model; give every rank the same files, options and versions."
                )


def _excerpt(text: str, other: str) -> str:
    """The part of a text around the first character that differs."""
    pairs = enumerate(zip(text, other, strict=False))
    start = next((at for at, (a, b) in pairs if a != b), 0)
    return text[max(0, start - CONTEXT[0]) : start + CONTEXT[1]].strip()


def run_on_all_ranks(
    coor: Coordinator,
    work: Callable[[], T],
    *,
    error_class: type[DrumlineError] = CheckpointError,
    timeout_s: float | None = None,
) -> T:
    """Run local work on every rank; return this rank's result, or raise on all. Collective.

    The rank whose work fails raises its own exception, the others `error_class` with its text.
    """
    return run_and_share(
        coor, work, lambda result: None, error_class=error_class, timeout_s=timeout_s
    )[0]


def run_and_share(
    coor: Coordinator,
    work: Callable[[], T],
    summarize: Callable[[T], Any],
    *,
    error_class: type[DrumlineError] = CheckpointError,
    timeout_s: float | None = None,
) -> tuple[T, list[Any]]:
    """Run as `run_on_all_ranks`; return also the summary of every rank's result. Collective.

    summarize: makes plain values, which msgpack can send, of this rank's result.
    """
    try:
        result = work()
        summary = summarize(result)
    except Exception as error:
        coor.allgather_object({"error": _failure_text(coor, error)}, timeout_s=timeout_s)
        raise
    outcomes = coor.allgather_object({"summary": summary}, timeout_s=timeout_s)
    for outcome in outcomes:
        if "error" in outcome:
            raise error_class(f"rank {coor.rank}: {outcome['error']}")
    return result, [outcome["summary"] for outcome in outcomes]


def _failure_text(coor: Coordinator, error: Exception) -> str:
    """The rank and the cause; with the traceback, unless the message is one of drumline's own."""
    cause = said(error) if isinstance(error, DrumlineError) else story(error)
    return f"{coor.peers[coor.rank]} cannot load: {cause}"
