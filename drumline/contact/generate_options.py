"""Options of generate(): under which a row's tokens depend on that row alone, and when it stops.

An option that is not listed may couple rows, so a batch with one is generated whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from drumline.contact import transformers_api as api
from drumline.contact.caches import is_cache
from drumline.contact.loading.generation_fields import OPTIONS


def keeps_rows_apart(options: Mapping[str, Any], *defaults: Any) -> bool:
    """True if generate() with these options chooses the tokens of each row for itself.

    defaults: the configs that hold where an option is not given; all must be usual. Sampling is
    not: all rows share one stream of random numbers.
    """
    if unread_options(options, *defaults) or any(map(is_cache, options.values())):
        return False
    return all(
        value in option["usual"]
        for name, option in OPTIONS.items()
        if "usual" in option
        for value in (
            [options[name]] if name in options else [getattr(d, name, None) for d in defaults]
        )
    )


def unread_options(options: Mapping[str, Any], *defaults: Any) -> list[str]:
    """The options that were set and are not listed here: what they do to rows is not known."""
    names = {name for name, value in options.items() if value is not None and not is_cache(value)}
    for config in [config for config in defaults if config is not None]:
        kind: Any = type(config)
        names |= {name for name in _option_names(kind) if getattr(config, name, None) is not None}
    return sorted(names - OPTIONS.keys())


@functools.cache
def _option_names(kind: Callable[[], Any]) -> frozenset[str]:
    """The options that a config of generate() has; a file may hold more, which nothing reads."""
    return frozenset(name for name in vars(kind()) if not name.startswith("_"))


def truncated(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """Logits over the temperature, -inf where the others leave tokens out. [rows, vocabulary]."""
    batching = api.continuous_batching()
    warpers = [batching.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [batching.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [batching.MinPLogitsWarper(min_p)] if min_p else []
    return functools.reduce(lambda rows, warp: warp(None, rows), warpers, logits / temperature)


Criterion: TypeAlias = api.StoppingCriteria
"""Called with the tokens so far and their scores; returns which rows are done."""

Criteria: TypeAlias = list[Criterion]
"""Of the kind that transformers makes, which can be called."""

DETERMINISTIC = (api.MaxLengthCriteria, api.EosTokenCriteria, api.StopStringCriteria)


def wrap_undetermined(criteria: Criteria, wrap: Callable[[Any], Any]) -> Criteria:
    """The criteria, each wrapped unless it depends on tokens alone.

    Others may read a clock, or be of the script's own code."""
    return type(criteria)(item if type(item) in DETERMINISTIC else wrap(item) for item in criteria)
