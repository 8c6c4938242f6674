"""Calls of a communicator, each result compared with the reference.

tester = CallTester(comm, 67, torch.float32, "sum")
problem = tester.allreduce((67,))        # "" if all is well
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from communicator.communicator import Communicator
from communicator.conformance.test_data import ReferenceData, Shape

GARBAGE = 0xA5  # what is in a tensor that nobody has written
Check = Callable[[], str]


class CallTester:
    """Calls on tensors of up to numel elements, of all rows together where a call takes rows.

    A method returns the first problem in words, or "". It always makes all its calls: a rank that
    stopped at a problem would leave the others alone in the next call.
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
    def numbers(self) -> ReferenceData:
        return ReferenceData(self.comm.world_size, self._numel, self.dtype, self.op, self._seed)

    @cached_property
    def bits(self) -> ReferenceData:
        return ReferenceData(self.comm.world_size, self._numel, self.dtype, seed=self._seed)

    def prepare(self) -> None:
        """Create the data now, so that ranks are late only where they are to be."""
        self.numbers.total((0,))
        self.bits.part(0, (0,))

    def own_input(self, data: ReferenceData, shape: Shape) -> torch.Tensor:
        return data.part(self.comm.rank, shape).to(self.comm.device)

    def blank(self, shape: Shape) -> torch.Tensor:
        """A tensor to write into, of which no element is right by chance."""
        numel = torch.Size(shape).numel()
        value = 1 if self.dtype == torch.bool else GARBAGE
        memory = torch.full((numel * self.dtype.itemsize,), value, dtype=torch.uint8)
        return memory.view(self.dtype).reshape(shape).to(self.comm.device)

    def all_inputs(self, shape: Shape) -> torch.Tensor:
        """The result that allgather of the bits must have."""
        return torch.stack([self.bits.part(rank, shape) for rank in range(self.comm.world_size)])

    def result_checks(self, shape: Shape) -> dict[str, Callable[[torch.Tensor, str], str]]:
        """Functions from a result to its problem, by name of a call with the numbers."""
        numbers, world = self.numbers, range(self.comm.world_size)
        total, parts = numbers.total(shape), [numbers.part(rank, shape) for rank in world]
        crossed = torch.stack([part[self.comm.rank] for part in parts])
        return {
            "allreduce": lambda result, what: numbers.problem(result, total, what),
            "broadcast": lambda result, what: differs(result, parts[0], what),
            "allgather": lambda result, what: differs(result, torch.stack(parts), what),
            "reduce_scatter": lambda result, what: self._wrong_row(result, shape[1:], what),
            "alltoall": lambda result, what: differs(result, crossed, what),
        }

    def _rows(self, shape: Shape) -> Shape:
        return (self.comm.world_size, *shape)

    # Complete tests: one call each, in every form it has.

    def allreduce(self, shape: Shape) -> str:
        return self.begin("allreduce", shape)()

    def allreduce_out(self, shape: Shape) -> str:
        tensor, out = self.own_input(self.numbers, shape), self.blank(shape)
        before = tensor.clone()
        returned = self.comm.allreduce(tensor, self.op, out=out)
        wrong = self.numbers.problem(out, self.numbers.total(shape), "allreduce(out=)")
        kept = differs(tensor, before, "the input of allreduce(out=)")
        return first([_same(returned, out, "allreduce(out=)", "out"), wrong, kept])

    def broadcast(self, shape: Shape, src: int = 0) -> str:
        return self.begin("broadcast", shape, src)()

    def reduce(self, shape: Shape, dst: int = 0) -> str:
        tensor = self.own_input(self.numbers, shape)
        before = tensor.clone()
        returned = self.comm.reduce(tensor, dst, self.op)
        if self.comm.rank == dst:
            total = self.numbers.total(shape)
            wrong = self.numbers.problem(tensor, total, f"reduce {self.op} to rank {dst}")
        else:
            wrong = differs(tensor, before, f"on another rank reduce to rank {dst}")
        return first([_same(returned, tensor, "reduce", "the tensor it was given"), wrong])

    def allgather(self, shape: Shape) -> str:
        problem = self.begin("allgather", shape)()
        tensor, out = self.own_input(self.bits, shape), self.blank(self._rows(shape))
        returned = self.comm.allgather(tensor, out=out)
        wrong = differs(out, self.all_inputs(shape), f"allgather(out=) of {shape}")
        return first([problem, _same(returned, out, "allgather(out=)", "out"), wrong])

    def reduce_scatter(self, shape: Shape) -> str:
        problem = self.begin("reduce_scatter", shape)()
        tensor, out = self.own_input(self.numbers, self._rows(shape)), self.blank(shape)
        before = tensor.clone()
        returned = self.comm.reduce_scatter(tensor, self.op, out=out)
        wrong = self._wrong_row(out, shape, "reduce_scatter(out=)")
        kept = differs(tensor, before, "the input of reduce_scatter(out=)")
        return first([problem, _same(returned, out, "reduce_scatter(out=)", "out"), wrong, kept])

    def alltoall(self, shape: Shape) -> str:
        problem = self.begin("alltoall", shape)()
        tensor, out = self.own_input(self.bits, self._rows(shape)), self.blank(self._rows(shape))
        before = tensor.clone()
        returned = self.comm.alltoall(tensor, out=out)
        wrong = differs(out, self._crossed(shape), f"alltoall(out=) of {shape}")
        kept = differs(tensor, before, "the input of alltoall(out=)")
        return first([problem, _same(returned, out, "alltoall(out=)", "out"), wrong, kept])

    def gather(self, shape: Shape, dst: int) -> str:
        result = self.comm.gather(self.own_input(self.bits, shape), dst)
        if self.comm.rank != dst or result is None:
            is_right = (result is None) == (self.comm.rank != dst)
            return "" if is_right else f"gather to rank {dst} returned {type(result).__name__}"
        return differs(result, self.all_inputs(shape), f"gather of {shape} to rank {dst}")

    def scatter(self, shape: Shape, src: int) -> str:
        rows = self.own_input(self.bits, self._rows(shape)) if self.comm.rank == src else None
        out = self.blank(shape)
        returned = self.comm.scatter(out, rows, src)
        expected = self.bits.part(src, self._rows(shape))[self.comm.rank]
        wrong = differs(out, expected, f"scatter of {shape} from rank {src}")
        return first([_same(returned, out, "scatter", "out"), wrong])

    def ring(self, shape: Shape) -> str:
        """Everyone sends to the next and receives from the one before, at once."""
        world, rank = self.comm.world_size, self.comm.rank
        if world == 1:
            return ""
        result, before = self.blank(shape), (rank - 1) % world
        with self.comm.group():
            self.comm.send(self.own_input(self.bits, shape), (rank + 1) % world)
            self.comm.recv(result, before)
        return differs(result, self.bits.part(before, shape), f"recv of {shape} in a ring")

    # Calls whose results are checked later, by the function returned.

    def begin(self, name: str, shape: Shape, src: int = 0) -> Check:
        begin: Callable[..., Check] = getattr(self, f"_begin_{name}")
        return begin(shape, src)

    def _begin_allreduce(self, shape: Shape, _: int) -> Check:
        tensor = self.own_input(self.numbers, shape)
        returned = self.comm.allreduce(tensor, self.op)
        same = _same(returned, tensor, "allreduce", "the tensor it was given")
        total = self.numbers.total(shape)
        return lambda: same or self.numbers.problem(tensor, total, f"allreduce {self.op}")

    def _begin_broadcast(self, shape: Shape, src: int) -> Check:
        tensor = self.own_input(self.bits, shape)
        returned = self.comm.broadcast(tensor, src)
        same = _same(returned, tensor, "broadcast", "the tensor it was given")
        what = f"broadcast of {shape} from rank {src}"
        return lambda: same or differs(tensor, self.bits.part(src, shape), what)

    def _begin_allgather(self, shape: Shape, _: int) -> Check:
        result = self.comm.allgather(self.own_input(self.bits, shape))
        return lambda: differs(result, self.all_inputs(shape), f"allgather of {shape}")

    def _begin_reduce_scatter(self, shape: Shape, _: int) -> Check:
        result = self.comm.reduce_scatter(self.own_input(self.numbers, self._rows(shape)), self.op)
        return lambda: self._wrong_row(result, shape, f"reduce_scatter {self.op}")

    def _begin_alltoall(self, shape: Shape, _: int) -> Check:
        result = self.comm.alltoall(self.own_input(self.bits, self._rows(shape)))
        return lambda: differs(result, self._crossed(shape), f"alltoall of {shape}")

    def _wrong_row(self, row: torch.Tensor, shape: Shape, what: str) -> str:
        rank = self.comm.rank
        total = self.numbers.total(self._rows(shape))[rank]
        return self.numbers.problem(row, total, what, rank * total.numel())

    def _crossed(self, shape: Shape) -> torch.Tensor:
        rows = [
            self.bits.part(src, self._rows(shape))[self.comm.rank]
            for src in range(self.comm.world_size)
        ]
        return torch.stack(rows)


def first(problems: list[str]) -> str:
    """The first problem of a list, which is complete before: see CallTester."""
    return next((problem for problem in problems if problem), "")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def differs(result: torch.Tensor, expected: torch.Tensor, what: str) -> str:
    """The first difference of two tensors as bytes, or ""."""
    result, expected = result.cpu(), expected.cpu()
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"{what}: {tuple(result.shape)} {result.dtype}, expected {tuple(expected.shape)}"
    same = raw(result) == raw(expected)
    if bool(same.all()):
        return ""
    bad = int((~same).nonzero()[0])
    near = slice(bad, bad + 16)
    return (
        f"{what}: from byte {bad} on {raw(result)[near].tolist()} arrived, expected "
        f"{raw(expected)[near].tolist()}"
    )


def _same(returned: object, expected: torch.Tensor, call: str, what: str) -> str:
    return "" if returned is expected else f"{call} did not return {what}"
