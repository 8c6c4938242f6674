"""The master's end of the ring: remote layers are called here, and run where they live.

A remote layer answers at once with a lazy hidden state, so the calls of one forward pass gather in
a chain and go round the ring together when something looks at the result. Only the first call of a
layer with arguments of a new shape of template waits, to learn what the layer returns.
"""

from __future__ import annotations

import inspect
import itertools
import json
import operator
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn

from .errors import InferenceError, StageError
from .frames import Kind, Message
from .lazy import Lazy, Withheld, fetched
from .mirror import advance, number_of
from .program import Program, Step
from .ring import Ring
from .values import Leaves, Template, flatten, frozen, kinds_of_new, leaves_of, rebuild

T = TypeVar("T")
Maker = tuple[str, int]
"""A module, and which of its new tensors."""

TRIALS = 2
"""So often a tensor of unknown use is sent to the master before it is left where it is."""


class Session:
    """One distributed model as its master sees it; safe to use from several threads."""

    def __init__(self, ring: Ring, device: torch.device):
        self.ring, self.device, self.habits = ring, device, Habits()
        self.outputs: dict[tuple[str, Form], Template] = {}
        self._forms: dict[Template, Form] = {}
        self._programs: dict[tuple[Any, ...], tuple[Program, int]] = {}
        self._program_numbers, self._cache_numbers = itertools.count(1), itertools.count(1)
        self._operations: deque[tuple[Any, ...]] = deque()
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._tickets: deque[Ticket] = deque()
        self._threads = threading.local()
        self._failure: InferenceError | None = None

    @property
    def chain(self) -> Chain:
        """The calls of this thread that have not been sent."""
        chain: Chain | None = getattr(self._threads, "chain", None)
        if chain is None or chain.sent:
            chain = self._threads.chain = Chain(self)
        return chain

    def record(self, name: str, *arguments: Any) -> None:
        """Note an operation on a cache: sent before the next call, after those gathered."""
        self.chain.flush()
        kept = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        self._operations.append((name, *kept))

    def forget(self, number: int) -> None:
        self._operations.append(("free", number))

    def next_cache(self) -> int:
        return next(self._cache_numbers)

    def form(self, template: Template) -> Form:
        """The one Form of a template, which is quick to compare and to hash."""
        form = self._forms.get(template)
        if form is None:
            form = self._forms[template] = Form(template)
        return form

    def exchange(self, chain: Chain) -> Message:
        """Send a chain, and the operations that wait, round the ring; what comes back."""
        ticket = Ticket()
        leaves = Leaves()
        with self._sending, torch.no_grad():
            if self._failure is not None:
                raise self._failure
            waiting = [self._operations.popleft() for _ in range(len(self._operations))]
            operations = flatten(waiting, leaves, lambda cache: number_of(cache, self))
            message = self._message(chain, self.form(operations), leaves)
            self._tickets.append(ticket)
            self._guarded(lambda: self.ring.send(message))
        reply = self._answer(ticket, chain)
        reply.tensors = reply.tensors[len(leaves.tensors) :]
        return reply

    def _message(self, chain: Chain, operations: Form, leaves: Leaves) -> Message:
        """What a chain sends; with the text of its program if the ranks do not know it yet."""
        starts, ints = chain.place_ints(leaves.ints)
        key = (operations, len(leaves.tensors), *chain.key(starts))
        text = ""
        if key not in self._programs:
            program = chain.program(operations.template, len(leaves.tensors), starts)
            self._programs[key] = program, next(self._program_numbers)
            text = program.to_json()
        program, number = self._programs[key]
        tensors = [*leaves.tensors, *chain.inputs.tensors]
        sent = [tensors[slot] for slot in program.leaving(0)]
        return Message(Kind.CALL, number, ints, sent, text)

    def _answer(self, ticket: Ticket, chain: Chain) -> Message:
        """The reply to a message: they come in the order in which the messages were sent.

        Whichever thread is here first takes in the replies of those before it too, so that while
        one waits others can send, and the ranks work on several conversations at once.
        """
        with self._receiving:
            while ticket.reply is None:
                reply = self._guarded(self.ring.receive)
                self._tickets.popleft().reply = reply
        if ticket.reply.kind is Kind.ERROR:
            for call in chain.calls:
                for cache in call.leaves.caches:
                    cache.torn = True
            raise StageError(ticket.reply.note)
        return ticket.reply

    def _guarded(self, work: Callable[[], T]) -> T:
        """Use the ring; if a rank is lost, this is the end of it for every thread."""
        try:
            if self._failure is not None:
                raise self._failure
            return work()
        except InferenceError as lost:
            if self._failure is None:
                self._failure = lost
                self.ring.close()
            raise

    def leave(self, code: int = 0) -> None:
        """Release the other ranks. Every later use of the model is an error."""
        with self._sending, self._receiving:
            if self._failure is None:
                self._failure = InferenceError(
                    f"rank {self.ring.rank}: the model was closed and its other ranks have left, "
                    "so it cannot run; load it again."
                )
                self.ring.leave(code)


