"""One call of a communicator after the other, each compared with the plain answer.

trial = Trial(comm, (67,), torch.float32, "sum")
problem = trial.allreduce((67,))        # "" if all is well
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from communicator.base import Communicator
from communicator.conformance.test_data import Sample, Shape

GARBAGE = 0xA5  # what is in a tensor that nobody has written
Check = Callable[[], str]


class Trial:
    """Calls on tensors of up to numel elements, of all rows together where a call takes rows.

    A method returns what is wrong, in words. It always makes all its calls: a rank that stopped at
    its first problem would leave the others alone in the next call.
    """

    def __init__(
        self,
        comm: Communicator,
        numel: int,
        dtype: torch.dtype = torch.float32,
        op: str = "sum",
        seed: int = 0,
    ) -> None:
        self.comm, self.dtype, self.op, self._seed = comm, dtype, op, seed
        self._numel = numel

    @cached_property
    def numbers(self) -> Sample:
        return Sample(self.comm.world_size, self._numel, self.dtype, self.op, self._seed)

    @cached_property
    def bits(self) -> Sample:
        return Sample(self.comm.world_size, self._numel, self.dtype, seed=self._seed)

    def prepare(self) -> None:
        """Make the values and answers now, so that ranks are late only where they are to be."""
        self.numbers.total((0,))
        self.bits.part(0, (0,))

    def mine(self, sample: Sample, shape: Shape) -> torch.Tensor:
        return sample.part(self.comm.rank, shape).to(self.comm.device)

    def blank(self, shape: Shape) -> torch.Tensor:
        """A tensor to write into, of which no element is right by chance."""
        numel = torch.Size(shape).numel()
        value = 1 if self.dtype == torch.bool else GARBAGE
        memory = torch.full((numel * self.dtype.itemsize,), value, dtype=torch.uint8)
        return memory.view(self.dtype).reshape(shape).to(self.comm.device)

    def everyones(self, shape: Shape) -> torch.Tensor:
        """What allgather of the bits must give."""
        return torch.stack([self.bits.part(rank, shape) for rank in range(self.comm.world_size)])

    def plain_answers(self, shape: Shape) -> dict[str, Callable[[torch.Tensor, str], str]]:
        """By call of the numbers: says what is wrong with what came of it."""
        numbers, world = self.numbers, range(self.comm.world_size)
        total, parts = numbers.total(shape), [numbers.part(rank, shape) for rank in world]
        crossed = torch.stack([part[self.comm.rank] for part in parts])
        return {
            "allreduce": lambda found, what: numbers.wrong(found, total, what),
            "broadcast": lambda found, what: differs(found, parts[0], what),
            "allgather": lambda found, what: differs(found, torch.stack(parts), what),
            "reduce_scatter": lambda found, what: self._wrong_row(found, shape[1:], what),
            "alltoall": lambda found, what: differs(found, crossed, what),
        }

    def _rows(self, shape: Shape) -> Shape:
        return (self.comm.world_size, *shape)

    # One call each, in every form it has.

    def allreduce(self, shape: Shape) -> str:
        return self.begin("allreduce", shape)()

    def allreduce_out(self, shape: Shape) -> str:
        tensor, out = self.mine(self.numbers, shape), self.blank(shape)
        before = tensor.clone()
        returned = self.comm.allreduce(tensor, self.op, out=out)
        wrong = self.numbers.wrong(out, self.numbers.total(shape), "allreduce(out=)")
        kept = differs(tensor, before, "the input of allreduce(out=)")
        return first([_same(returned, out, "allreduce(out=)", "out"), wrong, kept])

    def broadcast(self, shape: Shape, src: int = 0) -> str:
        return self.begin("broadcast", shape, src)()

    def reduce(self, shape: Shape, dst: int = 0) -> str:
        tensor = self.mine(self.numbers, shape)
        before = tensor.clone()
        returned = self.comm.reduce(tensor, dst, self.op)
        if self.comm.rank == dst:
            total = self.numbers.total(shape)
            wrong = self.numbers.wrong(tensor, total, f"reduce {self.op} to rank {dst}")
        else:
            wrong = differs(tensor, before, f"on another rank reduce to rank {dst}")
        return first([_same(returned, tensor, "reduce", "the tensor it was given"), wrong])

    def allgather(self, shape: Shape) -> str:
        found = self.begin("allgather", shape)()
        tensor, out = self.mine(self.bits, shape), self.blank(self._rows(shape))
        returned = self.comm.allgather(tensor, out=out)
        wrong = differs(out, self.everyones(shape), f"allgather(out=) of {shape}")
        return first([found, _same(returned, out, "allgather(out=)", "out"), wrong])

    def reduce_scatter(self, shape: Shape) -> str:
        found = self.begin("reduce_scatter", shape)()
        tensor, out = self.mine(self.numbers, self._rows(shape)), self.blank(shape)
        before = tensor.clone()
        returned = self.comm.reduce_scatter(tensor, self.op, out=out)
        wrong = self._wrong_row(out, shape, "reduce_scatter(out=)")
        kept = differs(tensor, before, "the input of reduce_scatter(out=)")
        return first([found, _same(returned, out, "reduce_scatter(out=)", "out"), wrong, kept])

    def alltoall(self, shape: Shape) -> str:
        found = self.begin("alltoall", shape)()
        tensor, out = self.mine(self.bits, self._rows(shape)), self.blank(self._rows(shape))
        before = tensor.clone()
        returned = self.comm.alltoall(tensor, out=out)
        wrong = differs(out, self._crossed(shape), f"alltoall(out=) of {shape}")
        kept = differs(tensor, before, "the input of alltoall(out=)")
        return first([found, _same(returned, out, "alltoall(out=)", "out"), wrong, kept])

    def ring(self, shape: Shape) -> str:
        """Everyone sends to the next and receives from the one before, at once."""
        world, rank = self.comm.world_size, self.comm.rank
        if world == 1:
            return ""
        found, before = self.blank(shape), (rank - 1) % world
        with self.comm.group():
            self.comm.send(self.mine(self.bits, shape), (rank + 1) % world)
            self.comm.recv(found, before)
        return differs(found, self.bits.part(before, shape), f"recv of {shape} in a ring")

    # One call, and how to look at it, which may be later.

    def begin(self, name: str, shape: Shape, src: int = 0) -> Check:
        begin: Callable[..., Check] = getattr(self, f"_begin_{name}")
        return begin(shape, src)

    def _begin_allreduce(self, shape: Shape, _: int) -> Check:
        tensor = self.mine(self.numbers, shape)
        returned = self.comm.allreduce(tensor, self.op)
        same = _same(returned, tensor, "allreduce", "the tensor it was given")
        total = self.numbers.total(shape)
        return lambda: same or self.numbers.wrong(tensor, total, f"allreduce {self.op}")

    def _begin_broadcast(self, shape: Shape, src: int) -> Check:
        tensor = self.mine(self.bits, shape)
        returned = self.comm.broadcast(tensor, src)
        same = _same(returned, tensor, "broadcast", "the tensor it was given")
        what = f"broadcast of {shape} from rank {src}"
        return lambda: same or differs(tensor, self.bits.part(src, shape), what)

    def _begin_allgather(self, shape: Shape, _: int) -> Check:
        found = self.comm.allgather(self.mine(self.bits, shape))
        return lambda: differs(found, self.everyones(shape), f"allgather of {shape}")

    def _begin_reduce_scatter(self, shape: Shape, _: int) -> Check:
        found = self.comm.reduce_scatter(self.mine(self.numbers, self._rows(shape)), self.op)
        return lambda: self._wrong_row(found, shape, f"reduce_scatter {self.op}")

    def _begin_alltoall(self, shape: Shape, _: int) -> Check:
        found = self.comm.alltoall(self.mine(self.bits, self._rows(shape)))
        return lambda: differs(found, self._crossed(shape), f"alltoall of {shape}")

    def _wrong_row(self, row: torch.Tensor, shape: Shape, what: str) -> str:
        rank = self.comm.rank
        total = self.numbers.total(self._rows(shape))[rank]
        return self.numbers.wrong(row, total, what, rank * total.numel())

    def _crossed(self, shape: Shape) -> torch.Tensor:
        rows = [
            self.bits.part(src, self._rows(shape))[self.comm.rank]
            for src in range(self.comm.world_size)
        ]
        return torch.stack(rows)


def first(problems: list[str]) -> str:
    """The first problem of a list. The list is made whole before: see Trial."""
    return next((problem for problem in problems if problem), "")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def differs(found: torch.Tensor, expected: torch.Tensor, what: str) -> str:
    """Compared as bytes: nothing may change on the way."""
    found, expected = found.cpu(), expected.cpu()
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{what}: {tuple(found.shape)} {found.dtype}, expected {tuple(expected.shape)}"
    same = raw(found) == raw(expected)
    if bool(same.all()):
        return ""
    bad = int((~same).nonzero()[0])
    near = slice(bad, bad + 16)
    return (
        f"{what}: from byte {bad} on {raw(found)[near].tolist()} arrived, expected "
        f"{raw(expected)[near].tolist()}"
    )


def _same(returned: object, wanted: torch.Tensor, call: str, what: str) -> str:
    return "" if returned is wanted else f"{call} did not return {what}"
