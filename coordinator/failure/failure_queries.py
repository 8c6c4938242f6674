"""Questions that a rank may ask about the failures of its group, and its reports of them."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coordinator.call_site import caller
from coordinator.control.group_member import GroupMember
from coordinator.control.session import Session
from coordinator.errors import FailureReason, PeerLost, RankFailure
from coordinator.failure import stack_dump
from coordinator.failure.detector import FailureDetector
from coordinator.failure.subscription import Subscription, always
from coordinator.timings import CoordinatorTimings

if TYPE_CHECKING:
    from coordinator.control.server import ControlServer


class FailureQueries(GroupMember):
    """The failures of a Coordinator's ranks: who failed, who is late, and where they are."""

    _detector: FailureDetector | None
    _timings: CoordinatorTimings
    _session: Session | None
    _note: Any

    # ---- failures ----

    def on_failure(
        self,
        callback: Callable[[RankFailure], None],
        *,
        is_waiting: Callable[[], bool] = always,
        unreachable_s: float = 0.0,
    ) -> Subscription:
        """Have callback(failure) called once for every rank of the group that fails from now on,
        or has failed already. Not collective; nobody needs to be in a call.

        A failure is the end of a process, close() on that rank, report_failure() on any rank, a
        suspended process (SIGSTOP) and a host that does not answer; see FailureReason. Ranks that
        fail together are reported in the order in which they failed, so the first is the cause.
        The callback runs on a thread of the Coordinator, which lives as long as there are
        subscribers; it may close the subscription or the Coordinator. is_waiting: a rank that is
        suspended or unreachable, and may recover, is reported only while this is true.
        unreachable_s: for how long a rank must not have answered before it is reported.

        with coor.on_failure(lambda failure: comm.abort()):
            ...
        """
        self._check_open("on_failure", may_be_broken=True)
        if self._detector is None:
            return Subscription(callback, is_waiting, unreachable_s, lambda subscription: None)
        return self._detector.notifier.subscribe(callback, is_waiting, unreachable_s)

    def failures(self, *, wait_s: float = 0.0) -> tuple[RankFailure, ...]:
        """The ranks of the group that have failed, the first to fail first. Not collective.

        wait_s: how long to wait for there to be one, since connections of a process that ends are
        closed before its end can be seen.
        """
        self._check_open("failures", may_be_broken=True)
        return () if self._detector is None else self._detector.failures(wait_s)

    def report_failure(self, rank: int, how: str) -> None:
        """Fail the group, from any thread: this rank of it will not come, for it is `how`.

        Not collective. The calls of all ranks raise PeerLost, those that wait already and all later
        ones. For callers that know before the deadline, for example that a rank is suspended.
        """
        self._check_rank(rank, "rank")
        if self._detector is not None and self._broken is None and not self._closed:
            self._detector.report_failure(self.peers[rank], how, caller())

    # ---- looking ----

    def check(self) -> None:
        """Raise what broke the group, if something did. Not collective, from any thread."""
        if self._broken is not None:
            raise self._broken
        if self._detector is not None and not self._closed:
            self._detector.check_group(self._begin_call("check", None))

    def diagnose(self, *, stacks_too: bool = True) -> str:
        """A line for every rank with its call and state; the others of this node dump their stacks.

        Not collective. The stacks go to each rank's standard error, as on SIGUSR1 to any of them.
        stacks_too: without them it is what goes into an error, in 16 lines.
        """
        self._check_open("diagnose")
        if self._detector is None:
            return f"{self._me} (host {socket.gethostname()}, alone)"
        if not stacks_too:
            return self._detector.monitor.short_table()
        me = self.peers[self.rank]
        stack_dump.ask(peer for peer in self.peers if peer.pid != me.pid)
        return self._detector.monitor.table()

    def describe_late(self) -> str:
        """The ranks that keep this one waiting, or the deadlock it is in. Not collective.

        Of other nodes those that are not well; "" if nothing can be said. For errors of the layers
        above.
        """
        if self._detector is None or self._closed:
            return ""
        detector, note = self._detector, stack_dump.CallNote(*self._note[:2])
        describe = detector.monitor.describe_local
        unwell = [f"{rank}." for rank in detector.monitor.unwell_remote()]
        late = detector.stacks.describe_late(note, describe, self._timings.stack_s)
        return "\n".join(filter(None, [*unwell, late]))

    def describe_failure(self) -> str:
        """Another rank's reason why this group failed; "" without one. Not collective."""
        if self._detector is None or self._closed:
            return ""
        return self._detector.describe_failure()

    def note_peer(self, rank: int) -> None:
        """Note, for such descriptions, to which rank of the group this one sends or listens.

        What is not a rank is not noted: the call itself refuses it.
        """
        if rank in range(self.world_size):
            self._note[0] = self.ranks[rank]

    @property
    def allreduce_note(self) -> int:
        """The address of an int64 that is to be 1 while this process is in a library's allreduce.

        For such descriptions, too; valid as long as the process.
        """
        return ctypes.addressof(ctypes.c_int64.from_buffer(self._note, 8))

    def _causes(self, error: BaseException | None) -> Sequence[RankFailure]:
        """The failed ranks of the group that the error, or the one before it, names."""
        seen: set[int] = set()  # a program may raise an error from itself
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            failures = error.failures if isinstance(error, PeerLost) else ()
            causes = [failure for failure in failures if failure.peer in self.peers]
            if causes:
                return [replace(failure, rank=self.peers.index(failure.peer)) for failure in causes]
            error = error.__cause__ or error.__context__
        return ()

    def _ended_ranks(self) -> set[int]:
        """The failed ranks, except those that may only have noticed the failure of another."""
        hearsay = (FailureReason.LEFT, FailureReason.REPORTED)
        ended = {failure.rank for failure in self.failures() if failure.reason not in hearsay}
        if self._detector is not None:  # what was reported of these says no more than that
            ended |= self._detector.monitor.suspended()
        server = self._server
        return ended | (server.unreachable(server.timings.silent_s) if server else set())

    @property
    def _server(self) -> ControlServer | None:
        """The control server, if this rank has it."""
        return self._session.server if self._session is not None else None
