"""The stand-in for a layer that another rank holds.

It returns a lazy hidden state at once, so the calls of one forward pass are deferred, and go round
the ring together when something reads the result. Only the first call of a kind of layers with
arguments of a new form waits, to learn what such layers return.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from drumline.contact.caches import Cache
from drumline.contact.model_parts import layer_number
from drumline.core import pytree
from drumline.core.layer_kinds import KindOutput, LayerKind
from drumline.errors import DrumlineError, RefusedUse
from drumline.kv_cache import proxy
from drumline.kv_cache.placeholder import HeadSizes, LayerOrigin, layer_origin
from drumline.pipeline.deferred_calls import DeferredCalls, InternedSpec, LayerRun, NewCall
from drumline.pipeline.driver import PipelineDriver
from drumline.pipeline.lazy_tensor import LazyTensor, LazyUnknownShape, fetch_all

MAX_KNOWN_FILLS = 1 << 12


class RemoteModule:
    """Stands in for the forward of a module that another rank holds."""

    def __init__(
        self, driver: PipelineDriver, name: str, module: nn.Module, rank: int, kind: LayerKind
    ):
        self.driver, self.name, self.rank = driver, name, rank
        self.kind: LayerKind | None = kind
        # By the spec of the arguments: that of the result, and the layers of a cache that it fills.
        self.outputs: dict[InternedSpec, pytree.TreeSpec] = {}
        self.fills: dict[tuple[InternedSpec, tuple[int, ...]], tuple[int, ...]] = {}
        self.producer = (name, 0, None)  # of hidden states, which are always sent
        self.cache_layers = self.own_cache_layers = cache_layers(module)
        self.embedding_weight = _embedding_weight(module)
        self.counts_by_pass: bool | None = None  # how tokens are counted, once it filled a cache
        self.origins: dict[int, LayerOrigin] = {}  # of layers of a cache, once it filled them
        self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls, run = self.driver.calls.continued(self, args, kwargs)
        if run is None:
            return self._start_run(args, kwargs)
        hidden = args[0]
        new = None if run.spec in self.outputs else self._new_call(run, hidden)
        if (output := calls.add(run, self, hidden, new)) is not None:
            return output
        leaves = pytree.Leaves(run.ints, [hidden, *run.tensors], run.caches)
        return self._result(calls, run, leaves, new)

    def _start_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first call of a run. What the cache refuses is never sent."""
        if is_autocast_enabled():
            raise DrumlineError(
                f"rank 0: {self.name} was called under torch.autocast, of which rank {self.rank} "
                "knows nothing, so its layers would compute in another dtype; load the model with "
                "dtype=torch.bfloat16, or call it outside of autocast."
            )
        leaves = pytree.Leaves()
        number_of = functools.partial(
            proxy.cache_number, op_log=self.driver, layers=self._unknown_layers
        )
        spec = self.driver.specs[pytree.flatten([args, kwargs], leaves, number_of)]
        if leaves.caches and leaves.tensors and type(leaves.tensors[0]) is LazyUnknownShape:
            leaves.tensors[0].fetch()  # its tokens are to be counted into a cache
        here = [tensor for tensor in leaves.tensors if not isinstance(tensor, LazyTensor)]
        if empty := [tensor for tensor in here if tensor.is_meta]:
            raise RefusedUse(
                f"rank 0: {self.name} was given {empty[0]!r}, which has no values here that could "
                f"be sent to rank {self.rank}; give it a tensor on {self.driver.device}."
            )
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in here):
            self.driver.context.loses_gradient = True
        calls, run = self.driver.calls.begin_run(self.rank, spec, leaves, args, kwargs)
        hidden = leaves.tensors[0] if leaves.tensors else None
        new = self._new_call(run, hidden)
        if (output := calls.add(run, self, hidden, new)) is not None:
            return output
        return self._result(calls, run, leaves, new)

    def _new_call(self, run: LayerRun, hidden: torch.Tensor | None) -> NewCall | None:
        """The expectation of a call of a new form, which the reply confirms; None if the layer was
        seen with this form."""
        fills = run.fills_of(self) if run.numbers else self.cache_layers
        if run.spec in self.outputs and fills is not None:
            return None
        usual = None if self.kind is None or run.numbers else self.kind.outputs.get(run.spec)
        if usual is None:
            return NewCall(self, None, fills, self.counts_by_pass, hidden)
        fills = tuple([self.own_cache_layers[at] for at in usual.filled])
        return NewCall(self, usual.output, fills, usual.counts_by_pass)

    def _unknown_layers(self, cache: Cache) -> Sequence[int]:
        """The layers of a cache that must be empty, as this rank would know nothing of the tokens.

        What layers put there in the present pass is no matter: HRM's take turns in one cache.
        """
        return () if self.driver.context.came_empty(cache) else self.cache_layers

    def _result(
        self, calls: DeferredCalls, run: LayerRun, leaves: pytree.Leaves, new: NewCall | None
    ) -> Any:
        """The output of the layer, after putting its changes into the dicts that layers share."""
        output = self.outputs.get(run.spec) if new is None else new.output
        if output is None:
            tensors: Sequence[torch.Tensor] = self._ask(calls)
            output = self.outputs[run.spec]
        else:
            tensors = self._lazy_outputs(calls, run, output, leaves)
        inputs = leaves.tensors
        if pytree.written_inputs(output):  # who reads these inputs would not ask for them
            calls.flush(is_amid_pass=True)
            inputs, tensors = fetch_all(inputs), fetch_all(tensors)
        value, *changed = pytree.unflatten_output(output, inputs, iter(tensors), leaves.caches)
        for shared, changes in zip(leaves.shared, changed, strict=False):
            shared.update(changes)
        return value

    def _ask(self, calls: DeferredCalls) -> list[torch.Tensor]:
        """Run the call now, for its output, of which its kind has shown nothing."""
        reply = calls.flush(is_amid_pass=True)  # has it confirmed
        assert reply is not None
        return [tensor.to(self.driver.device) for tensor in reply.tensors]

    def confirm(
        self,
        run: LayerRun,
        new: NewCall,
        output: Any,
        filled: list[list[int]],
        uncroppable: list[int],
        shapes: list[tuple[list[int], list[int]]],
    ) -> None:
        """Take what came of a call of a new form; later calls rely on that.

        filled: for each layer of the cache: its index, its tokens before, and now.
        """
        layers: tuple[int, ...] = ()
        self.driver.uncroppable.update(uncroppable)
        if run.caches and run.slots:
            layers = self._confirm_layers(run, new, filled)
            pairs = zip(filled, shapes, strict=True)
            self.origins.update({at: _origin(self.rank, *shape) for (at, _, _), shape in pairs})
            proxy.show_origins(run.caches[0], self.origins)
        self.outputs[run.spec] = pytree.as_tuples(output)
        own = self.own_cache_layers
        if self.kind is not None and not run.numbers and {*layers} <= {*own}:
            places = tuple([own.index(layer) for layer in layers])
            usual = KindOutput(self.outputs[run.spec], places, self.counts_by_pass)
            self.kind.note(run.spec, usual)

    def _confirm_layers(
        self, run: LayerRun, new: NewCall, filled: list[list[int]]
    ) -> tuple[int, ...]:
        """Note which layers of the cache were filled over there. Some modules do not say (GPT-Neo),
        and to some an integer says which turn of a recurrence it is (HRM)."""
        indices = tuple(index for index, _, _ in filled)
        is_usual = set(indices) <= set(self.cache_layers)
        cache = run.caches[0]
        layers = self.cache_layers if is_usual and not proxy.is_own(cache) else indices
        try:
            if not is_usual and self.cache_layers and not run.numbers:
                raise DrumlineError(
                    f"rank 0: {self.name} on rank {self.rank} put keys into the layers "
                    f"{[*indices]} of the cache, where its modules have the numbers "
                    f"{[*self.cache_layers]}, so the lengths that masks are made of would be "
                    "wrong; give it to rank 0 in device_map."
                )
            self._count(cache, new, filled, layers)
            proxy.check_lengths(new.lengths, filled, f"{self.name} on rank {self.rank}")
        except DrumlineError:
            cache.is_inconsistent = True  # over there it is filled already
            self.ask_itself()
            raise
        if not run.numbers:
            self.cache_layers = layers
            return layers
        if len(self.fills) >= MAX_KNOWN_FILLS:
            self.fills.clear()
        self.fills[run.spec, run.numbers] = layers
        return layers

    def _count(
        self, cache: Cache, new: NewCall, filled: list[list[int]], layers: tuple[int, ...]
    ) -> None:
        """Count the call into the layers that it filled, unless that was done ahead of it."""
        hidden, shape = new.hidden, self.driver.context.shape
        if filled and self.counts_by_pass is None:
            self.counts_by_pass = new.counts_by_pass
            if hidden is not None:
                self.counts_by_pass = proxy.grew_by_pass(shape, hidden, filled)
        if new.fills == layers:
            return
        if hidden is None:
            raise DrumlineError(
                f"rank 0: {self.name} on rank {self.rank} put keys into the layers {[*layers]} of "
                f"the cache, where by others of its kind it was taken to fill {new.fills}, so the "
                "lengths that masks are made of would be wrong; call the model again with an empty "
                "cache, and it is asked itself."
            )
        proxy.account_tokens(cache, layers, hidden, shape, self.counts_by_pass, self.origins)
        new.lengths = proxy.layer_lengths(cache, layers)

    def ask_itself(self) -> None:
        """Go by what this layer returns alone, no longer by its kind."""
        self.kind = None

    def _lazy_outputs(
        self, calls: DeferredCalls, run: LayerRun, output: pytree.TreeSpec, leaves: pytree.Leaves
    ) -> list[LazyTensor]:
        hidden = leaves.tensors[0] if leaves.tensors else torch.empty(0)
        kinds = pytree.new_tensor_kinds(output)
        if self.embedding_weight is not None and kinds == ["extra"]:  # its shape is known
            like = hidden.new_empty((), dtype=self.embedding_weight.dtype)
            like = like.expand(*hidden.shape, self.embedding_weight.shape[1])
            return [calls.lazy("hidden", self.producer, like)]
        return [calls.lazy(kind, (self.name, n, run.spec), hidden) for n, kind in enumerate(kinds)]

    def __deepcopy__(self, memo: Any) -> RemoteModule:
        return self


def is_autocast_enabled() -> bool:
    """True if operations of this thread compute in another dtype on some device."""
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda", "xpu")))


def _embedding_weight(module: nn.Module) -> torch.Tensor | None:
    """[tokens, width]: the weights, on meta, of a table of embeddings; None for other modules."""
    is_table = type(module).forward is nn.Embedding.forward
    return module.weight if is_table and isinstance(module.weight, torch.Tensor) else None


def _origin(rank: int, keys: list[int], values: list[int]) -> LayerOrigin:
    """The origin of a layer with keys and values of these shapes, empty where it has none."""
    sizes = [HeadSizes(shape[1], shape[3]) if len(shape) == 4 else None for shape in (keys, values)]
    return layer_origin(rank, *sizes)


def cache_layers(module: nn.Module) -> tuple[int, ...]:
    """The layers of the cache that a module fills: those that its attention says are its own.

    The numbers of the innermost modules: a layer of LongCat-Flash holds two attentions, and its own
    number is that of neither.
    """
    numbered = [child for child in module.modules() if layer_number(child) >= 0]
    inner = [m for m in numbered if sum(layer_number(child) >= 0 for child in m.modules()) == 1]
    return tuple(sorted({layer_number(child) for child in inner}))
