"""Calls of a communicator, each result compared with the reference.

tester = CallTester(comm, 67, torch.float32, "sum")
problem = tester.allreduce((67,))        # "" if all is well
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from communicator.communicator import Communicator
from communicator.conformance.test_data import ReferenceData, Shape

GARBAGE = 0xA5  # what is in a tensor that nobody has written
Check = Callable[[], str]
CALLS = ("allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall")
IN_PLACE, REDUCE = ("allreduce", "broadcast"), ("allreduce", "reduce_scatter")
TAKE_ROWS, GIVE_ROWS = ("reduce_scatter", "alltoall"), ("allgather", "alltoall")
"""Calls whose tensor, or whose result, has a row for each rank."""


@dataclass(eq=False)
class CallTester:
    """Calls on tensors of up to numel elements, of all rows together where a call takes rows.

    A method returns the first problem in words, or "". It always makes all its calls: a rank that
    stopped at a problem would leave the others alone in the next call.
    """

    comm: Communicator
    numel: int
    dtype: torch.dtype = torch.float32
    op: str = "sum"
    seed: int = 0

    @cached_property
    def numbers(self) -> ReferenceData:
        return ReferenceData(self.comm.world_size, self.numel, self.dtype, self.op, self.seed)

    @cached_property
    def bits(self) -> ReferenceData:
        return ReferenceData(self.comm.world_size, self.numel, self.dtype, seed=self.seed)

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

    def _rows(self, shape: Shape) -> Shape:
        return (self.comm.world_size, *shape)

    # Complete tests: one call each, in every form it has.

    def allreduce(self, shape: Shape) -> str:
        return self.begin("allreduce", shape)()

    def allreduce_out(self, shape: Shape) -> str:
        return self._into_out("allreduce", shape)

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
        return first([self.begin("allgather", shape)(), self._into_out("allgather", shape)])

    def reduce_scatter(self, shape: Shape) -> str:
        problem = self.begin("reduce_scatter", shape)()
        return first([problem, self._into_out("reduce_scatter", shape)])

    def alltoall(self, shape: Shape) -> str:
        return first([self.begin("alltoall", shape)(), self._into_out("alltoall", shape)])

    def _into_out(self, name: str, shape: Shape) -> str:
        tensor = self.input_of(name, shape)
        out = self.blank(self._rows(shape) if name in GIVE_ROWS else shape)
        before, call = tensor.clone(), f"{name}(out=)"
        returned = self.call(name, tensor, out=out)
        wrong = self.wrong(name, shape, out, call)
        kept = differs(tensor, before, f"the input of {call}")
        return first([_same(returned, out, call, "out"), wrong, kept])

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
        tensor = self.input_of(name, shape)
        result = self.call(name, tensor, src)
        is_in_place = name in IN_PLACE
        same = _same(result, tensor, name, "the tensor it was given") if is_in_place else ""
        return lambda: same or self.wrong(name, shape, result, name, src)

    def input_of(self, name: str, shape: Shape) -> torch.Tensor:
        data = self.numbers if name in REDUCE else self.bits
        return self.own_input(data, self._rows(shape) if name in TAKE_ROWS else shape)

    def call(self, name: str, tensor: torch.Tensor, src: int = 0, **out: torch.Tensor) -> Any:
        arguments = (self.op,) if name in REDUCE else (src,) if name == "broadcast" else ()
        return getattr(self.comm, name)(tensor, *arguments, **out)

    def wrong(self, name: str, shape: Shape, result: torch.Tensor, call: str, src: int = 0) -> str:
        """The problem of a result, which is looked at once, after the call."""
        rank, rows = self.comm.rank, self._rows(shape)
        if name == "allreduce":
            return self.numbers.problem(result, self.numbers.total(shape), f"{call} {self.op}")
        if name == "reduce_scatter":
            total = self.numbers.total(rows)[rank]
            return self.numbers.problem(result, total, f"{call} {self.op}", rank * total.numel())
        if name == "broadcast":
            expected = self.bits.part(src, shape)
            return differs(result, expected, f"{call} of {shape} from rank {src}")
        expected = self.all_inputs(shape) if name == "allgather" else self.all_inputs(rows)[:, rank]
        return differs(result, expected, f"{call} of {shape}")


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
