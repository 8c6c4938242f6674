"""The master's end of the ring: what its threads send, and the replies that come round to them."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from inference.chain import Chain, Form, Habits
from inference.errors import InferenceError, StageError
from inference.frames import Kind, Message
from inference.mirror import number_of
from inference.program import Program
from inference.ring import Ring
from inference.values import Leaves, Template, flatten

T = TypeVar("T")


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
