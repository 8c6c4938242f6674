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
from drumline.contact.model_parts import layer_number
from drumline.errors import DrumlineError

api = transformers_api.continuous_batching()

MAX_FILLING = 2
"""A group's longest sequence is at most this many times as long as its shortest."""

BY_SEQUENCE = {"sdpa": "paged_sdpa", "eager": "paged_eager"}
"""By name of an attention implementation, that of the same one for each sequence by itself."""


@dataclass(frozen=True)
class Span:
    """One sequence's queries and keys among those of all, and the mask that it needs, if any."""

    queries: slice
    keys: slice
    mask: torch.Tensor | None


@dataclass(frozen=True)
class SingleQueries:
    """Sequences with one query each, which attend in one call: many small ones cost more than what
    they compute.

    queries: [sequences]. keys: of all of them, sequence by sequence, each filled up to the longest
    with its first one. mask: [sequences, 1, 1, longest], False for these; None if all are as long.
    """

    queries: torch.Tensor
    keys: slice
    mask: torch.Tensor | None

    def run(self, attend: Callable[..., Any], query: Any, key: Any, value: Any) -> torch.Tensor:
        """[sequences, heads, width] of attend(query, key, value, mask)."""
        own = query[0].transpose(0, 1).index_select(0, self.queries)[:, :, None]
        pairs = [tensor[0, :, self.keys].transpose(0, 1) for tensor in (key, value)]
        rows = [tensor.unflatten(0, (len(own), -1)).transpose(1, 2) for tensor in pairs]
        return attend(own, *rows, self.mask)[0][:, 0]  # type: ignore[no-any-return]


class Spans:
    """The sequences of one pass, and the order of the keys that their attention takes.

    query_ends, key_ends: [sequences + 1], where each begins and ends. window: the tokens that a
        query looks back on, 0 for all. in_groups: sequences with one query, those of similar length
        together; otherwise each is a span, and keys stay in their order.
    """

    def __init__(
        self, query_ends: torch.Tensor, key_ends: torch.Tensor, window: int, in_groups: bool
    ):
        self.query_ends, self.key_ends, self.window = query_ends.tolist(), key_ends.tolist(), window
        self._sequences = [
            (queries, keys, in_groups and _size(queries) == 1)
            for queries, keys in zip(_slices(self.query_ends), _slices(self.key_ends), strict=True)
        ]
        self._groups: dict[torch.device, list[SingleQueries]] = {}

    @cached_property
    def order(self) -> torch.Tensor:
        """Of each key that attention takes, its place among those of all sequences."""
        spans = [
            torch.arange(k.start, k.stop) for _, k, is_single in self._sequences if not is_single
        ]
        return torch.cat([*spans, *(starts.flatten() for _, starts, _ in self._parts)])

    def groups(self, device: torch.device) -> list[SingleQueries]:
        """The sequences with one query."""
        if device not in self._groups:
            end = sum(_size(keys) for _, keys, is_single in self._sequences if not is_single)
            groups = self._groups[device] = []
            for queries, places, mask in self._parts:
                keys = slice(end, end := end + places.numel())
                on_device = None if mask is None else mask.to(device)
                groups.append(SingleQueries(queries.to(device), keys, on_device))
        return self._groups[device]

    @cached_property
    def _parts(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Of each group its queries, the places of its keys, [sequences, longest], and the mask."""
        singles = [(_size(k), q.start, k.start) for q, k, is_single in self._sequences if is_single]
        groups: list[list[tuple[int, int, int]]] = []
        for member in sorted(singles):
            if not groups or member[0] > MAX_FILLING * groups[-1][0][0]:
                groups.append([])
            groups[-1].append(member)
        parts = []
        for members in groups:
            lengths, queries, starts = torch.tensor(members).unbind(1)
            places = torch.arange(members[-1][0])
            is_own = places < lengths[:, None]
            mask = None if members[0][0] == members[-1][0] else is_own[:, None, None]
            parts.append((queries, starts[:, None] + places * is_own, mask))
        return parts

    @cached_property
    def each(self) -> list[Span]:
        """The sequences by themselves."""
        masks: dict[tuple[int, int], torch.Tensor | None] = {}
        spans, end = [], 0
        for queries, keys, is_single in self._sequences:
            if not is_single:
                if (size := (_size(queries), _size(keys))) not in masks:
                    masks[size] = _mask(*size, self.window)
                spans.append(Span(queries, slice(end, end := end + size[1]), masks[size]))
        return spans

    def longest(self) -> tuple[int, int]:
        """The most queries, and the most keys, of a sequence."""
        lengths = [[_size(s) for s in _slices(e)] for e in (self.query_ends, self.key_ends)]
        return max(lengths[0]), max(lengths[1])


def _slices(ends: Sequence[int]) -> list[slice]:
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def _size(part: slice) -> int:
    return int(part.stop - part.start)


def _mask(num_queries: int, num_keys: int, window: int) -> torch.Tensor | None:
    """[queries, keys]: True where a query looks at a key; None if it looks at all up to its own.

    The last query is that of the last key.
    """
    is_within = not window or num_queries <= window
    if num_queries == num_keys and is_within:
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
    """An attention function that calls another for each sequence, and for groups of those with one
    query; or once where none are told."""

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sequences: Spans | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        for name in [name for name, pages in kwargs.items() if hasattr(pages, "begin_step")]:
            pages = kwargs.pop(name)  # the model left it to the attention, as all did before 5.24
            key, value = pages.update(key, value, layer_number(module), kwargs)
            sequences = kwargs.pop("sequences")
        if sequences is None:
            return attend(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]

        def part(*tensors: Any) -> Any:
            return attend(module, *tensors, **kwargs)

        output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        for span in sequences.each:
            mask = None if span.mask is None else span.mask.to(query.device)[None, None]
            keys, values = key[:, :, span.keys], value[:, :, span.keys]
            output[:, span.queries] = part(query[:, :, span.queries], keys, values, mask)[0]
        for group in sequences.groups(query.device):
            output[0].index_copy_(0, group.queries, group.run(part, query, key, value))
        return output, None

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
    tensors = query, key, value, attention_mask
    return api.eager_paged_attention_forward(module, *tensors, cache=_AsTheyAre(), **kwargs)


class _AsTheyAre:
    """Stands for the pages that eager attention asks for before 5.24, which are filled already."""

    def update(self, key_states: Any, value_states: Any, **kwargs: Any) -> tuple[Any, Any]:
        return key_states, value_states


def register_attention() -> None:
    """Let models find this attention by its names. Harmless when done twice."""
    api.AttentionInterface.register("paged_sdpa", _by_sequence(api.sdpa_attention_forward))
    api.AttentionInterface.register("paged_eager", _by_sequence(_eager))
    api.AttentionMaskInterface.register("paged_sdpa", api.sdpa_mask)
    api.AttentionMaskInterface.register("paged_eager", api.eager_mask)
