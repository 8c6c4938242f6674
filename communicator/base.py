"""The class that users call and that backends extend.

    with Communicator(Coordinator()) as comm:
        comm.allreduce(torch.ones(4))

A backend needs `_send` and `_recv`; everything else works on top of them, correct and slow, and is
overridden one method at a time where the backend knows better.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ClassVar

import torch

import launcher
from communicator import call_check
from communicator.arguments import (
    check_apart,
    check_like,
    check_op,
    check_other,
    check_peer,
    check_tensor,
)
from communicator.default_collectives import Built
from communicator.errors import CommunicatorError, Unsupported
from coordinator import Coordinator

TRACED = (
    "allreduce",
    "broadcast",
    "reduce",
    "allgather",
    "reduce_scatter",
    "alltoall",
    "send",
    "recv",
)


class Communicator(Built):
    """Moves tensors among the ranks of a Coordinator. Collective to make.

    coor: who the ranks are. It stays the caller's, and must outlive the Communicator.
    backend: a name, the path of a vendor's library, or a subclass; None takes the best that every
        rank can use. A backend that one rank lacks is Unsupported on all of them.
    timeout_s: the deadline of every call; coor's if not given.
    device_type: whose memory it must move, "cpu" or "cuda"; the best backend of any if not given.
    checked_calls: how many of the first calls are compared among the ranks before anything moves,
        by backends that do not compare every call anyhow.
    options: what the backend takes.

    Collectives are called by every rank in the same order, with the same shapes, dtypes and op. On
    the CPU a call returns when its result is there. On CUDA it enqueues on torch's current stream.
    Arguments that cannot work raise ValueError or TypeError before anything moves; a peer that dies
    raises PeerLost, a deadline CommunicatorTimeout.
    """

    name: ClassVar[str] = ""
    device_type: ClassVar[str] = "cpu"
    asked_only: ClassVar[bool] = False  # never taken for being the best

    def __new__(
        cls,
        coor: Coordinator,
        backend: Any = None,
        *,
        timeout_s: float | None = None,
        device_type: str | None = None,
        **options: Any,
    ) -> Communicator:
        if cls is not Communicator:
            return super().__new__(cls)
        from communicator.selection import choose  # the table of backends imports this class

        return super().__new__(choose(coor, backend, device_type))

    def __init__(
        self,
        coor: Coordinator,
        backend: Any = None,
        *,
        timeout_s: float | None = None,
        device_type: str | None = None,
        checked_calls: int | None = None,
        **options: Any,
    ) -> None:
        self.coor = coor
        self.rank, self.world_size = coor.rank, coor.world_size
        self.timeout_s = coor.timeout_s if timeout_s is None else timeout_s
        self._closed = False
        if checked_calls is not None:
            self._checked_calls = checked_calls
        self._open(**options)
        self._recorder = launcher.recorder(coor.info)
        if self._recorder is not None:
            self._recorder.follow(self, TRACED, "move", backend=self.name)
            self._recorder.follow(self, ["barrier"], "wait", backend=self.name)

    # What a backend provides: this, and _send and _recv of Built, and what else it does better.

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        """How good this backend is here; the highest score is taken. Not collective.

        Raises Unsupported with the reason if this rank cannot use it.
        """
        raise Unsupported(f"{cls.__name__} does not say when it can be used; override probe()")

    def _open(self) -> None:
        """Bring the ranks together. Collective. May use self.coor; options become arguments."""

    def _close(self) -> None:
        """Free what _open took. Not collective."""

    # What users call.

    def allreduce(
        self, tensor: torch.Tensor, op: str = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The reduction of every rank's tensor, in place, or into out. Collective.

        Returns the tensor written. op: sum, prod, max, min, avg. All ranks get the same bits.
        """
        self._check("allreduce", tensor)
        check_op(self.rank, "allreduce", op, tensor)
        out = tensor if out is None else self._check_out("allreduce", out, tensor.shape, tensor)
        if self.world_size == 1:
            return out if out is tensor else out.copy_(tensor)
        self._compare("allreduce", tensor, op)
        if self._moves(tensor):
            self._allreduce(out, tensor, op)
        return out

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Rank src's tensor, written into every rank's tensor, which is returned. Collective."""
        self._check("broadcast", tensor)
        check_peer(self.rank, "broadcast", src, self.world_size, "src")
        self._compare("broadcast", tensor, f"from rank {src}")
        if self.world_size > 1 and self._moves(tensor):
            self._broadcast(tensor, src)
        return tensor

    def reduce(self, tensor: torch.Tensor, dst: int = 0, op: str = "sum") -> torch.Tensor:
        """The reduction of every rank's tensor, in place on rank dst alone. Collective.

        Returns the tensor; on the other ranks it is unchanged.
        """
        self._check("reduce", tensor)
        check_op(self.rank, "reduce", op, tensor)
        check_peer(self.rank, "reduce", dst, self.world_size, "dst")
        self._compare("reduce", tensor, f"{op}, to rank {dst}")
        if self.world_size > 1 and self._moves(tensor):
            self._reduce(tensor if self.rank == dst else None, tensor, dst, op)
        return tensor

    def allgather(self, tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Every rank's tensor, by rank: [world_size, *tensor.shape]. Collective."""
        self._check("allgather", tensor)
        shape = (self.world_size, *tensor.shape)
        out = self._out("allgather", out, shape, tensor)
        self._compare("allgather", tensor)
        if self.world_size == 1:
            out[0].copy_(tensor)
        elif self._moves(tensor):
            self._allgather(out, tensor)
        return out

    def reduce_scatter(
        self, tensor: torch.Tensor, op: str = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Row `rank` of the reduction of every rank's [world_size, *shape]: shape. Collective."""
        self._check("reduce_scatter", tensor)
        check_op(self.rank, "reduce_scatter", op, tensor)
        self._check_rows("reduce_scatter", tensor)
        out = self._out("reduce_scatter", out, tuple(tensor.shape[1:]), tensor)
        self._compare("reduce_scatter", tensor, op)
        if self.world_size == 1:
            out.copy_(tensor[0])
        elif self._moves(tensor):
            self._reduce_scatter(out, tensor, op)
        return out

    def alltoall(self, tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Row i of the result is what rank i had in row `rank`: [world_size, *shape]. Collective.

        out must not share memory with tensor.
        """
        self._check("alltoall", tensor)
        self._check_rows("alltoall", tensor)
        out = self._out("alltoall", out, tuple(tensor.shape), tensor)
        self._compare("alltoall", tensor)
        if self.world_size == 1:
            out.copy_(tensor)
        elif self._moves(tensor):
            self._alltoall(out, tensor)
        return out

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Give tensor to rank dst, which calls recv with the same shape and dtype.

        Returns when tensor may be changed again; that may be before dst has received.
        """
        self._check_point("send", tensor, dst, "dst")
        if tensor.numel() or self._takes_empty:
            self._post("send", tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Fill tensor with what rank src sent, and return it. Between two ranks order is kept."""
        self._check_point("recv", tensor, src, "src")
        if tensor.numel() or self._takes_empty:
            self._post("recv", tensor, src)
        return tensor

    def barrier(self) -> None:
        """Return once every rank has called. Collective. On CUDA: once the stream gets there."""
        self._check_open("barrier")
        self._compare("barrier")
        if self.world_size > 1:
            self._barrier()

    @contextmanager
    def group(self) -> Iterator[None]:
        """Sends and receives inside start together at its end: they cannot wait for each other.

        If the body raises, none of them happens on this rank.
        """
        self._check_open("group")
        if self._pending is not None:
            raise CommunicatorError(f"rank {self.rank}: group() inside a group(). Use one.")
        calls: list[tuple[str, torch.Tensor, int]] = []
        self._pending = calls
        try:
            yield
        finally:
            self._pending = None
        self._exchange(calls)

    def close(self) -> None:
        """Give back what the backend holds. Not collective; calling it twice is harmless.

        Not while another thread waits in a call: abort() ends that first, where there is one.
        """
        if not self._closed:
            self._closed = True
            self._close()
            if self._recorder is not None:
                self._recorder.close()

    def abort(self) -> None:
        """From any thread: calls of this rank that wait raise, and so do later ones."""
        raise Unsupported(f"rank {self.rank}: {self.name} cannot be aborted; end the process.")

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, world_size={self.world_size})"

    @property
    def device(self) -> torch.device:
        """Where the tensors live that this rank may pass."""
        return self._device()

    @property
    def backend(self) -> str:
        """The name by which Communicator(coor, backend=...) finds this class."""
        return self.name

    # The rest is for us.

    _calls = 0  # collectives compared so far
    _takes_empty = False  # does it compare messages of 0 elements, too?
    _compares_moves = False  # is it by what moves that collectives of 0 elements are compared?
    _checked_calls = call_check.FIRST_CALLS
    _pending: list[tuple[str, torch.Tensor, int]] | None = None
    _recorder: launcher.Recorder | None = None

    def _post(self, kind: str, tensor: torch.Tensor, peer: int) -> None:
        if self._pending is not None:
            self._pending.append((kind, tensor, peer))
        else:
            self._send(tensor, peer) if kind == "send" else self._recv(tensor, peer)

    def _moves(self, tensor: torch.Tensor) -> bool:
        """Is there anything to move? If the others must hear of this call, there is."""
        return self._compares_moves or tensor.numel() > 0

    def _device(self) -> torch.device:
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, self.coor.info.local_rank)

    def _lost_peers(self) -> str:
        """The peers of this host that are seen dead, for an error; empty if none is."""
        dead = [str(peer) for peer in self.coor.peers if peer.is_known_dead()]
        return f" Gone: {', '.join(dead)}." if dead else ""

    def _compare(self, call: str, tensor: torch.Tensor | None = None, how: str = "") -> None:
        """Raise CommunicatorError on every rank if they make different calls; only the first are
        compared."""
        if self._calls < self._checked_calls and self.world_size > 1:
            self._calls += 1
            what = "" if tensor is None else f"of {call_check.describe(tensor)}"
            call_check.compare(self, self._calls, " ".join(filter(None, (call, what, how))))

    def _check(self, call: str, tensor: torch.Tensor) -> None:
        self._check_open(call)
        check_tensor(self.rank, call, tensor, self.device_type)

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise CommunicatorError(
                f"rank {self.rank}: {call} on a closed Communicator. Make a new one, or "
                "close it later."
            )

    def _check_rows(self, call: str, tensor: torch.Tensor) -> None:
        if tensor.dim() == 0 or tensor.shape[0] != self.world_size:
            raise ValueError(
                f"rank {self.rank}, {call}: the tensor has shape {tuple(tensor.shape)}, but needs "
                f"one row for each of the {self.world_size} ranks: [{self.world_size}, ...]. "
                f"Reshape it with .view({self.world_size}, -1)."
            )

    def _check_point(self, call: str, tensor: torch.Tensor, peer: int, name: str) -> None:
        self._check(call, tensor)
        check_peer(self.rank, call, peer, self.world_size, name)
        check_other(self.rank, call, peer)

    def _check_out(
        self, call: str, out: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor
    ) -> torch.Tensor:
        check_tensor(self.rank, f"{call}(out=)", out, self.device_type)
        check_like(self.rank, call, out, tuple(shape), like)
        check_apart(self.rank, call, like, out)
        return out

    def _out(
        self, call: str, out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor
    ) -> torch.Tensor:
        if out is None:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        return self._check_out(call, out, shape, like)


def deadline_s(start: float, timeout_s: float) -> float:
    """What is left of timeout_s since start, in seconds; never negative."""
    return max(start + timeout_s - time.monotonic(), 0.0)
