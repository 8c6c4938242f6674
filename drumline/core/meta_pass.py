"""Passes of a model on meta: shapes without values, and the bytes that are live meanwhile.

with torch.no_grad(), LiveMemory() as live, MetaPass() as shapes:
    model(input_ids)                    # all on meta
print(shapes.num_calls, live.peak_nbytes)
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from coordinator import torch_private

Tensor = torch.Tensor


def _positions(condition: Tensor, *_: Any, as_tuple: bool = False) -> Any:
    """No positions at all, as nonzero() gives them."""
    if as_tuple:
        return condition.new_empty(0, dtype=torch.long).expand(max(1, condition.dim()), 0).unbind()
    return condition.new_empty((0, condition.dim()), dtype=torch.long)


def _selected(condition: Tensor, *rest: Any, **options: Any) -> Any:
    if rest or options:
        return torch.where(condition, *rest, **options)
    return _positions(condition, as_tuple=True)


def _attention_output(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Of attention, the result alone, since kernels keep no scores; on meta torch would."""
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _whole_attention(
    is_on_cpu: bool, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
) -> Tensor:
    """Of attention over all tokens at once, the result, with the scores where no kernel of torch
    computes it: none takes keys of fewer heads unless it is told of them, and that of the CPU none
    of another width than the values."""
    num_heads, widths = ({t.shape[dim] for t in (query, key, value)} for dim in (-3, -1))
    is_mixed = len(num_heads) > 1 and not options.get("enable_gqa")
    if is_mixed or (is_on_cpu and len(widths) > 1):
        return functional.scaled_dot_product_attention(query, key, value, *rest, **options)
    mask = rest[0] if rest else options.get("attn_mask")
    if mask is not None and mask.dtype == torch.bool:
        torch.empty_like(mask, dtype=query.dtype)  # kernels add numbers
    return _attention_output(query, key, value)


def _split(tensor: Tensor, sizes: Any, dim: int = 0) -> Any:
    """The parts, the last of which has what is left, as sizes that were counted are all 0 here."""
    if not isinstance(sizes, int):
        *first, _ = sizes
        sizes = [*first, tensor.shape[dim] - sum(first)]
    return torch.split(tensor, sizes, dim)


def _multiplied(mat_a: Tensor, mat_b: Tensor, **_: Any) -> Tensor:
    """Rows times the matrix of their group; on meta torch knows no dtype but bfloat16."""
    return mat_a.new_empty((*mat_a.shape[:-1], mat_b.shape[-1]))


ANSWERS: dict[Any, Callable[..., Any]] = {
    functional.scaled_dot_product_attention: _attention_output,
    torch_private.grouped_mm: _multiplied,
    Tensor.nonzero: _positions,
    torch.nonzero: _positions,
    torch.where: _selected,
    **dict.fromkeys((Tensor.all, torch.all), lambda *_, **__: torch.tensor(True, device="cpu")),
    **dict.fromkeys((Tensor.any, torch.any), lambda *_, **__: torch.tensor(False, device="cpu")),
    Tensor.split: _split,
    **dict.fromkeys((torch.equal, Tensor.__contains__, Tensor.__bool__), lambda *_: False),
    **dict.fromkeys((Tensor.item, Tensor.__int__, Tensor.__index__), lambda *_: 0),
    Tensor.__float__: lambda *_: 0.0,
    Tensor.tolist: lambda tensor: torch.zeros_like(tensor, device="cpu").tolist(),
}
"""What a tensor without values says to questions about them: nothing is masked, chosen or counted.

So no expert of a loop over experts that tokens went to is run. Sizes of states do not depend on it.
"""


class LiveMemory(torch_private.TorchDispatchMode):
    """Counts the bytes of tensors that were made meanwhile and are still there.

    nbytes: now. peak_nbytes: the most since it was last set.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = self.peak_nbytes = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [s for s in _storages(result) if s not in self._seen]
        if made:
            self._seen.update(_storages([args, kwargs]))  # a view of a weight is not made here
            for storage in made:
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._seen:
            self._seen.add(storage)
            weakref.finalize(storage, self._free, storage.nbytes()).atexit = False
            self.nbytes += storage.nbytes()
            self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def _free(self, nbytes: int) -> None:
        self.nbytes -= nbytes


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [
        leaf.untyped_storage()
        for leaf in torch_private.tree_leaves(values)
        if isinstance(leaf, Tensor)
    ]


class TooManyCalls(Exception):
    """A pass loops over its tokens."""


class MetaPass(TorchFunctionMode):
    """Lets models run on meta, in this thread and within the block, which ask for values too.

    num_calls: of functions of torch. Raises TooManyCalls beyond `limit`.
    whole_on: the kind of device on which attention computes all of its scores at once; none where
        it does so in parts, which are small.
    """

    def __init__(self, limit: float = math.inf, whole_on: str = "") -> None:
        super().__init__()
        self.num_calls, self.limit, self.answers = 0, limit, ANSWERS
        if whole_on:
            whole = functools.partial(_whole_attention, whole_on == "cpu")
            self.answers = {**ANSWERS, functional.scaled_dot_product_attention: whole}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.num_calls += 1
        if self.num_calls > self.limit:
            raise TooManyCalls
        answer = self.answers.get(func)
        if answer is not None and args and isinstance(args[0], Tensor) and args[0].is_meta:
            return answer(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
