"""Calls of remote layers, gathered until something looks at a result, then sent together."""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from inference.frames import Message
from inference.lazy import Lazy, Withheld, fetched
from inference.program import Program, Step
from inference.values import Leaves, Template, is_repeatable

if TYPE_CHECKING:
    from inference.remote import RemoteModule
    from inference.session import Session

Maker = tuple[str, int]
"""A module, and which of its new tensors."""

TRIALS = 2
"""So often a tensor of unknown use is sent to the master before it is left where it is."""


class Chain:
    """Calls gathered by one thread, in order, and the lazy tensors they will put out."""

    def __init__(self, session: Session):
        self.session, self.sent = session, False
        self.calls: list[Call] = []
        self.outputs: list[weakref.ref[Lazy]] = []
        self.makers: list[Maker] = []
        self.inputs = Leaves()

    def slot(self, tensor: torch.Tensor) -> int:
        """An input's position, or ~n for the n-th output of the calls so far."""
        if isinstance(tensor, Lazy) and tensor.source is self:
            return ~tensor.slot
        return self.inputs.tensor(fetched(tensor))

    def lazy(self, kind: str, maker: Maker, hidden: torch.Tensor) -> Lazy:
        """The next tensor that the last call will put out; `hidden` is like it or on its device."""
        lazy = (Lazy if kind == "hidden" else Withheld).like(hidden, self, len(self.outputs))
        self.outputs.append(weakref.ref(lazy))
        self.makers.append(maker)
        return lazy

    def repeated(self, layer: RemoteModule, args: Any, kwargs: Any) -> Call | None:
        """The call if it is like the last one but for the hidden state, which that one put out."""
        if not self.calls or not args or self.sent:
            return None
        last, hidden = self.calls[-1], args[0]
        if getattr(hidden, "source", None) is not self or last.layer.rank > layer.rank:
            return None
        return last.repeat(layer, args, kwargs) if last.is_repeated_by(args, kwargs) else None

    def flush(self) -> Message | None:
        """Run the calls; every hidden state that somebody still holds gets its value."""
        if self.sent or not self.calls:
            return None
        self.sent = True
        alive = [ref() for ref in self.outputs]
        waiting = [lazy for lazy in alive if type(lazy) is Lazy or self._is_wanted(lazy)]
        self.returns = tuple(lazy.slot for lazy in waiting)
        try:
            reply = self.session.exchange(self)
        finally:
            self.calls, self.inputs = [], Leaves()  # lets go of the caches
        for lazy, value in zip(waiting, reply.tensors, strict=False):
            lazy.value = value.to(lazy.home)
        reply.tensors = reply.tensors[len(waiting) :]
        return reply

    def _is_wanted(self, lazy: Lazy | None) -> TypeGuard[Lazy]:
        if type(lazy) is not Withheld:
            return lazy is not None
        return self.session.habits.is_wanted(self.makers[lazy.slot])

    def touched(self, slot: int) -> None:
        self.session.habits.looked_at.add(self.makers[slot])

    def place_ints(self, before: list[int]) -> tuple[list[int], list[int]]:
        """Where each call's integers begin, and all integers; calls with the same share them."""
        ints = list(before)
        places: dict[tuple[int, ...], int] = {}
        starts: list[int] = []
        last: list[int] | None = None
        for call in self.calls:
            if call.leaves.ints is not last:
                last = call.leaves.ints
                start = places.setdefault(tuple(last), len(ints))
                if start == len(ints):
                    ints.extend(last)
            starts.append(start)
        return starts, ints

    def key(self, starts: list[int]) -> tuple[Any, ...]:
        """Equal for chains with the same program."""
        calls = tuple([call.key for call in self.calls])
        return len(self.inputs.tensors), self.returns, tuple(starts), calls

    def program(self, operations: Template, num_operands: int, starts: list[int]) -> Program:
        num_inputs = num_operands + len(self.inputs.tensors)
        steps = []
        for call, start in zip(self.calls, starts, strict=True):
            slots = tuple(num_operands + s if s >= 0 else num_inputs + ~s for s in call.slots)
            layer, template = call.layer, call.form.template
            steps.append(Step(layer.rank, layer.name, template, slots, start, call.output))
        returns = tuple(num_inputs + position for position in self.returns)
        return Program(operations, num_operands, num_inputs, tuple(steps), returns)


class Habits:
    """Which tensors of layers, besides hidden states, the master looks at: the others stay away."""

    def __init__(self) -> None:
        self.looked_at: set[Maker] = set()
        self.returned: Counter[Maker] = Counter()

    def is_wanted(self, maker: Maker) -> bool:
        self.returned[maker] += 1
        return maker in self.looked_at or self.returned[maker] <= TRIALS


class Form:
    """A template, compared by identity."""

    def __init__(self, template: Template):
        self.template = template

    @cached_property
    def is_repeatable(self) -> bool:
        return is_repeatable(self.template)


class Call:
    """One layer called with one set of arguments."""

    def __init__(
        self,
        layer: RemoteModule,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        form: Form,
        leaves: Leaves,
        slots: tuple[int, ...],
    ):
        self.layer, self.arguments, self.form = layer, arguments, form
        self.leaves, self.slots = leaves, slots
        self.output = layer.outputs.get(form)
        self.key = (layer, form, slots, self.output is None)

    def repeat(self, layer: RemoteModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """This call of another layer, for the hidden state that leads `args`."""
        old, hidden = self.leaves, args[0]
        leaves = Leaves(old.ints, [hidden, *old.tensors[1:]], old.caches)
        slots = (~hidden.slot, *self.slots[1:])
        return Call(layer, (args, kwargs), self.form, leaves, slots)

    def is_repeated_by(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether these are the same arguments but for the hidden state."""
        old_args, old_kwargs = self.arguments
        if len(args) != len(old_args) or kwargs.keys() != old_kwargs.keys():
            return False
        for key, value in kwargs.items():
            if value is not old_kwargs[key]:
                return False
        is_same = len(args) == 1 or all(map(operator.is_, args[1:], old_args[1:]))
        return is_same and self.form.is_repeatable
