"""What the ranks of a conformance check put in, and the plain answer to compare with.

sample = Sample(world_size, 67, torch.float32, "sum")
print(sample.wrong(comm.allreduce(sample.part(comm.rank, (67,))), sample.total((67,)), "allreduce"))
"""

from __future__ import annotations

from functools import cached_property

import torch

ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0x94D049BB133111EB - (1 << 64))  # splitmix64's, as int64
MANTISSA = (1 << 53) - 1
Shape = tuple[int, ...]


class Sample:
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
        self._mine = turn == torch.arange(world_size)[:, None]  # where a rank is the odd one out

    @cached_property
    def parts(self) -> torch.Tensor:
        """What the ranks put in: [world_size, numel]."""
        if self.dtype == torch.bool:
            return self._noise & 1 == 1
        if not self.op:
            return self._noise.view(torch.uint8).view(self.dtype)[:, : self.numel]
        make = self._float if self.dtype.is_floating_point else self._integer
        return make(self._noise).to(self.dtype)

    def part(self, rank: int, shape: Shape) -> torch.Tensor:
        """The first elements of what rank puts in: a tensor of its own."""
        return self.parts[rank, : torch.Size(shape).numel()].reshape(shape).clone()

    def total(self, shape: Shape) -> torch.Tensor:
        """The plain answer, in double precision or int64."""
        return self._total[: torch.Size(shape).numel()].reshape(shape)

    def wrong(self, found: torch.Tensor, expected: torch.Tensor, what: str, first: int = 0) -> str:
        """In words, where found is not expected, which begins at element `first` of total()."""
        found = found.cpu()
        if found.shape != expected.shape or found.dtype != self.dtype:
            return f"{what} gave {_described(found)}, expected shape {tuple(expected.shape)}"
        close = self._close(found, expected, first)
        if bool(close.all()):
            return ""
        bad = int((~close).reshape(-1).nonzero()[0])
        return (
            f"{what} of {_described(found)}: element {bad} is {found.reshape(-1)[bad].item()}, "
            f"expected {expected.reshape(-1)[bad].item()}"
        )

    def _close(self, found: torch.Tensor, expected: torch.Tensor, first: int) -> torch.Tensor:
        if not self.dtype.is_floating_point:
            return found == expected.to(self.dtype)
        wide = found.to(torch.float64)
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
        """How far off a right answer may be: each step rounds once, in whatever order they are."""
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
            found = sign * (0.75 + fraction / 2)
            found = torch.where(large & self._mine, found * (top**0.5 / 2), found)
        elif self.op in ("max", "min"):
            found = sign * torch.where(self._place % 2 == 0, 0.5 + fraction, fraction * top)
            found = torch.where(large & self._mine, sign * top, found)
        else:
            found = sign * (0.5 + fraction)
            found = torch.where(large, found * (top / (8 * self.world_size)), found)
        return self._with_specials(found)

    def _with_specials(self, found: torch.Tensor) -> torch.Tensor:
        """NaN only where adding and multiplying define it: libraries differ in max and min."""
        turn, mine = self._place % 13, self._mine
        if self.op not in ("max", "min"):
            found = torch.where((turn == 7) & mine, torch.nan, found)
        if self.dtype.itemsize == 1:  # one kind has no infinities, of the other NCCL makes none
            return found
        after = mine.roll(1, 0) & ~mine
        found = torch.where(((turn == 5) | (turn == 8)) & mine, torch.inf, found)
        return torch.where(((turn == 6) & mine) | ((turn == 8) & after), -torch.inf, found)

    def _integer(self, noise: torch.Tensor) -> torch.Tensor:
        kind = torch.iinfo(self.dtype)
        if self.op in ("max", "min"):
            found = noise >> (64 - kind.bits)
            found = found & kind.max if kind.min == 0 else found
            edge = torch.where(noise < 0, kind.min, kind.max)
            return torch.where((self._place % 7 == 3) & self._mine, edge, found)
        sign = torch.where(noise < 0, -1, 1) if kind.min < 0 else 1
        noise = noise >> 1 & MANTISSA << 10  # not negative
        if self.op == "prod":
            room = max(kind.max >> self.world_size, 1)
            return sign * torch.where(self._mine, (noise >> 10) % room + 1, (noise >> 10) % 2 + 1)
        return sign * (noise % (kind.max // self.world_size))


def _noise(world_size: int, numel: int, seed: int) -> torch.Tensor:
    """Bits without a pattern, by rank and place; from wrapping integers, so alike anywhere."""
    places = torch.arange(numel) * 31 + (seed << 40)
    found = (places + torch.arange(1, world_size + 1)[:, None]) * ODD[0]
    for shift in (30, 27):
        found = (found ^ (found >> shift & (1 << 64 - shift) - 1)) * ODD[1]
    return found


def _described(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
