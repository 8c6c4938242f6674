"""Calls of remote layers, gathered until something looks at a result, then sent together.

Most calls are repetitions: one layer after another is given the same arguments with the hidden
state that the one before put out. Such a run is written down once, with the layers it goes through.
"""

from __future__ import annotations

import functools
import json
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeGuard

import torch

from coordinator import torch_private
from drumline.core.pytree import (
    NEW_HIDDEN_STATE,
    Leaves,
    TreeSpec,
    has_reusable_arguments,
    integer_kinds,
)
from drumline.errors import DrumlineError, StageError
from drumline.kv_cache import proxy
from drumline.kv_cache.placeholder import LayerOrigin
from drumline.pipeline.lazy_tensor import LazyTensor, LazyUnknownShape, fetched
from drumline.pipeline.pass_hooks import PassContext
from drumline.stages.messages import Message
from drumline.stages.program import Program, StageStep

Producer = tuple[str, int, "InternedSpec | None"]
"""A module, the number of one of its new tensors, and the form of its arguments."""
Usage = tuple[Producer, bool]
"""A producer, and whether hidden states were requested, which may hold what it put out."""

NUM_TRIALS = 2
"""Times that a tensor of unknown use has to be thrown away, and nobody looked at it, before it is
left where it is."""


class CalledLayer(Protocol):
    """A layer that another rank holds, as its calls know it."""

    name: str
    rank: int
    outputs: dict[InternedSpec, TreeSpec]
    counts_by_pass: bool | None
    origins: dict[int, LayerOrigin]
    cache_layers: tuple[int, ...]
    fills: dict[tuple[InternedSpec, tuple[int, ...]], tuple[int, ...]]

    @property
    def producer(self) -> Producer:
        """Of its hidden states."""

    def confirm(self, run: LayerRun, new: NewCall, *facts: Any) -> None:
        """Take what came of a call of a new form."""

    def ask_itself(self) -> None:
        """Go by what this layer returns alone: a call failed."""


