"""Attention of several sequences in one row of tokens: each attends to its own keys alone.

transformers' own functions take the row as one sequence with a mask, which costs the square of the
batch; its functions for GPUs (`flash_attention_*`) do as those here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from drumline.contact import transformers_api
from drumline.errors import DrumlineError

api = transformers_api.continuous_batching()

BY_SEQUENCE = {"sdpa": "paged_sdpa", "eager": "paged_eager"}
"""By name of an attention implementation, that of the same one for each sequence by itself."""


@dataclass(frozen=True)
class Span:
    """One sequence's queries and keys among those of all, and the mask that it needs, if any."""

    queries: slice
    keys: slice
    mask: torch.Tensor | None


class Spans:
    """The sequences of one pass.

    query_ends, key_ends: [sequences + 1], where each begins and ends, on the CPU. window: the
        tokens that a query looks back on, 0 for all.
    """

    def __init__(self, query_ends: torch.Tensor, key_ends: torch.Tensor, window: int):
        self.query_ends, self.key_ends, self.window = query_ends.tolist(), key_ends.tolist(), window

    @cached_property
    def each(self) -> list[Span]:
        """The sequences with a query."""
        masks: dict[tuple[int, int], torch.Tensor | None] = {}
        spans = []
        for queries, keys in zip(_slices(self.query_ends), _slices(self.key_ends), strict=True):
            size = queries.stop - queries.start, keys.stop - keys.start
            if size not in masks:
                masks[size] = _mask(*size, self.window)
            if size[0]:
                spans.append(Span(queries, keys, masks[size]))
        return spans

    def longest(self) -> tuple[int, int]:
        """The most queries, and the most keys, of a sequence."""
        lengths = [[s.stop - s.start for s in _slices(e)] for e in (self.query_ends, self.key_ends)]
        return max(lengths[0]), max(lengths[1])


def _slices(ends: Sequence[int]) -> list[slice]:
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def _mask(num_queries: int, num_keys: int, window: int) -> torch.Tensor | None:
    """[queries, keys]: True where a query looks at a key; None if it looks at all up to its own.

    The last query is that of the last key.
    """
    is_within = not window or num_queries <= window
    if num_queries == 1 or (num_queries == num_keys and is_within):
        return None
    before = num_keys - num_queries
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(before)
    return mask.triu(before - window + 1) if window else mask


def attention_arguments(
    query_ends: torch.Tensor, key_ends: torch.Tensor, spans: Spans
) -> dict[str, Any]:
    """Arguments of an attention function that tell the sequences of a row apart."""
    max_queries, max_keys = spans.longest()
    return {
        "sequences": spans,
        "cu_seq_lens_q": query_ends,
        "cu_seq_lens_k": key_ends,
        "max_length_q": max_queries,
        "max_length_k": max_keys,
    }


def _by_sequence(attend: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function that calls another for each sequence, or once where none are told."""

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sequences: Spans | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if sequences is None:
            return attend(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
        outputs = [
            attend(
                module,
                query[:, :, span.queries],
                key[:, :, span.keys],
                value[:, :, span.keys],
                None if span.mask is None else span.mask.to(query.device)[None, None],
                **kwargs,
            )[0]
            for span in sequences.each
        ]
        return torch.cat(outputs, dim=1), None

    return attention


def _eager(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> Any:
    """transformers' eager attention over pages, whose masks are added, with none left out."""
    if kwargs.get("softcap") is not None:
        raise DrumlineError(
            f"{type(module).__name__} caps its attention scores, which transformers' eager "
            "attention over pages does not; use generate(), or serve this model."
        )
    num_queries, num_keys = query.shape[2], key.shape[2]
    if attention_mask is None:  # each query looks at all keys up to its own
        attention_mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        attention_mask = attention_mask.tril(num_keys - num_queries)
    if attention_mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill_(
            ~attention_mask, lowest
        )
    return api.eager_paged_attention_forward(module, query, key, value, attention_mask, **kwargs)


def register_attention() -> None:
    """Let models find this attention by its names. Harmless when done twice."""
    api.AttentionInterface.register("paged_sdpa", _by_sequence(api.sdpa_attention_forward))
    api.AttentionInterface.register("paged_eager", _by_sequence(_eager))
    api.AttentionMaskInterface.register("paged_sdpa", api.sdpa_mask)
    api.AttentionMaskInterface.register("paged_eager", api.eager_mask)
