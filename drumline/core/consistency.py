"""Agreement between ranks: equal facts, and work that succeeds everywhere or raises everywhere.

check_same_on_all_ranks(coor, model_facts(model, torch.bfloat16))
config = run_on_all_ranks(coor, lambda: read_config("checkpoint"))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from coordinator import Coordinator
from drumline.contact.loading.configs import attention_of
from drumline.contact.releases import installed
from drumline.errors import CheckpointError, DrumlineError, PlanError

T = TypeVar("T")
OWN_ERRORS = (CheckpointError, PlanError, DrumlineError)
CONTEXT = (40, 80)
"""Characters shown of a text before and from where it begins to differ from another."""


def model_facts(model: Any, dtype: torch.dtype) -> dict[str, str]:
    """Settings and versions that must be equal on all ranks for the parts to make one model."""
    return {
        "config": model.config.to_json_string(),
        "attn_implementation": str(attention_of(model.config)),
        "dtype": str(dtype),
        "torch": torch.__version__,
        "transformers": installed("transformers"),
    }


def check_same_on_all_ranks(coor: Coordinator, facts: Mapping[str, str]) -> None:
    """Raise on every rank, naming fact and rank, unless all have equal facts. Collective."""
    check_same(coor, coor.allgather_object(dict(facts)))


def check_same(coor: Coordinator, facts_by_rank: Sequence[Mapping[str, str]]) -> None:
    """Raise as check_same_on_all_ranks, over facts that have been shared already."""
    for rank, other in enumerate(facts_by_rank):
        for name in {**facts_by_rank[0], **other}:
            first, fact = (facts.get(name, "absent") for facts in (facts_by_rank[0], other))
            if fact != first:
                field, values = _first_difference(first, fact)
                raise DrumlineError(
                    f"{coor.rank_name()}: {name}{field} is {values[0]} on {coor.rank_name(0)} and "
                    f"{values[1]} on {coor.rank_name(rank)}, so the parts would not make one "
                    "model; give every rank the same files, options and versions."
                )


def _first_difference(first: str, other: str) -> tuple[str, tuple[str, str]]:
    """The first field in which two JSON objects differ, and both values; excerpts of other text."""
    field, values = "", [_json_object(first), _json_object(other)]
    while all(isinstance(value, dict) for value in values) and values[0] != values[1]:
        keys = sorted({key for value in values for key in value})
        key = next(key for key in keys if values[0].get(key, ...) != values[1].get(key, ...))
        field, values = f"{field}.{key}", [value.get(key, "absent") for value in values]
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return field, (_excerpt(texts[0], texts[1]), _excerpt(texts[1], texts[0]))


def _json_object(text: str) -> Any:
    """The object in a text; other text as it is."""
    try:
        return json.loads(text) if text.startswith("{") else text
    except ValueError:
        return text


def _excerpt(text: str, other: str) -> str:
    """The part of a text around the first character that differs."""
    pairs = enumerate(zip(text, other, strict=False))
    start = next((at for at, (a, b) in pairs if a != b), min(len(text), len(other)))
    return text[max(0, start - CONTEXT[0]) : start + CONTEXT[1]].strip()


def run_on_all_ranks(coor: Coordinator, work: Callable[[], T], timeout_s: float | None = None) -> T:
    """Run local work on every rank; return this rank's result, or raise on all. Collective.

    timeout_s: for the ranks that are slower; that of the Coordinator, if None.

    The rank whose work fails raises its own exception; so do the others if it is one of ours, and
    otherwise CheckpointError with its text.
    """
    return run_and_share(coor, work, lambda result: None, timeout_s)[0]


def run_and_share(
    coor: Coordinator,
    work: Callable[[], T],
    summarize: Callable[[T], Any],
    timeout_s: float | None = None,
) -> tuple[T, list[Any]]:
    """Run as `run_on_all_ranks`; return also the summary of every rank's result. Collective.

    summarize: makes plain values, which msgpack can send, of this rank's result.
    """
    results: list[T] = []

    def run() -> Any:
        results.append(work())
        return summarize(results[0])

    summaries = coor.run_on_all_ranks(run, error_class=OWN_ERRORS, timeout_s=timeout_s)
    return results[0], summaries