class DeferredCalls:
    """Calls gathered by one thread, in order, and the lazy tensors they will put out.

    exchange: sends calls, and returns the reply.
    """

    def __init__(
        self,
        exchange: Callable[[DeferredCalls], Message],
        output_usage: OutputUsage,
        context: PassContext,
    ):
        self.exchange, self.output_usage, self.context = exchange, output_usage, context
        self.sent = self.wants_hidden_states = False
        self.runs: list[LayerRun] = []
        self.outputs: list[weakref.ref[LazyTensor]] = []
        self.producers: list[Producer] = []
        self.inputs = Leaves()
        self.versions: list[int | None] = []  # of the inputs when layers were given them

    def slots(self, tensors: list[torch.Tensor]) -> tuple[int, ...]:
        """Of each tensor, its position among the inputs, or ~n for the n-th output so far."""
        # Inputs count up from 0 and outputs down from ~0, as more inputs may come: `program` makes
        # slots of both once the number of inputs is known.
        values = [t if getattr(t, "source", self) is self else fetched(t) for t in tensors]
        inputs = iter(self.inputs.add([t for t in values if not isinstance(t, LazyTensor)]))
        self.versions += map(_version, self.inputs.tensors[len(self.versions) :])
        return tuple([~t.slot if isinstance(t, LazyTensor) else next(inputs) for t in values])

    def lazy(self, kind: str, producer: Producer, hidden: torch.Tensor) -> LazyTensor:
        """The next tensor that the last call will put out; `hidden` is like it or on its device.

        Its shape is unknown if that of `hidden` is, until `hidden` has been fetched."""
        if type(hidden) is LazyUnknownShape and hidden.value is not None:
            hidden = hidden.value
        is_known = kind == "hidden" and type(hidden) is not LazyUnknownShape
        lazy = (LazyTensor if is_known else LazyUnknownShape).like(hidden, self, len(self.outputs))
        self.outputs.append(weakref.ref(lazy))
        self.producers.append(producer)
        return lazy

    def add(
        self, run: LayerRun, layer: CalledLayer, hidden: Any, new: NewCall | None
    ) -> LazyTensor | None:
        """One more layer of a run, which is given `hidden`. Returns what it will put out, if that
        is known to be a hidden state and nothing else."""
        if run.caches and hidden is not None:
            self._count_tokens(run, layer, hidden, new)
        if run.layers:
            run.hidden_slots.append(~hidden.slot)
        else:
            self.runs.append(run)
        if new is not None:
            run.new[len(run.layers)] = new
        run.layers.append(layer)
        output = layer.outputs.get(run.spec) if new is None else new.output
        is_usual = output == NEW_HIDDEN_STATE
        return self.lazy("hidden", layer.producer, hidden) if is_usual else None

    def _count_tokens(
        self, run: LayerRun, layer: CalledLayer, hidden: torch.Tensor, new: NewCall | None
    ) -> None:
        """Count what the call puts into the cache, unless that has to be seen first."""
        cache, shape = run.caches[0], self.context.shape
        by_pass = layer.counts_by_pass if new is None else new.counts_by_pass
        fills = run.fills_of(layer) if new is None else new.fills
        if new is not None and new.output is None:
            is_unsure = by_pass is None and not proxy.matches_pass_shape(shape, hidden)
            if is_unsure or proxy.is_own(cache):  # which may get no keys anywhere
                fills = new.fills = None
        if fills is not None:
            proxy.account_tokens(cache, fills, hidden, shape, by_pass, layer.origins)
            if new is not None:
                new.lengths = proxy.layer_lengths(cache, fills)

    def flush(self, *, is_amid_pass: bool = False) -> Message | None:
        """Run the calls; every hidden state that somebody still holds gets its value.

        is_amid_pass: more layers follow, which may be given whatever the calls put out: all that
        somebody still holds gets its value, whether it was ever looked at or not.
        """
        if self.sent or not self.runs:
            return None
        self.sent, self.wants_hidden_states = True, self.context.wants_hidden_states
        new_calls = [(run, new) for run in self.runs for new in run.new.values()]
        alive = [ref() for ref in self.outputs]
        waiting = [lazy for lazy in alive if self._is_wanted(lazy, is_amid_pass)]
        self.returns = tuple(lazy.slot for lazy in waiting)
        try:
            self._check_inputs()
            reply = self.exchange(self)
        except StageError:
            for _, new in new_calls:
                if new.output is not None:
                    new.layer.ask_itself()  # it may differ from its kind
            raise
        finally:
            self.runs, self.inputs = [], Leaves()  # lets go of the caches
        for (run, new), facts in zip(new_calls, json.loads(reply.note or "[]"), strict=True):
            new.layer.confirm(run, new, *facts)
        for lazy, value in zip(waiting, reply.tensors, strict=False):
            lazy.value = value.to(lazy.home)
        reply.tensors = reply.tensors[len(waiting) :]
        return reply

    def _check_inputs(self) -> None:
        """Raise DrumlineError if a tensor was written into since a layer was given it.

        Its values now, which would be sent, are not those that the layer was to get.
        """
        if [*map(_version, self.inputs.tensors)] == self.versions:
            return
        pairs = zip(self.inputs.tensors, self.versions, strict=True)
        written = {at for at, (tensor, version) in enumerate(pairs) if _version(tensor) != version}
        layer = next((run.layers[0] for run in self.runs if written & {*run.slots}), None)
        if layer is None:  # of a call that failed before it was added
            return
        self.invalidate_caches()  # which count tokens that do not come
        raise DrumlineError(
            f"rank 0: a tensor, or a view of its memory, was written into after {layer.name} on "
            f"rank {layer.rank} was given it and before that ran: calls of layers on other ranks "
            "are sent once something reads what they return; give them a clone(), or read what "
            "they return before you write."
        )

    def invalidate_caches(self) -> None:
        """Mark the caches of these calls: their layers no longer hold the same tokens."""
        for cache in [cache for run in self.runs for cache in run.caches]:
            cache.is_inconsistent = True

    def _is_wanted(self, lazy: LazyTensor | None, is_amid_pass: bool) -> TypeGuard[LazyTensor]:
        if type(lazy) is not LazyUnknownShape or is_amid_pass:
            return lazy is not None
        usage = self.producers[lazy.slot], self.wants_hidden_states
        return self.output_usage.is_wanted(usage, lazy)

    def read(self, slot: int) -> None:
        """Note that this output is looked at, and run the calls if they have not been."""
        state = self if self.sent else self.context
        self.output_usage.looked_at.add((self.producers[slot], state.wants_hidden_states))
        self.flush()

    def form(self, before: list[int]) -> tuple[list[int], list[int], tuple[Any, ...]]:
        """The start of each run's integers, and all integers; runs with equal ones share them.

        Then a key that is equal for calls with the same program."""
        ints = list(before)
        places: dict[tuple[int, ...], int] = {}
        starts: list[int] = []
        for run in self.runs:
            start = places.setdefault(tuple(run.ints), len(ints))
            if start == len(ints):
                ints.extend(run.ints)
            starts.append(start)
        runs = tuple([run.key() for run in self.runs])
        return starts, ints, (len(self.inputs.tensors), self.returns, tuple(starts), runs)

    def program(self, operations: TreeSpec, num_operands: int, starts: list[int]) -> Program:
        num_inputs = num_operands + len(self.inputs.tensors)
        steps = []
        for run, start in zip(self.runs, starts, strict=True):
            calls = zip(run.layers, run.slots_by_layer(), strict=True)
            for at, (layer, slots_before) in enumerate(calls):
                slots = tuple(num_operands + s if s >= 0 else num_inputs + ~s for s in slots_before)
                new = run.new.get(at)
                output = layer.outputs[run.spec] if new is None else new.output
                form = (run.spec.template, slots, start, output, new is not None)
                steps.append(StageStep(layer.rank, layer.name, *form))
        returns = tuple(num_inputs + position for position in self.returns)
        return Program(operations, num_operands, num_inputs, tuple(steps), returns)


