"""Notices a stopped rank of any team, and lets go of what all others wait in.

vigil = Vigil(coor, comms, holds)        # coor: over the ranks of all teams, the driver first
vigil.explained(work)                    # what fails meanwhile names the rank that is stopped
comm = Watched(comm, vigil)              # for ranks that call each other without a driver
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from communicator import Communicator, Unsupported
from coordinator import Coordinator, DrumlineError
from drumline.errors import PeerLost
from drumline.liveness.stopped_ranks import LOOK_S, SILENT_S, Lookout, spans_processes

T = TypeVar("T")


class Vigil:
    """Looks after all ranks of a model while its driver waits for them.

    comms: in which this rank waits for others. holds: what each rank has, for errors.
    is_driven: whether only the first rank calls the model, and the others always wait for it.
    """

    def __init__(
        self,
        coor: Coordinator,
        comms: Iterable[Communicator],
        holds: Mapping[int, str],
        *,
        is_driven: bool = True,
    ):
        self.coor, self.holds, self._comms = coor, holds, list(comms)
        self.is_driven = is_driven
        self.is_waiting = is_driven and coor.rank != 0
        self.verdict = ""
        self._is_decided = threading.Event()
        store = coor.store("inference teams", timeout_s=None if is_driven else SILENT_S)
        self._lookout = Lookout(coor, store, self._waits, self._give_up, is_mutual=not is_driven)
        if spans_processes(coor):
            self._lookout.start()

    def close(self) -> None:
        self._lookout.over.set()

    def explained(self, work: Callable[[], T]) -> T:
        """What work returns. If others are lost in it, PeerLost names the rank that is stopped."""
        try:
            return work()
        except DrumlineError as error:
            if self._lookout.is_alive() and not isinstance(error, TimeoutError):
                self._is_decided.wait(2 * LOOK_S)  # who hears of it first leaves the others
            if self.verdict:
                raise PeerLost(self.verdict) from error
            raise

    def waited(self, work: Callable[[], T]) -> T:
        """What work returns, which waits for ranks that nobody drives; see `explained`."""
        self.is_waiting = True
        try:
            return self.explained(work)
        finally:
            self.is_waiting = False

    def first_of(self, mine: bytes) -> bytes:
        """What the first rank gives. Collective."""
        return self.waited(lambda: self.coor.broadcast(mine))

    def _waits(self) -> bool:
        return self.is_waiting or any(map(_is_behind, self._comms))

    def _give_up(self, culprit: int, how: str) -> None:
        self.verdict = (
            f"rank {self.coor.ranks[self.coor.rank]}: {self.coor.peers[culprit]} {how}. It holds "
            f"its part of {self.holds[culprit]}, so the model cannot run any more; find out what "
            "stopped it, and start all ranks again."
        )
        self._is_decided.set()
        if self.coor.rank == 0:
            self._lookout.over.wait(2 * LOOK_S)  # until the others have heard of it
        for comm in self._comms:
            self._abort(comm)
        if not self.is_driven:
            self.coor.report_failure(culprit, how)

    def _abort(self, comm: Any) -> None:
        try:
            comm.abort()
        except Unsupported as error:  # gloo and MPI: all that can be done is to say so
            warnings.warn(f"{self.verdict} ({error})", stacklevel=2)


def _is_behind(comm: Communicator) -> bool:
    """On CUDA a call is only enqueued, and what waits is the stream."""
    if comm.device.type != "cuda":
        return False
    try:
        return not torch.cuda.default_stream(comm.device).query()
    except RuntimeError:  # it is broken, or a graph is captured
        return True


class Watched:
    """The collectives that cut layers call, as a Communicator has them, under a vigil."""

    def __init__(self, comm: Communicator, vigil: Vigil):
        self.comm, self.vigil = comm, vigil
        self.rank, self.world_size, self.coor = comm.rank, comm.world_size, comm.coor

    def allreduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.vigil.waited(lambda: self.comm.allreduce(x))

    def allgather(self, x: torch.Tensor) -> torch.Tensor:
        return self.vigil.waited(lambda: self.comm.allgather(x))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return self.vigil.waited(lambda: self.comm.reduce_scatter(x))
