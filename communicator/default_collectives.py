"""Every operation built from sends and receives: correct, slow, and there for every backend.

A backend overrides, one method at a time, what its library does better. Tensors are checked,
contiguous, on the right device, not empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

WIDE = {torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}


class Built:
    rank: int
    world_size: int

    def _send(self, tensor: torch.Tensor, dst: int) -> None:
        """Give tensor to rank dst; may wait until it receives."""
        raise NotImplementedError

    def _recv(self, tensor: torch.Tensor, src: int) -> None:
        """Fill tensor with what rank src sent; sends between two ranks keep their order."""
        raise NotImplementedError

    def _device(self) -> torch.device:
        raise NotImplementedError

    def _barrier(self) -> None:
        word = torch.ones(1, device=self._device())
        self._allreduce(word, word, "max")

    def _broadcast(self, tensor: torch.Tensor, src: int) -> None:
        for rank in range(self.world_size):
            if rank != src:
                self._pass(tensor, src, rank)

    def _reduce(self, out: torch.Tensor | None, tensor: torch.Tensor, dst: int, op: str) -> None:
        """Reduce in order of rank on dst; out is None on the other ranks."""
        if out is None:
            return self._send(tensor, dst)
        out.copy_(self._total(self._parts(tensor), op))

    def _parts(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The tensor of each rank, received in order."""
        for src in range(self.world_size):
            part = tensor if src == self.rank else torch.empty_like(tensor)
            if src != self.rank:
                self._recv(part, src)
            yield part

    def _total(self, parts: Iterable[torch.Tensor], op: str) -> torch.Tensor:
        """The reduction of the parts of all ranks, which are in order of rank."""
        each = iter(parts)
        total = _wide(next(each))
        for part in each:
            total = _combine(total, part.to(total.dtype), op)
        return total / self.world_size if op == "avg" else total

    def _allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        """Reduced once and handed on, so that every rank has the same bits."""
        self._reduce(out if self.rank == 0 else None, tensor, 0, op)
        self._broadcast(out, 0)

    def _allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        out[self.rank].copy_(tensor)
        for src in range(self.world_size):
            self._broadcast(out[src], src)

    def _reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        for dst in range(self.world_size):
            self._reduce(out if dst == self.rank else None, tensor[dst], dst, op)

    def _alltoall(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        out[self.rank].copy_(tensor[self.rank])
        for low in range(self.world_size):
            for high in range(low + 1, self.world_size):
                if self.rank in (low, high):
                    self._swap(out, tensor, low, high)

    def _swap(self, out: torch.Tensor, tensor: torch.Tensor, low: int, high: int) -> None:
        if self.rank == low:
            self._send(tensor[high], high)
            self._recv(out[high], high)
        else:
            self._recv(out[low], low)
            self._send(tensor[low], low)

    def _exchange(self, calls: list[tuple[str, torch.Tensor, int]]) -> None:
        """Run the sends and receives of a group(): in one order for all ranks, so nobody waits."""
        ordered = sorted(calls, key=lambda call: self._pair(call[0], call[2]))
        for kind, tensor, peer in ordered:
            self._send(tensor, peer) if kind == "send" else self._recv(tensor, peer)

    def _pair(self, kind: str, peer: int) -> tuple[int, int, bool]:
        """A call's place in the order all ranks agree on: by pair, the lower rank sends first."""
        low, high = sorted((self.rank, peer))
        sender = self.rank if kind == "send" else peer
        return low, high, sender != low

    def _pass(self, tensor: torch.Tensor, src: int, dst: int) -> None:
        if self.rank == src:
            self._send(tensor, dst)
        elif self.rank == dst:
            self._recv(tensor, src)


def _wide(part: torch.Tensor) -> torch.Tensor:
    """A copy, in float32 if part is of a small float: sums of many would lose their last bits."""
    return part.float() if part.dtype in WIDE else part.clone()


def _combine(total: torch.Tensor, part: torch.Tensor, op: str) -> torch.Tensor:
    """total op part: the line that adds two tensors. bool: max is any, min and prod are all."""
    if op in ("sum", "avg"):
        return total.add_(part)
    if op == "prod":
        return total.mul_(part)
    return torch.maximum(total, part) if op == "max" else torch.minimum(total, part)