def _version(tensor: torch.Tensor) -> int | None:
    """The writes into a tensor so far; None for one of inference mode, where nobody counts them."""
    return None if tensor.is_inference() else torch_private.version_of(tensor)


class CallsByThread(threading.local):
    """The calls of each thread that have not been sent. Arguments as of DeferredCalls."""

    def __init__(self, *arguments: Any) -> None:
        self._make = functools.partial(DeferredCalls, *arguments)
        self._last = self._make()

    def unsent(self) -> DeferredCalls:
        if self._last.sent:
            self._last = self._make()
        return self._last

    def continued(
        self, layer: CalledLayer, args: Any, kwargs: Any
    ) -> tuple[DeferredCalls, LayerRun | None]:
        """The calls of this thread, and their last run if this call goes on with it."""
        calls = self.unsent()
        if not calls.runs or not args:
            return calls, None
        run, hidden = calls.runs[-1], args[0]
        comes_next = getattr(hidden, "source", None) is calls and run.layers[-1].rank <= layer.rank
        is_countable = not run.caches or type(hidden) is not LazyUnknownShape
        goes_on = comes_next and is_countable and run.is_continued_by(args, kwargs)
        return calls, run if goes_on else None

    def begin_run(
        self, rank: int, spec: InternedSpec, leaves: Leaves, args: Any, kwargs: Any
    ) -> tuple[DeferredCalls, LayerRun]:
        """The calls that a layer of this rank can be added to, and a run for it."""
        calls = self.unsent()
        if calls.runs and calls.runs[-1].layers[-1].rank > rank:
            calls.flush(is_amid_pass=True)  # it has passed this rank already
            calls = self.unsent()
        return calls, LayerRun(spec, leaves, calls.slots(leaves.tensors), args, kwargs)


