"""The ranks in a circle, 0 -> 1 -> ... -> N -> 0: each hears only the one before it.

What goes wrong in a stage travels the same way, in place of the result, so nobody waits for
somebody who will not speak. A rank that loses a neighbour writes down whom it accuses and closes
its end; the next one notices that, and follows the accusations to who was lost first.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Mapping
from typing import Any

from torch.distributed import DistNetworkError

from communicator import Unsupported
from drumline.errors import DrumlineError, PeerLost
from drumline.liveness.stopped_ranks import LOOK_S, Lookout, spans_processes
from drumline.stages.messages import Foresee, Kind, Link, Message

FOREVER_S = 20.0 * 24 * 3600
"""How long a rank waits for the next message: the master's user may think, a death is noticed."""

ACCUSATION_S = 1.0
"""How long a rank that is gone may have taken to say whom it had lost itself."""

LOOK_AGAIN_S = 0.02
NOBODY = b"nobody"


class Ring:
    """This rank's two neighbours.

    outward, homeward: communicators over the same ranks; what comes back to the master comes over
        the second, as it sends and receives at the same time from different threads.
    holds: what each rank has, for errors. under: the communicators and all that they stand on.
    """

    def __init__(
        self, outward: Any, homeward: Any, holds: Mapping[int, str], under: contextlib.ExitStack
    ):
        self.coor, self.holds, self._under = outward.coor, holds, under
        self.rank, self.world_size = outward.rank, outward.world_size
        self.accusations = self.coor.store("inference accusations")
        self.is_waiting = self.rank != 0
        self._comms, self._verdict = (outward, homeward), ""
        self._lookout = Lookout(
            self.coor, self.accusations, lambda: self.is_waiting, self._stop_waiting
        )
        if spans_processes(self.coor):
            self._lookout.start()
        last = self.rank == self.world_size - 1
        self.next = Link(homeward if last else outward, (self.rank + 1) % self.world_size)
        self.previous = Link(outward if self.rank else homeward, (self.rank - 1) % self.world_size)

    def send(self, message: Message) -> Message | None:
        """The reply, for a master that has it at once; here it comes round."""
        self.is_waiting = True
        try:
            self.next.send(message)
        except DrumlineError as error:
            raise self._lost(self.next.peer, error) from error
        return None

    def receive(self, foresee: Foresee | None = None) -> Message:
        self.is_waiting = True
        try:
            return self.previous.receive(foresee)
        except DrumlineError as error:
            raise self._lost(self.previous.peer, error) from error
        finally:
            self.is_waiting = self.rank != 0

    def close(self, error: BaseException | None = None) -> None:
        """Give back the communicators and all under them; without waiting for anybody if there
        was an error."""
        self._lookout.over.set()
        self._under.__exit__(type(error) if error else None, error, None)

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(error)

    def _stop_waiting(self, culprit: int, how: str) -> None:
        """End what this rank waits for: `culprit` will not come."""
        self._verdict = (
            f"rank {self.rank}: {self.coor.peers[culprit]} {how}. It holds {self.holds[culprit]}, "
            "so the model cannot run any more; find out what stopped it, and start all ranks again."
        )
        if self.rank == 0:
            self._lookout.over.wait(2 * LOOK_S)  # until the others have heard of it
        try:
            for comm in self._comms:
                comm.abort()
        except Unsupported as error:  # gloo and MPI: all that can be done is to say so
            warnings.warn(f"{self._verdict} ({error})", stacklevel=2)

    def leave(self, code: int) -> None:
        """The master's goodbye: everybody passes it on and goes; returns once it has come round."""
        try:
            self.send(Message(Kind.LEAVE, ints=[code]))
            while self.receive().kind is not Kind.LEAVE:
                pass
        except PeerLost:
            pass
        finally:
            self.close()

    def _lost(self, peer: int, error: DrumlineError) -> PeerLost:
        if self._verdict:
            return PeerLost(self._verdict)
        culprit = self._culprit(peer)
        return PeerLost(
            f"rank {self.rank}: {self.coor.peers[culprit]} is gone. It held "
            f"{self.holds[culprit]}, so the model cannot run any more; start all ranks again. "
            f"({error})"
        )

    def _culprit(self, peer: int) -> int:
        """Who was lost first, if `peer` is the neighbour that this rank lost."""
        passed = {self.rank}
        accused = peer
        try:
            self.accusations.set(str(self.rank), str(peer))
            while accused not in passed:
                passed.add(accused)
                accused = self._accused_by(accused)
        except DistNetworkError:
            return 0  # the master keeps the accusations, so it went first
        return peer if accused == self.rank else accused

    def _accused_by(self, peer: int) -> int:
        """Whom `peer` had lost; itself if it lost nobody."""
        until = time.monotonic() + ACCUSATION_S
        while True:
            is_dead = self.coor.peers[peer].is_known_dead()
            # as get(), which raises if the group is broken, by whoever left it in an error
            found = self.accusations.compare_set(str(peer), NOBODY, NOBODY)
            if found != NOBODY:
                return int(found)
            if is_dead or time.monotonic() > until:
                return peer
            time.sleep(LOOK_AGAIN_S)