class Ticket:
    """A place in the queue of those who wait for a reply."""

    reply: Message | None = None


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

    def flush(self) -> Message | None:
        """Run the calls; every hidden state that somebody still holds gets its value."""
        if self.sent or not self.calls:
            return None
        self.sent = True
        waiting = [lazy for lazy in (ref() for ref in self.outputs) if self._is_wanted(lazy)]
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
        starts = []
        for call in self.calls:
            start = places.setdefault(tuple(call.leaves.ints), len(ints))
            if start == len(ints):
                ints.extend(call.leaves.ints)
            starts.append(start)
        return starts, ints

    def key(self, starts: list[int]) -> tuple[Any, ...]:
        """Equal for chains with the same program."""
        calls = [
            (call.layer.name, call.form, call.slots, call.output is None) for call in self.calls
        ]
        return len(self.inputs.tensors), self.returns, tuple(starts), tuple(calls)

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
        """Whether the same objects are sure to give the same template again.

        The first tensor, in which the calls of a stack of layers differ, must be the first argument
        and nothing else, and there must be nothing inside that could have been changed.
        """
        _, args, kwargs = self.template
        rest = [*args[2:], *(item for _, item in kwargs[1:])]
        kinds = {leaf for item in rest for leaf in leaves_of(item)}
        is_fixed = not kinds & {("list",), ("dict",), ("shared",), ("tensor", 0)}
        return args[1:2] == (("tensor", 0),) and is_fixed


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
        self.output = layer.session.outputs.get((layer.name, form))

    def is_repeated_by(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether these are the same arguments but for the hidden state."""
        old_args, old_kwargs = self.arguments
        return (
            len(args) == len(old_args)
            and kwargs.keys() == old_kwargs.keys()
            and all(map(operator.is_, args[1:], old_args[1:]))
            and all(value is old_kwargs[key] for key, value in kwargs.items())
            and self.form.is_repeatable
        )


class RemoteModule:
    """Stands in for the forward of a module that another rank holds."""

    def __init__(self, session: Session, name: str, module: nn.Module, rank: int):
        self.session, self.name, self.rank = session, name, rank
        self.cache_layers = _cache_layers(module)
        self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._repeated(args, kwargs) or self._call(args, kwargs)
        chain, leaves = self.session.chain, call.leaves
        chain.calls.append(call)
        result = self._result(chain, call, leaves)
        if leaves.tensors:
            for cache in leaves.caches[:1]:
                advance(cache, self.cache_layers, leaves.tensors[0])
        return result

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        leaves = Leaves()
        template = flatten([args, kwargs], leaves, lambda cache: number_of(cache, self.session))
        chain = self.session.chain
        if chain.calls and chain.calls[-1].layer.rank > self.rank:
            chain.flush()  # it has passed this rank already
            chain = self.session.chain
        slots = tuple([chain.slot(tensor) for tensor in leaves.tensors])
        return Call(self, (args, kwargs), self.session.form(template), leaves, slots)

    def _repeated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The call if it is like the last one of the chain but for the hidden state."""
        chain = self.session.chain
        if not chain.calls or not args or getattr(args[0], "source", None) is not chain:
            return None
        last = chain.calls[-1]
        if last.layer.rank > self.rank or not last.is_repeated_by(args, kwargs):
            return None
        old, hidden = last.leaves, args[0]
        leaves = Leaves(old.ints, [hidden, *old.tensors[1:]], old.caches)
        return Call(self, (args, kwargs), last.form, leaves, (~hidden.slot, *last.slots[1:]))

    def _result(self, chain: Chain, call: Call, leaves: Leaves) -> Any:
        """What the layer returns, after putting what it wrote into dicts that layers share."""
        new = self._learn(chain, call) if call.output is None else self._later(chain, call, leaves)
        output = self.session.outputs[(self.name, call.form)]
        value, *written = rebuild(output, leaves.tensors, iter(new), leaves.caches)
        for shared, changes in zip(leaves.shared, written, strict=True):
            shared.update(changes)
        return value

    def _learn(self, chain: Chain, call: Call) -> list[torch.Tensor]:
        """Run the call now, for its output and the description of it."""
        reply = chain.flush()
        assert reply is not None
        self.session.outputs[(self.name, call.form)] = frozen(json.loads(reply.note))
        return [tensor.to(self.session.device) for tensor in reply.tensors]

    def _later(self, chain: Chain, call: Call, leaves: Leaves) -> list[Lazy]:
        hidden = leaves.tensors[0] if leaves.tensors else torch.empty(0)
        kinds = enumerate(kinds_of_new(call.output))
        return [chain.lazy(kind, (self.name, number), hidden) for number, kind in kinds]

    def __deepcopy__(self, memo: Any) -> RemoteModule:
        return self


def _cache_layers(module: nn.Module) -> tuple[int, ...]:
    """The layers of the cache that a module fills: those that its attention says are its own."""
    numbers = {getattr(child, "layer_idx", None) for child in module.modules()}
    return tuple(sorted(number for number in numbers if isinstance(number, int)))
