"""Keys and values of one rank's layers in pages, of which rank 0 keeps the tables.

A token has one number for all layers of a kind of attention, on every rank: that of its block times
the tokens of a page, plus its place there. A step brings lists of such numbers, so a rank knows
neither requests nor blocks. Each layer's memory is taken when it first runs, and shaped like what
it puts in, so shards of heads and keys of another width than values need nothing more.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from drumline.contact.batching.paged_attention import Spans, attention_arguments
from drumline.contact.batching.paged_batches import NEW_TOKEN
from drumline.errors import DrumlineError


@dataclass(frozen=True)
class PoolShape:
    """kinds: the kind of attention of each layer, by number. num_tokens, windows: of each kind, the
    numbers that a token may have, and the tokens that its layers look back on, 0 for all.
    in_groups: as the attention takes sequences with one query, see Spans."""

    kinds: Sequence[int]
    num_tokens: Sequence[int]
    windows: Sequence[int]
    in_groups: bool = False


@dataclass(frozen=True)
class StepOfKind:
    """One pass through the layers of a kind: the tokens that these read and write, and, of each
    sequence's queries and keys, where they end. rows: of each token to read, the number of the new
    one that it is, if it is new."""

    query_ends: torch.Tensor
    read: torch.Tensor
    rows: torch.Tensor
    write: torch.Tensor
    key_ends: torch.Tensor
    spans: Spans

    @classmethod
    def of(
        cls, query_ends: Any, read: Any, write: Any, key_ends: Any, window: int, in_groups: bool
    ) -> StepOfKind:
        """in_groups: see Spans. Where nothing is read, keys are the new ones, in their order."""
        spans = Spans(query_ends, key_ends, window, in_groups and read.numel() > 0)
        rows = (read == NEW_TOKEN).cumsum(0) - 1
        if in_groups and read.numel():
            order = spans.order.to(read.device)
            read, rows = read[order], rows[order]
        return cls(query_ends, read, rows, write, key_ends, spans)

    def on(self, device: torch.device) -> StepOfKind:
        """A copy where the layers are."""
        if self.read.device == device:
            return self
        tensors: dict[str, Any] = {
            key: value.to(device)
            for key, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **tensors)

    @cached_property
    def new_places(self) -> torch.Tensor:
        """Places in `read` of tokens that this pass brings."""
        return (self.read == NEW_TOKEN).nonzero().flatten()

    @cached_property
    def new_rows(self) -> torch.Tensor:
        """The new tokens at these places."""
        return self.rows[self.new_places]


class PagedPool:
    """The keys and values of this rank's layers, and the step that they are in."""

    def __init__(self, *shape: Any):
        self.shape = PoolShape(*shape)
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._steps: list[StepOfKind] = []

    def begin_step(self, query_ends: torch.Tensor, *tensors: torch.Tensor) -> None:
        """Note what the next pass reads and writes.

        tensors: of each kind of attention the tokens to read, those to write, and where the keys of
            each sequence end among the former.
        """
        self._steps = []
        for kind, window in enumerate(self.shape.windows):
            read, write, key_ends = tensors[3 * kind : 3 * kind + 3]
            own = read, write, key_ends, window, self.shape.in_groups
            self._steps.append(StepOfKind.of(query_ends, *own))

    def copy_tokens(self, kind: int, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy tokens of all layers of a kind, such as the blocks of a request that is forked."""
        for number, pages in self.layers.items():
            if self.shape.kinds[number] == kind:
                for tensor in pages:
                    at, to = sources.to(tensor.device), targets.to(tensor.device)
                    tensor.index_copy_(0, to, tensor.index_select(0, at))

    def update(self, *args: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep new keys and values, [1, heads, tokens, width]; returns all that attention reads.

        What models name differently comes in one order: keys, values, the number of the layer, and
        the arguments of the attention that follows, which is told there how to tell the sequences
        apart.
        """
        keys, values, layer, *rest = (*args, *named.values())
        if not (rest and isinstance(rest[0], dict)):
            raise DrumlineError(
                f"the attention of layer {layer} cannot be told which tokens belong together, so "
                "this model cannot be batched continuously; use generate()."
            )
        kind = self.shape.kinds[layer]
        step = self._steps[kind] = self._steps[kind].on(keys.device)
        rest[0].update(attention_arguments(step.query_ends, step.key_ends, step.spans))
        pages = self._pages(layer, keys, values)
        pairs = zip(pages, (keys, values), strict=True)
        is_window = bool(self.shape.windows[kind])
        all_keys, all_values = [_exchange(step, page, new, is_window) for page, new in pairs]
        return all_keys, all_values

    def _pages(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self.layers:
            num_tokens = self.shape.num_tokens[self.shape.kinds[layer]]
            with torch.inference_mode(False):  # what is made in it cannot be changed outside of it
                made = [_zeros(t, num_tokens, t.shape[1], t.shape[3]) for t in (keys, values)]
            self.layers[layer] = made[0], made[1]
        return self.layers[layer]


def _zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Zeros on a tensor's device. A host gives memory for them as it is written, not before."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    nbytes = math.prod(shape) * like.itemsize
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


def _exchange(
    step: StepOfKind, page: torch.Tensor, new: torch.Tensor, is_window: bool
) -> torch.Tensor:
    """Write new tokens, and read all. A window is read first: new tokens take the place of those
    that leave it."""
    rows = new[0].transpose(0, 1)
    if not step.read.numel():
        page.index_copy_(0, step.write, rows)
        return new
    if is_window:
        whole = page.index_select(0, step.read)
        whole.index_copy_(0, step.new_places, rows.index_select(0, step.new_rows))
        page.index_copy_(0, step.write, rows)
    else:
        page.index_copy_(0, step.write, rows)
        whole = page.index_select(0, step.read)
    return whole.transpose(0, 1)[None]
