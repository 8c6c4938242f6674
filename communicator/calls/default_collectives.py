"""Every operation composed of sends and receives: correct, slow, and there for every backend.

A backend overrides, one method at a time, what its library does better. Tensors that arrive here
are checked, contiguous, on the right device, not empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from communicator.calls.dtypes import SMALL_FLOATS

P2PCall = tuple[str, torch.Tensor, int]
"""A call inside group(): "send" or "recv", the tensor, and the peer."""


class CollectivesFromP2P:
    rank: int
    world_size: int

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    def follow_calls(self) -> None:
        """Let torch's current stream wait for the calls before, where they are on another."""

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send tensor to rank dst; may wait until that rank receives."""
        raise NotImplementedError

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Fill tensor with what rank src sent; sends between two ranks keep their order."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Return once every rank has called."""
        word = torch.ones(1, device=self.device)
        self.allreduce(word, word, "sum")  # which every library has

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Write rank src's tensor into every rank's."""
        for dst in range(self.world_size):
            if self.rank == src != dst:
                self.send(tensor, dst)
            elif self.rank == dst != src:
                self.recv(tensor, src)

    def reduce(self, out: torch.Tensor | None, tensor: torch.Tensor, dst: int, op: str) -> None:
        """Reduce in order of rank into out on dst, where it may be tensor; None on other ranks."""
        if out is None:
            return self.send(tensor, dst)
        out.copy_(self.reduce_parts(self._receive_parts(tensor), op))

    def _receive_parts(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The tensor of each rank, received in order."""
        for src in range(self.world_size):
            part = tensor if src == self.rank else torch.empty_like(tensor)
            if src != self.rank:
                self.recv(part, src)
            yield part

    def reduce_parts(self, parts: Iterable[torch.Tensor], op: str) -> torch.Tensor:
        """The reduction of the parts of all ranks, which are in order of rank."""
        remaining = iter(parts)
        total = accumulator(next(remaining))
        for part in remaining:
            total = _combine(total, part.to(total.dtype), op)
        return total / self.world_size if op == "avg" else total

    def allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        """Reduce into out, which may be tensor. Reduced once, so every rank has the same bits."""
        self.reduce(out if self.rank == 0 else None, tensor, 0, op)
        self.broadcast(out, 0)

    def allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Fill out, [world_size, *tensor.shape], by rank; tensor may be this rank's row of it."""
        out[self.rank].copy_(tensor)
        for src in range(self.world_size):
            self.broadcast(out[src], src)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        """Reduce row `rank` of tensor, [world_size, *out.shape], into out, maybe that row."""
        for dst in range(self.world_size):
            self.reduce(out if dst == self.rank else None, tensor[dst], dst, op)

    def alltoall(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Row i of out is row `rank` of rank i's tensor; both are [world_size, ...], apart."""
        out[self.rank].copy_(tensor[self.rank])
        for low in range(self.world_size):
            for high in range(low + 1, self.world_size):
                if self.rank in (low, high):
                    self._swap_rows(out, tensor, low, high)

    def _swap_rows(self, out: torch.Tensor, tensor: torch.Tensor, low: int, high: int) -> None:
        if self.rank == low:
            self.send(tensor[high], high)
            self.recv(out[high], high)
        else:
            self.recv(out[low], low)
            self.send(tensor[low], low)

    def gather(self, out: torch.Tensor | None, tensor: torch.Tensor, dst: int) -> None:
        """Fill out, [world_size, *tensor.shape], by rank on dst; None on other ranks."""
        if out is None:
            return self.send(tensor, dst)
        out[dst].copy_(tensor)
        self.group([("recv", out[src], src) for src in range(self.world_size) if src != dst])

    def scatter(self, out: torch.Tensor, rows: torch.Tensor | None, src: int) -> None:
        """Write row `rank` of src's rows, [world_size, *out.shape], into out; None elsewhere."""
        if rows is None:
            return self.recv(out, src)
        out.copy_(rows[src])
        self.group([("send", rows[dst], dst) for dst in range(self.world_size) if dst != src])

    def allgatherv(self, out: torch.Tensor, tensor: torch.Tensor, counts: list[int]) -> None:
        """Fill out with every rank's tensor, of counts elements each, one after the other."""
        parts = torch.split(out.view(-1), counts)
        parts[self.rank].copy_(tensor.flatten())
        for src, part in enumerate(parts):
            if part.numel():
                self.broadcast(part, src)

    def reduce_scatterv(
        self, out: torch.Tensor, tensor: torch.Tensor, counts: list[int], op: str
    ) -> None:
        """Reduce this rank's part of tensor, which has counts elements for the ranks, into out."""
        for dst, part in enumerate(torch.split(tensor.flatten().clone(), counts)):
            if part.numel():
                self.reduce(part if dst == self.rank else None, part, dst, op)
            if dst == self.rank:
                self.follow_calls()
                out.copy_(part.view(out.shape))

    def group(self, calls: list[P2PCall]) -> None:
        """Run the sends and receives of a group() so that they cannot wait for each other.

        Here one after another, in an order that is the same on all ranks.
        """
        for kind, tensor, peer in sorted(calls, key=lambda call: self._group_order(*call)):
            self.send(tensor, peer) if kind == "send" else self.recv(tensor, peer)

    def _group_order(self, kind: str, _: torch.Tensor, peer: int) -> tuple[int, int, bool]:
        """A call's place in the order of all ranks: by pair; the lower rank sends first."""
        low, high = sorted((self.rank, peer))
        sender = self.rank if kind == "send" else peer
        return low, high, sender != low


def accumulator(part: torch.Tensor) -> torch.Tensor:
    """A copy to reduce into: float32 for small floats, whose sums would lose their last bits."""
    return part.float() if part.dtype in SMALL_FLOATS else part.clone()


def _combine(total: torch.Tensor, part: torch.Tensor, op: str) -> torch.Tensor:
    """total op part. For bool max is "any", min and prod are "all"."""
    if op in ("sum", "avg"):
        return total.add_(part)
    if op == "prod":
        return total.mul_(part)
    return torch.maximum(total, part) if op == "max" else torch.minimum(total, part)
