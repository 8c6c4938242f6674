"""The route of one message round the ring: which rank calls which layer, and which tensors go on.

Every rank derives from the same program what arrives, what it does and what it passes on, so a
message itself is only numbers and tensors.
"""

from __future__ import annotations

import bisect
import itertools
import json
from dataclasses import dataclass
from functools import cached_property

from drumline.core.pytree import TreeSpec, as_tuples, has_reusable_arguments, new_tensor_kinds

NOTHING: TreeSpec = ("list",)
"""The operations of a program that has none."""


@dataclass(frozen=True)
class StageStep:
    """One layer called on one rank.

    `slots` are the tensors it is given: those the master sent first, then the new ones that earlier
    steps put out. `ints_at` is where its integers begin. `output` describes what it must return, or
    is None where that is to be found out and everything it returns sent back. `is_new`: the master
    is to be told which layers of a cache it fills, as this is its first such call.
    """

    rank: int
    module: str
    arguments: TreeSpec
    slots: tuple[int, ...]
    ints_at: int
    output: TreeSpec | None
    is_new: bool

    def repeats(self, last: StageStep) -> bool:
        """True if all arguments but the first, the hidden state, are those of `last`."""
        return (
            self.arguments == last.arguments
            and self.slots[1:] == last.slots[1:]
            and self.ints_at == last.ints_at
            and has_reusable_arguments(self.arguments)
        )


@dataclass(frozen=True)
class Program:
    """Operations on caches for every rank, then steps; `returns` are the slots the master wants.

    The first `num_operands` slots belong to the operations and visit every rank.
    """

    operations: TreeSpec
    num_operands: int
    num_inputs: int
    steps: tuple[StageStep, ...]
    returns: tuple[int, ...]

    # Slots number the tensors of a pass: the operands of operations, the other inputs of the
    # master, and what the steps put out, in their order. Every rank counts the same, so a message
    # holds tensors in the order of their slots, and no names.
    def leaving(self, rank: int) -> tuple[int, ...]:
        """The slots that `rank` passes on, in the order they travel."""
        needed = {*range(self.num_operands), *self.returns}
        needed.update(slot for step in self.steps if step.rank > rank for slot in step.slots)
        return tuple(sorted(slot for slot in needed if self._made_by(slot) <= rank))

    @cached_property
    def outputs_at(self) -> list[int]:
        """The slot of each step's first new tensor, and the first slot after all of them."""
        slots = [self.num_inputs]
        for step in self.steps:
            slots.append(slots[-1] + (len(new_tensor_kinds(step.output)) if step.output else 0))
        return slots

    def _made_by(self, slot: int) -> int:
        if slot < self.num_inputs:
            return 0
        return self.steps[bisect.bisect_right(self.outputs_at, slot) - 1].rank

    def to_json(self) -> str:
        steps = [list(vars(step).values()) for step in self.steps]
        counts = [self.num_operands, self.num_inputs]
        return json.dumps([self.operations, counts, steps, self.returns])

    @classmethod
    def from_json(cls, text: str) -> Program:
        operations, counts, steps, returns = (as_tuples(part) for part in json.loads(text))
        num_operands, num_inputs = counts
        route = tuple(StageStep(*step) for step in steps)
        return cls(operations, num_operands, num_inputs, route, returns)


class StageRoute:
    """A program as one rank sees it."""

    def __init__(self, program: Program, rank: int):
        self.program = program
        self.arriving, self.leaving = program.leaving(rank - 1), program.leaving(rank)
        made = itertools.pairwise(program.outputs_at)
        own = [pair for pair in zip(program.steps, made, strict=True) if pair[0].rank == rank]
        needed = {*self.leaving}
        # A step, the slot of its first new tensor, whether it repeats the one before, and the slots
        # that nothing here needs after it.
        self.steps: list[tuple[StageStep, int, bool, set[int]]] = []
        for at, (step, slots) in reversed([*enumerate(own)]):
            done = {*range(*slots), *step.slots} - needed
            needed |= done
            repeats = at > 0 and step.repeats(own[at - 1][0])
            self.steps.insert(0, (step, slots[0], repeats, done))