class OutputUsage:
    """The outputs of layers, besides hidden states, that the master reads: only those are sent."""

    def __init__(self) -> None:
        self.looked_at: set[Usage] = set()
        self._num_unread: Counter[Usage] = Counter()
        self._on_trial: set[weakref.ref[LazyTensor]] = set()

    def is_wanted(self, usage: Usage, lazy: LazyTensor) -> bool:
        """True if it was read before, or is not known to be of no use: other threads may be about
        to read the first ones of its kind."""
        if usage in self.looked_at:
            return True
        if self._num_unread[usage] >= NUM_TRIALS:
            return False
        self._on_trial.add(weakref.ref(lazy, lambda ref: self._end_trial(usage, ref)))
        return True

    def _end_trial(self, usage: Usage, ref: weakref.ref[LazyTensor]) -> None:
        self._on_trial.discard(ref)
        self._num_unread[usage] += 1


class InternedSpec:
    """A template that is compared by identity, which is quick; SpecTable makes it."""

    def __init__(self, template: TreeSpec):
        self.template = template

    @cached_property
    def has_reusable_arguments(self) -> bool:
        return has_reusable_arguments(self.template) and not self.numbers_at

    @cached_property
    def numbers_at(self) -> tuple[int, ...]:
        """The places of the model's own integers in a call that has a cache too: they may
        say which layers of the cache are meant."""
        kinds = integer_kinds(self.template)
        return tuple(at for at, kind in enumerate(kinds) if kind == "int" and "cache" in kinds)


class SpecTable(dict[TreeSpec, InternedSpec]):
    """The InternedSpec of each template: the same object for equal templates."""

    def __missing__(self, template: TreeSpec) -> InternedSpec:
        self[template] = InternedSpec(template)
        return self[template]


@dataclass
class NewCall:
    """A call of a form that its layer has not been seen with: the reply says what came of it.

    output: what layers of its kind return; None where it has to be asked. fills: the layers of the
    cache that it was counted into, None if that has to be seen first; lengths: their tokens then.
    hidden: the hidden state that it was given, if it is asked.
    """

    layer: CalledLayer
    output: TreeSpec | None
    fills: tuple[int, ...] | None
    counts_by_pass: bool | None
    hidden: torch.Tensor | None = None
    lengths: dict[int, int] = field(default_factory=dict)


class LayerRun:
    """One set of arguments, given to layer after layer with the hidden state of the one before.

    slots: of the tensors that the first layer is given. The hidden states themselves are not kept,
    so that those which nobody else holds need not be sent here.
    """

    def __init__(
        self, spec: InternedSpec, leaves: Leaves, slots: tuple[int, ...], args: Any, kwargs: Any
    ):
        self.spec, self.slots = spec, slots
        self.ints, self.caches = leaves.ints, leaves.caches
        self.layers: list[CalledLayer] = []
        self.hidden_slots: list[int] = []  # of the hidden state that each further layer is given
        self.numbers = tuple([leaves.ints[at] for at in spec.numbers_at])
        self.new: dict[int, NewCall] = {}  # by the position of the layer
        if spec.has_reusable_arguments:
            self.tensors = leaves.tensors[1:]
            self._held = (args[1:], kwargs)  # so that nothing else takes their identity
            self.identities = _identities(args, kwargs)

    def is_continued_by(self, args: Any, kwargs: Any) -> bool:
        """True if these are the same arguments, except the hidden state."""
        return self.spec.has_reusable_arguments and _identities(args, kwargs) == self.identities

    def fills_of(self, layer: CalledLayer) -> tuple[int, ...] | None:
        """The layers of a cache that a layer fills in this run, None if that is not known."""
        return layer.fills.get((self.spec, self.numbers)) if self.numbers else layer.cache_layers

    def slots_by_layer(self) -> list[tuple[int, ...]]:
        return [self.slots, *((hidden, *self.slots[1:]) for hidden in self.hidden_slots)]

    def key(self) -> tuple[Any, ...]:
        layers, hidden_slots = tuple(self.layers), tuple(self.hidden_slots)
        new = tuple([(at, new.output) for at, new in self.new.items()])
        return self.spec, self.slots, layers, hidden_slots, new


def _identities(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Of all arguments but the first."""
    return [*map(id, args[1:]), *kwargs, *map(id, kwargs.values())]
