"""The master's end of the ring: what its threads send, and the replies that come round to them."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from drumline.core.pytree import Leaves, TreeSpec, flatten
from drumline.errors import DrumlineError, PeerLost, StageError
from drumline.kv_cache.proxy import cache_number
from drumline.pipeline.deferred_calls import Chain, Form, Habits
from drumline.pipeline.interrupt import Uninterrupted
from drumline.pipeline.microbatch_runner import Relay
from drumline.stages.messages import Kind, Message
from drumline.stages.program import NOTHING, Program
from drumline.stages.ring import Ring

if TYPE_CHECKING:
    from drumline.stages.tp_stage import Driver

T = TypeVar("T")


class Session:
    """One distributed model as its master sees it; safe to use from several threads."""

    def __init__(self, ring: Ring | Driver, device: torch.device):
        self.ring, self.device, self.habits = ring, device, Habits()
        self._forms: dict[TreeSpec, Form] = {}
        self._no_operations = self.form(NOTHING)
        self._programs: dict[tuple[Any, ...], tuple[Program, int]] = {}
        self._program_numbers, self._cache_numbers = itertools.count(1), itertools.count(1)
        self._operations: deque[tuple[Any, ...]] = deque()
        self._sending, self._arrival = threading.Lock(), threading.Condition()
        self._tickets: deque[Ticket] = deque()
        self._is_listening = self._is_out_of_step = False
        self.relay = Relay()
        self._threads = threading.local()
        self._failure: DrumlineError | None = None
        # Why a pass was refused that had begun to change the layers.
        self.half_changed: DrumlineError | None = None

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

    def note_pass(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Remember what a model of this thread is called with, see `rows_and_tokens`."""
        if self.half_changed is not None:
            raise DrumlineError(
                f"{self.half_changed} A pass that began with it has changed the layers before "
                "this one already, so load the model again."
            )
        if "output_hidden_states" in kwargs:
            self._threads.is_for_states = bool(kwargs["output_hidden_states"])
        for given in (*args[:1], kwargs.get("inputs_embeds"), kwargs.get("input_ids")):
            if isinstance(given, torch.Tensor) and given.dim() in (2, 3):
                self._threads.shape = given.shape[0], given.shape[1]

    @property
    def shape_of_pass(self) -> tuple[int, int] | None:
        """Rows and tokens of the pass that this thread is in, if it is in one."""
        return getattr(self._threads, "shape", None)

    @property
    def is_for_states(self) -> bool:
        """Whether this thread last asked for hidden states, and so looks at more than otherwise."""
        return getattr(self._threads, "is_for_states", False)

    def rows_and_tokens(self) -> tuple[int, int]:
        """The same, where a hidden state does not show them."""
        shape = self.shape_of_pass
        if shape is None:
            raise DrumlineError(
                "rank 0: a layer was called with a hidden state of more than three axes, outside "
                "of its model, so its tokens cannot be told from its streams; call the model."
            )
        return shape

    def form(self, template: TreeSpec) -> Form:
        """The one Form of a template, which is quick to compare and to hash."""
        form = self._forms.get(template)
        if form is None:
            form = self._forms[template] = Form(template)
        return form

    def exchange(self, chain: Chain) -> Message:
        """Send a chain, and the operations that wait, round the ring; what comes back."""
        try:
            with Uninterrupted():
                return self._exchange(chain)
        except (KeyboardInterrupt, SystemExit):
            _tear(chain)  # what follows these layers will not get their tokens
            raise

    def _exchange(self, chain: Chain) -> Message:
        ticket, leaves, runner = Ticket(), Leaves(), None
        try:
            with self._sending:
                if self._failure is not None:
                    raise self._failure
                if self._is_out_of_step:
                    self._fall_in()
                message = self._message(chain, self._operations_now(leaves), leaves)
                self._tickets.append(ticket)
                runner = self.relay.let_go(chain.last_layer)
                ticket.reply = self._guarded(lambda: self.ring.send(message))
                if ticket.reply is not None:
                    self._tickets.remove(ticket)
            chain.prepare_next_token()
            reply = self._answer(ticket, chain)
        except (KeyboardInterrupt, SystemExit):
            self._is_out_of_step = True  # nobody knows whether it was sent, or had come back
            raise
        finally:
            self.relay.take_back(runner)
        reply.tensors = reply.tensors[len(leaves.tensors) :]
        return reply

    def _operations_now(self, leaves: Leaves) -> Form:
        """The operations on caches that wait for the next message."""
        if not self._operations:
            return self._no_operations
        waiting = [self._operations.popleft() for _ in range(len(self._operations))]
        return self.form(flatten(waiting, leaves, lambda cache: cache_number(cache, self)))

    def _message(self, chain: Chain, operations: Form, leaves: Leaves) -> Message:
        """What a chain sends; with the text of its program if the ranks do not know it yet."""
        starts, ints = chain.place_ints(leaves.ints)
        key = (operations, len(leaves.tensors), chain.key(starts))
        text = ""
        known = self._programs.get(key)
        if known is None:
            program = chain.program(operations.template, len(leaves.tensors), starts)
            known = self._programs[key] = program, next(self._program_numbers)
            text = program.to_json()
        program, number = known
        tensors = leaves.tensors + chain.inputs.tensors
        sent = [tensors[slot] for slot in program.leaving(0)]
        return Message(Kind.CALL, number, ints, sent, text)

    def _answer(self, ticket: Ticket, chain: Chain) -> Message:
        with self._arrival:
            while ticket.reply is None:
                if self._is_listening:
                    self._arrival.wait()
                else:
                    self._listen()
        if ticket.reply.kind is Kind.ERROR:
            _tear(chain)
            raise StageError(ticket.reply.note)
        return ticket.reply

    def _listen(self) -> None:
        """Take in the next reply, whosever it is: they come in the order of what was sent.

        One thread listens for all, and the lock is free meanwhile, so that others can go on as soon
        as theirs is here, and the ranks work on several conversations at once.
        """
        self._is_listening = True
        self._arrival.release()
        try:
            reply = self._guarded(self._received)
            if reply.kind is Kind.MARK:
                self._give_up_tickets()
            else:
                self._tickets.popleft().reply = reply
        finally:
            self._arrival.acquire()
            self._is_listening = False
            self._arrival.notify_all()

    def _received(self) -> Message:
        message = self.ring.receive()
        if message.kind is Kind.LOST:
            raise PeerLost(message.note)
        return message

    def _fall_in(self) -> None:
        """After an interruption: wait until all that was sent has come back, whosever it was."""
        self._guarded(lambda: self.ring.send(Message(Kind.MARK)))
        with self._arrival:
            while self._is_out_of_step:
                self._arrival.wait() if self._is_listening else self._listen()

    def _give_up_tickets(self) -> None:
        for ticket in self._tickets:
            ticket.reply = Message(
                Kind.ERROR, note="another thread's call was interrupted; repeat."
            )
        self._tickets.clear()
        self._is_out_of_step = False

    def _guarded(self, work: Callable[[], T]) -> T:
        """Use the ring; if a rank is lost, this is the end of it for every thread."""
        try:
            if self._failure is not None:
                raise self._failure
            return work()
        except DrumlineError as lost:
            if self._failure is None:
                self._failure = lost
                self.ring.close(lost)
            raise

    def leave(self, code: int = 0) -> None:
        """Release the other ranks. Every later use of the model is an error."""
        with Uninterrupted(), self._sending:
            if self._failure is None and self._is_out_of_step:
                with contextlib.suppress(DrumlineError):
                    self._fall_in()
            if self._failure is None:
                self._failure = DrumlineError(
                    f"rank {self.ring.rank}: the model was closed and its other ranks have left, "
                    "so it cannot run; load it again."
                )
                with self._arrival:
                    while self._is_listening:
                        self._arrival.wait()
                    self.ring.leave(code)


def _tear(chain: Chain) -> None:
    """Its layers no longer hold the same tokens in the caches that it was given."""
    for run in chain.runs:
        for cache in run.caches:
            cache.is_inconsistent = True


class Ticket:
    """A place in the queue of those who wait for a reply."""

    reply: Message | None = None
