"""Inputs of the ranks in a conformance check, and the reference to compare results with.

data = ReferenceData(world_size, 67, torch.float32, "sum")
print(data.problem(comm.allreduce(data.part(comm.rank, (67,))), data.total((67,)), "allreduce"))
"""

from __future__ import annotations

from functools import cached_property

import torch

from communicator.calls.call_check import describe_tensor

ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0x94D049BB133111EB - (1 << 64))  # splitmix64's, as int64
MANTISSA = (1 << 53) - 1
Shape = tuple[int, ...]


class ReferenceData:
    """numel elements of each of world_size ranks, the same wherever and whenever they are made.

    With an op: numbers for it. They use every bit that their dtype has, of either sign, some near
    its ends; floats have infinities and NaN where the result does not depend on who looks. The
    largest stay so far from the end of the dtype that no partial result passes it.
    Without one: any bits at all, for what is only moved.
    """

    def __init__(
        self, world_size: int, numel: int, dtype: torch.dtype, op: str = "", seed: int = 0
    ) -> None:
        self.world_size, self.numel, self.dtype, self.op = world_size, numel, dtype, op
        self._noise = _noise(world_size, numel, seed)
        self._place = torch.arange(numel)
        turn = self._place // 13 % world_size
        # [world_size, numel]: at each element one rank's input is of another kind.
        self._is_special = turn == torch.arange(world_size)[:, None]

    @cached_property
    def parts(self) -> torch.Tensor:
        """The inputs of the ranks: [world_size, numel]."""
        if self.dtype == torch.bool:
            return self._noise & 1 == 1
        if not self.op:
            return self._noise.view(torch.uint8).view(self.dtype)[:, : self.numel]
        make = self._float if self.dtype.is_floating_point else self._integer
        return make(self._noise).to(self.dtype)

    def part(self, rank: int, shape: Shape) -> torch.Tensor:
        """The first elements of a rank's input: a tensor of its own."""
        return self.parts[rank, : torch.Size(shape).numel()].reshape(shape).clone()

    def total(self, shape: Shape) -> torch.Tensor:
        """The reduction of the inputs, in double precision or int64."""
        return self._total[: torch.Size(shape).numel()].reshape(shape)

    def problem(
        self, result: torch.Tensor, expected: torch.Tensor, what: str, first: int = 0
    ) -> str:
        """The first element of result that differs from expected, in words, or "".

        expected: elements of total(), from `first` on.
        """
        result = result.cpu()
        if result.shape != expected.shape or result.dtype != self.dtype:
            return f"{what} gave {describe_tensor(result)}, expected shape {tuple(expected.shape)}"
        close = self._close(result, expected, first)
        if bool(close.all()):
            return ""
        bad = int((~close).reshape(-1).nonzero()[0])
        return (
            f"{what} of {describe_tensor(result)}: element {bad} is "
            f"{result.reshape(-1)[bad].item()}, expected {expected.reshape(-1)[bad].item()}"
        )

    def _close(self, result: torch.Tensor, expected: torch.Tensor, first: int) -> torch.Tensor:
        if not self.dtype.is_floating_point:
            return result == expected.to(self.dtype)
        wide = result.to(torch.float64)
        slack = self._slack[first : first + expected.numel()].reshape(expected.shape)
        near = (wide - expected).abs() <= slack
        same = (wide == expected) | (wide.isnan() & expected.isnan())
        return torch.where(expected.isfinite(), near, same)

    @cached_property
    def _wide(self) -> torch.Tensor:
        return self.parts.to(torch.float64 if self.dtype.is_floating_point else torch.int64)

    @cached_property
    def _total(self) -> torch.Tensor:
        if self.op == "prod":
            return self._wide.prod(0)
        if self.op in ("max", "min"):
            return self._wide.amax(0) if self.op == "max" else self._wide.amin(0)
        total = self._wide.sum(0)
        return total / self.world_size if self.op == "avg" else total

    @cached_property
    def _slack(self) -> torch.Tensor:
        """The largest error of a correct result: each step rounds once, in any order."""
        if self.op in ("max", "min"):
            return torch.zeros(self.numel, dtype=torch.float64)
        kind = torch.finfo(self.dtype)
        size = self._total.abs() if self.op == "prod" else self._wide.abs().sum(0)
        if self.op == "avg":
            size = size / self.world_size
        return (size * max(2.0, self.world_size / 2) + kind.smallest_normal) * kind.eps

    def _float(self, noise: torch.Tensor) -> torch.Tensor:
        top = torch.finfo(self.dtype).max
        sign = torch.where(noise < 0, -1.0, 1.0).to(torch.float64)
        fraction = (noise & MANTISSA).to(torch.float64) / MANTISSA
        large = self._place % 7 == 3
        if self.op == "prod":
            values = sign * (0.75 + fraction / 2)
            values = torch.where(large & self._is_special, values * (top**0.5 / 2), values)
        elif self.op in ("max", "min"):
            values = sign * torch.where(self._place % 2 == 0, 0.5 + fraction, fraction * top)
            values = torch.where(large & self._is_special, sign * top, values)
        else:
            values = sign * (0.5 + fraction)
            values = torch.where(large, values * (top / (8 * self.world_size)), values)
        return self._with_specials(values)

    def _with_specials(self, values: torch.Tensor) -> torch.Tensor:
        """NaN only where adding and multiplying define it: libraries differ in max and min."""
        turn, special = self._place % 13, self._is_special
        if self.op not in ("max", "min"):
            values = torch.where((turn == 7) & special, torch.nan, values)
        if self.dtype.itemsize == 1:  # e4m3 has no infinities, and NCCL yields none for e5m2
            return values
        after = special.roll(1, 0) & ~special
        values = torch.where(((turn == 5) | (turn == 8)) & special, torch.inf, values)
        return torch.where(((turn == 6) & special) | ((turn == 8) & after), -torch.inf, values)

    def _integer(self, noise: torch.Tensor) -> torch.Tensor:
        kind = torch.iinfo(self.dtype)
        if self.op in ("max", "min"):
            values = noise >> (64 - kind.bits)
            values = values & kind.max if kind.min == 0 else values
            edge = torch.where(noise < 0, kind.min, kind.max)
            return torch.where((self._place % 7 == 3) & self._is_special, edge, values)
        sign = torch.where(noise < 0, -1, 1) if kind.min < 0 else 1
        noise = noise >> 1 & MANTISSA << 10  # not negative
        if self.op == "prod":
            room = max(kind.max >> self.world_size, 1)
            return sign * torch.where(
                self._is_special, (noise >> 10) % room + 1, (noise >> 10) % 2 + 1
            )
        return sign * ((noise >> 10 ^ noise) % max(kind.max // self.world_size, 1))


def _noise(world_size: int, numel: int, seed: int) -> torch.Tensor:
    """Bits without a pattern, by rank and element: wrapping integers, so the same anywhere."""
    places = torch.arange(numel) * 31 + (seed << 40)
    values = (places + torch.arange(1, world_size + 1)[:, None]) * ODD[0]
    for shift in (30, 27):
        values = (values ^ (values >> shift & (1 << 64 - shift) - 1)) * ODD[1]
    return values
