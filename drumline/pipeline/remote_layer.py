"""The stand-in for a layer that another rank holds.

It returns a lazy hidden state at once, so the calls of one forward pass are deferred, and go round
the ring together when something reads the result. Only the first call of a layer with arguments of
a new form waits, to learn what the layer returns.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from drumline.core.pytree import (
    NEW_HIDDEN_STATE,
    Leaves,
    TreeSpec,
    as_tuples,
    flatten,
    new_tensor_kinds,
    unflatten_output,
)
from drumline.errors import DrumlineError
from drumline.kv_cache.proxy import (
    account_tokens,
    cache_number,
    check_lengths,
    grew_by_pass,
    layer_lengths,
    matches_pass_shape,
)
from drumline.pipeline.deferred_calls import DeferredCalls, InternedSpec, LayerRun
from drumline.pipeline.driver import PipelineDriver
from drumline.pipeline.lazy_tensor import LazyTensor, LazyUnknownShape

MAX_KNOWN_FILLS = 1 << 12


class RemoteModule:
    """Stands in for the forward of a module that another rank holds."""

    def __init__(self, driver: PipelineDriver, name: str, module: nn.Module, rank: int):
        self.driver, self.name, self.rank = driver, name, rank
        self.outputs: dict[InternedSpec, TreeSpec] = {}  # of results, by that of the arguments
        self.fills: dict[
            tuple[InternedSpec, tuple[int, ...]], tuple[int, ...]
        ] = {}  # layers of a cache
        self.producer = (name, 0)
        self.cache_layers = _cache_layers(module)
        self.embedding_weight = _embedding_weight(module)
        self.counts_by_pass: bool | None = (
            None  # how its tokens are counted, once it has filled a cache
        )
        self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls = self.driver.calls
        run = calls.continued_run(self, args, kwargs)
        if run is None:
            return self._start_run(args, kwargs)
        hidden = args[0]
        run.fills = self.cache_layers
        if run.caches:
            self._advance(run, hidden)
        run.add(self, hidden)
        if self.outputs.get(run.spec) == NEW_HIDDEN_STATE:
            return calls.lazy("hidden", self.producer, hidden)
        leaves = Leaves(run.ints, [hidden, *run.tensors], run.caches)
        return self._result(calls, run.spec, leaves)

    def _start_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first call of a run. What the cache refuses is never sent."""
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise DrumlineError(
                f"rank 0: {self.name} was called under torch.autocast, of which rank {self.rank} "
                "knows nothing, so its layers would compute in another dtype; load the model with "
                "dtype=torch.bfloat16, or call it outside of autocast."
            )
        leaves = Leaves()
        spec = self.driver.intern(flatten([args, kwargs], leaves, self._number_of))
        if leaves.caches and leaves.tensors:
            _fetch_if_shape_unknown(leaves.tensors[0])
        calls = self.driver.calls
        if calls.runs and calls.last_layer.rank > self.rank:
            calls.flush()  # it has passed this rank already
            calls = self.driver.calls
        slots = tuple([calls.slot(tensor) for tensor in leaves.tensors])
        run = LayerRun(spec, leaves, slots, args, kwargs)
        fills = self.fills.get((spec, run.numbers)) if run.numbers else self.cache_layers
        run.fills = fills
        if leaves.caches and leaves.tensors and fills is not None:
            self._advance(run, leaves.tensors[0])
        calls.runs.append(run)
        run.add(self, None)
        run.is_learning |= fills is None
        return self._result(calls, spec, leaves)

    def _advance(self, run: LayerRun, hidden: torch.Tensor) -> None:
        """Count what the call puts into the cache, unless that has to be seen first."""
        is_new = run.spec not in self.outputs
        if (
            is_new
            and self.counts_by_pass is None
            and not matches_pass_shape(self.driver.shape_of_pass, hidden)
        ):
            run.fills = None
        elif run.fills is not None:
            account_tokens(run.caches[0], run.fills, hidden, self.counts_by_pass)
            if is_new:
                run.lengths = layer_lengths(run.caches[0], run.fills)

    def _number_of(self, cache: Cache) -> int:
        return cache_number(cache, self.driver, self.cache_layers)

    def _result(self, calls: DeferredCalls, spec: InternedSpec, leaves: Leaves) -> Any:
        """The output of the layer, after putting its changes into the dicts that layers share."""
        run = calls.runs[-1]
        output = None if run.is_learning else self.outputs.get(spec)
        if output == NEW_HIDDEN_STATE:
            return calls.lazy("hidden", self.producer, leaves.tensors[0])
        new = (
            self._learn(calls, run, leaves)
            if output is None
            else self._lazy_outputs(calls, output, leaves)
        )
        value, *written = unflatten_output(
            self.outputs[spec], leaves.tensors, iter(new), leaves.caches
        )
        for shared, changes in zip(leaves.shared, written, strict=True):
            shared.update(changes)
        return value

    def _learn(self, calls: DeferredCalls, run: LayerRun, leaves: Leaves) -> list[torch.Tensor]:
        """Run the call now, for its output and the description of it."""
        reply = calls.flush()
        assert reply is not None
        output, filled = json.loads(reply.note)
        if leaves.caches and leaves.tensors:
            self._learn_layers(run, filled, leaves)
        self.outputs[run.spec] = as_tuples(output)
        return [tensor.to(self.driver.device) for tensor in reply.tensors]

    def _learn_layers(self, run: LayerRun, filled: list[list[int]], leaves: Leaves) -> None:
        """Note which layers of the cache were filled over there. Some modules do not say (GPT-Neo),
        and to some an integer says which turn of a recurrence it is (HRM)."""
        indices = tuple(index for index, _, _ in filled)
        is_usual = set(indices) <= set(self.cache_layers)
        layers = self.cache_layers if is_usual else indices
        cache, hidden = leaves.caches[0], leaves.tensors[0]
        try:
            if not is_usual and self.cache_layers and not run.numbers:
                raise DrumlineError(
                    f"rank 0: {self.name} on rank {self.rank} put keys into the layers "
                    f"{[*indices]} of the cache, where its modules have the numbers "
                    f"{[*self.cache_layers]}, so the lengths that masks are made of would be "
                    "wrong; give it to rank 0 in device_map."
                )
            if filled and self.counts_by_pass is None:
                self.counts_by_pass = grew_by_pass(self.driver.shape_of_pass, hidden, filled)
            if run.fills != layers:
                account_tokens(cache, layers, hidden, self.counts_by_pass)
                run.lengths = layer_lengths(cache, layers)
            check_lengths(run.lengths, filled, f"{self.name} on rank {self.rank}")
        except DrumlineError:
            cache.is_inconsistent = True  # over there it is filled already
            raise
        if run.numbers:
            if len(self.fills) >= MAX_KNOWN_FILLS:
                self.fills.clear()
            self.fills[run.spec, run.numbers] = layers
        else:
            self.cache_layers = layers

    def _lazy_outputs(
        self, calls: DeferredCalls, output: TreeSpec, leaves: Leaves
    ) -> list[LazyTensor]:
        hidden = leaves.tensors[0] if leaves.tensors else torch.empty(0)
        if self.embedding_weight is not None and new_tensor_kinds(output) == [
            "extra"
        ]:  # its shape is known
            like = hidden.new_empty((), dtype=self.embedding_weight.dtype)
            return [
                calls.lazy(
                    "hidden",
                    self.producer,
                    like.expand(*hidden.shape, self.embedding_weight.shape[1]),
                )
            ]
        kinds = enumerate(new_tensor_kinds(output))
        return [calls.lazy(kind, (self.name, number), hidden) for number, kind in kinds]

    def __deepcopy__(self, memo: Any) -> RemoteModule:
        return self


def _embedding_weight(module: nn.Module) -> torch.Tensor | None:
    """[tokens, width]: the weights, on meta, of a table of embeddings; None for other modules."""
    is_table = type(module).forward is nn.Embedding.forward
    return module.weight if is_table and isinstance(module.weight, torch.Tensor) else None


def _fetch_if_shape_unknown(hidden: torch.Tensor) -> None:
    """Fetch a hidden state of unknown shape, whose tokens are to be counted into a cache."""
    if type(hidden) is LazyUnknownShape:
        hidden.fetch()


def _cache_layers(module: nn.Module) -> tuple[int, ...]:
    """The layers of the cache that a module fills: those that its attention says are its own."""
    numbers = {getattr(child, "layer_idx", None) for child in module.modules()}
    return tuple(sorted(number for number in numbers if isinstance(number, int) and number >= 0))
