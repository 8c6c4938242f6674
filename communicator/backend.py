"""The class that vendors extend: what moves the tensors of a Communicator.

class Acme(Backend):                 # name, probe, open, close, send, recv
    ...

comm = Communicator(coor, backend=Acme)

A backend needs `send` and `recv`; everything else works on top of them, correct and slow, and is
overridden, one operation at a time, where the backend does better. Arguments are checked before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from communicator import timings
from communicator.calls import call_check
from communicator.calls.arguments import check_apart, check_like, check_tensor
from communicator.calls.default_collectives import CollectivesFromP2P
from communicator.calls.failures import describe_lost, lost_peers
from communicator.errors import (
    CommunicatorError,
    CommunicatorTimeout,
    DrumlineError,
    PeerLost,
    Unsupported,
)
from communicator.interceptors.interceptor import Interceptor
from communicator.own_gpu import own_ordinal
from coordinator import Coordinator, RankFailure


@dataclass(frozen=True)
class Capabilities:
    """Declarations of a backend, beyond its operations, that decide what it is called for.

    only_by_name: never selected as the best, only if it is named.
    empty_messages: send and recv also get tensors of 0 elements, which are otherwise left out.
    empty_collectives: so do the collectives, because every call is compared by what is exchanged.
    compares_every_call: by itself, so nothing has to be compared before.
    checked_calls: how many of the first calls are otherwise compared before anything moves.
    encrypts: what goes to other hosts is encrypted, where the Coordinator encrypts.
    """

    only_by_name: bool = False
    empty_messages: bool = False
    empty_collectives: bool = False
    compares_every_call: bool = False
    checked_calls: int = call_check.FIRST_CALLS
    encrypts: bool = False


COMPOSED = (
    "barrier", "broadcast", "reduce", "allgather", "allgatherv", "reduce_scatter",
    "reduce_scatterv", "alltoall", "gather", "scatter",
)  # fmt: skip
"""Operations that work on top of others where a library has none."""

RENAMED = ("open", "close", "send", "recv", "allreduce", "group", "decline", *COMPOSED)
"""Methods of Backend whose names began with do_, until the release before."""


class Backend(CollectivesFromP2P):
    """Moves tensors among the ranks of a Coordinator, for a Communicator that makes it.

    coor: the ranks, self.rank and self.world_size among them. timeout_s: the deadline of every
    call. device: of this rank's tensors, if it was named.

    Its Communicator calls open() once, on every rank, and close() once at most.
    """

    name: ClassVar[str] = ""
    device_type: ClassVar[str] = "cpu"
    capabilities: Capabilities = Capabilities()
    closes_when_forgotten: ClassVar[bool] = True  # close() waits for nobody, so any time will do
    call_checker: Interceptor | None = None  # compares calls before the library, where it must
    streams: Any = None  # of bytes beside the calls (byte_streams.py), where there are any
    is_closed = False
    disowned: CommunicatorError | None = None  # why a forked child cannot use it
    _num_compared = 0  # collectives

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise TypeError for methods that nothing would call."""
        super().__init_subclass__(**kwargs)
        if former := [name for name in RENAMED if f"do_{name}" in vars(cls)]:
            changes = ", ".join(f"do_{name} to {name}" for name in former)
            raise TypeError(
                f"class {cls.__name__}: no Communicator calls methods of a backend by their former "
                f"names, so they would have no effect. Rename {changes}."
            )

    def __init__(
        self,
        coor: Coordinator,
        *,
        timeout_s: float | None = None,
        device: torch.device | None = None,
        checked_calls: int | None = None,
    ) -> None:
        self.coor = coor
        self.rank, self.world_size = coor.rank, coor.world_size
        self._me = self.rank_name()
        if reason := self.why_unencrypted(coor):
            raise Unsupported(f"{self._me}: {self.name}: {reason}")
        self.timeout_s = coor.timeout_s if timeout_s is None else coor.checked_timeout(timeout_s)
        self.is_gpu_named = device is not None
        self._device = self._own_device(device)
        if checked_calls is not None:
            self.capabilities = replace(self.capabilities, checked_calls=checked_calls)

    # A backend provides these, send and recv, and overrides what it does better.

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        """The score of this backend here; the highest is selected. Not collective.

        Raises Unsupported with the reason if this rank cannot use it.
        """
        raise Unsupported(f"{cls.__name__} does not say when it can be used; override probe()")

    def open(self) -> None:
        """Connect the ranks. Collective. May use self.coor; options become arguments."""

    def close(self) -> None:
        """Free what open() took. Not collective."""

    def set_timeout(self, timeout_s: float) -> None:
        """Give this rank's later calls another deadline. Not collective, from any thread."""
        self.timeout_s = timeout_s

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait, with a deadline, for what is enqueued on torch's current stream; not on the CPU."""
        if self.device.type != "cpu":
            self._await_stream(None, timeout_s)

    def abort(self) -> None:
        """Make calls of this rank that wait raise, and later ones; from any thread."""
        raise Unsupported(f"{self._me}: {self.name} cannot be aborted; end the process.")

    def finish(self) -> DrumlineError | None:
        """End in good order before close(). The error to raise once that is done, if there is one.

        What it raises itself leaves the communicator open.
        """
        return None

    def leave(self) -> None:
        """Prepare to close after an exception: the other ranks may make other calls."""

    def own_calls(self) -> Any:
        """An object that takes users' calls in place of CheckedCalls, once open; None: those."""
        return None

    def disown(self, error: CommunicatorError) -> None:
        """In a forked child: refuse calls, which the peers would take for those of the rank."""
        self.disowned = error

    def part_options(self, ranks: Sequence[int]) -> Mapping[str, Any] | None:
        """Options to open this backend with over some of its ranks, from what is open already.

        Collective over all ranks, after coor.split(). None: the part opens as the whole did.
        """
        return None

    def compare_call(
        self, call: str, tensor: torch.Tensor | None = None, details: str = ""
    ) -> None:
        """Raise CommunicatorError on every rank if they make different calls.

        Called before each collective. Only the first calls are compared.
        """
        if self._num_compared < self.capabilities.checked_calls and self.world_size > 1:
            self._num_compared += 1
            description = call_check.describe_call(call, tensor, details)
            call_check.compare(self, self._num_compared, description)

    def decline(self, why: str) -> None:
        """Take part in the comparison of a call; raises what it raises on the other ranks."""
        self.compare_call(call_check.DECLINED, details=why)

    # What backends use.

    @property
    def device(self) -> torch.device:
        """The device whose tensors this rank may pass."""
        return self._device

    def rank_name(self, rank: int | None = None) -> str:
        """A rank of this communicator in errors; see Coordinator.rank_name."""
        return self.coor.rank_name(rank)

    @classmethod
    def why_unencrypted(cls, coor: Coordinator) -> str:
        """Why ranks that encrypt cannot use this backend; "" if they can, or do not encrypt."""
        if not coor.encrypts or len(coor.nodes) == 1 or cls.capabilities.encrypts:
            return ""
        return "it does not encrypt between hosts, as --encrypt demands; tcp and hierarchical do"

    def check_open(self, call: str) -> None:
        """Raise CommunicatorError if no call can be made any longer."""
        if self.disowned is not None:
            raise self.disowned
        if self.is_closed:
            raise CommunicatorError(
                f"{self._me}: {call} on a closed Communicator. Make a new one, or close it later. "
                "A Communicator of which only methods are kept is closed, too."
            )

    def check_tensor(self, call: str, tensor: torch.Tensor) -> None:
        """Raise what is wrong with the tensor of a call, or if no call can be made any longer."""
        self.check_open(call)
        check_tensor(self._me, call, tensor, self.device_type)

    def check_out(
        self, call: str, out: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor
    ) -> torch.Tensor:
        """The out, if it can hold a result of this shape of a call with this tensor."""
        check_tensor(self._me, f"{call}(out=)", out, self.device_type)
        check_like(self._me, call, out, tuple(shape), like)
        check_apart(self._me, call, like, out, self.rank)
        return out

    def is_capturing(self) -> bool:
        """True while torch's current stream is captured in a CUDA graph."""
        has_streams = self.device_type == "cuda" and torch.cuda.is_available()
        return has_streams and torch.cuda.is_current_stream_capturing()

    def check_outside_capture(self, call: str) -> None:
        """Raise CommunicatorError if no call can be made, or this one not inside a capture."""
        self.check_open(call)
        if self.is_capturing():
            raise CommunicatorError(
                f"{self._me}: {call} inside the capture of a graph, which it would break. "
                "Call it before the capture."
            )

    def check_peers(self, call: str) -> None:
        """Raise PeerLost if a peer that the call would wait for is known dead."""
        if lost := self._lost_peers():
            raise PeerLost(
                f"{self._me} lost a peer before {call}.{describe_lost(lost)} Start all ranks "
                "again, and look at what those printed last.",
                lost,
            )

    def _await_stream(self, stream: torch.cuda.Stream | None, timeout_s: float | None) -> None:
        start, limit_s = time.monotonic(), self.timeout_s if timeout_s is None else timeout_s
        with torch.cuda.device(self.device):
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream or torch.cuda.current_stream())
        while not event.query():
            if (waited_s := time.monotonic() - start) > limit_s:
                lost = describe_lost(self._lost_peers())
                raise CommunicatorTimeout(
                    f"{self._me}: the stream was not done in time: some rank did not make "
                    f"the same calls.{lost} abort() ends what waits on the GPU."
                )
            time.sleep(min(waited_s / 10, timings.TIMINGS.stream_poll_s))  # a tenth late at most

    def _own_device(self, device: torch.device | None) -> torch.device:
        """The device whose tensors this rank may pass, if this one or none was named."""
        if device is not None and device.type != self.device_type:
            raise Unsupported(
                f"{self._me}: {self.name} moves tensors on {self.device_type}, not on "
                f"{device}. Choose another backend, or leave device= out."
            )
        if self.device_type == "cpu" or (device is not None and device.index is not None):
            return device or torch.device("cpu")
        return torch.device(self.device_type, own_ordinal(self.coor.info.local_rank))

    def _lost_peers(self) -> tuple[RankFailure, ...]:
        return lost_peers(self.coor)

    def _await_lost_peers(self) -> tuple[RankFailure, ...]:
        """The lost peers after a connection closed: its process is seen to end a bit later."""
        return lost_peers(self.coor, timings.TIMINGS.exit_lag_s)
