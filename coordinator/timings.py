"""Timings of the coordinator, in seconds: one place, so that tests can scale them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher import ConnectionTimings, time_scale

HEARTBEATS_PER_S = 1024  # of all nodes together
MEETING_SHARE = 0.8  # of a call's time, for others to come: the rest is to hear who has not


@dataclass(frozen=True)
class CoordinatorTimings(ConnectionTimings):
    """Limits after which the coordinator draws a conclusion, and pauses between its looks.

    Deadlines of calls are not part of it: those are the caller's timeout_s.
    """

    # ---- failure detection: coordinator/failure/ ----
    scan_s: float = 0.25
    """Between two looks at the other ranks while there is a subscriber to their failures. A death
    on this host is noticed at once. Must be well below suspended_s."""
    suspended_s: float = 1.25
    """A process counts as suspended after so long: a debugger lets it go on before. Must exceed
    several scan_s."""
    silent_s: float = 2.5
    """Without a heartbeat at rank 0, after which a rank of another host counts as suspended or its
    host as unreachable. Must exceed several heartbeat_s, and ping_after_s + acknowledged_s."""
    master_silent_s: float = 3.0
    """Without an answer of rank 0, after which it counts as unreachable. Must exceed silent_s."""
    membership_s: float = 0.5
    """Between two questions to rank 0 about ranks of other hosts."""
    exit_notice_s: float = 1.0
    """For rank 0 to learn whether a process that ended had closed first. Must exceed the time
    between the end of a process's connections and the end of the process."""
    lost_grace_s: float = 0.5
    """After a rank was lost, for what it had sent, or others hand on for it, to arrive."""
    reason_s: float = 1.5
    """For the reason of a broken connection to arrive through rank 0. Must exceed heartbeat_s."""
    reason_answer_s: float = 0.5
    """For rank 0 to answer one question about that reason. Must be below reason_s."""
    reports_s: float = 0.1
    """For which one answer of rank 0 about all ranks serves all that ask. Must be well below
    silent_s."""
    departed_s: float = 1.0
    """Between two questions to rank 0 about ranks that have left, or were lost while a group is
    made."""
    new_group_s: float = 5.0
    """For a group to appear in the heartbeats of all its ranks. Must exceed several heartbeat_s."""

    stack_s: float = 1.0
    """For the processes of this host to dump their stacks, where a deadline is near or past."""
    callback_s: float = 1.0
    """For a callback that is running to end when its subscription is closed."""

    # ---- control plane: coordinator/control/ ----
    heartbeat_s: float = 0.5
    """Between two heartbeats of a node to rank 0."""
    tick_s: float = 0.5
    """Between two looks of rank 0's server at pending and silent connections."""
    ping_after_s: float = 1.5
    """Without a heartbeat, after which rank 0 sends a ping. Must exceed two heartbeat_s."""
    acknowledged_s: float = 0.5
    """For the kernel of another host to acknowledge a ping. Must exceed the round trip."""
    answer_s: float = 1.0
    """At most, for questions to rank 0 that only improve an error, and to tell it why a group
    failed, which may be the end of a deadline. Must be below reason_s."""
    last_answer_s: float = 0.2
    """As answer_s, where the deadline has passed already."""
    exit_s: float = 0.5
    """For a process to end after its connections broke."""
    connect_retry_s: float = 0.02
    """Between two attempts to connect to rank 0 or to another node."""
    connect_s: float = 5.0
    """Of one attempt to connect where there are several addresses: a route that drops packets
    would take minutes."""

    # ---- transport, store, Coordinator ----
    shm_wait_s: float = 0.05
    """Between two looks at failures while waiting in shared memory, or for the reason of one. Must
    be well below reason_s."""
    link_extra_s: float = 5.0
    """Beyond the deadline of a call, for connections between nodes: the error of the deadline must
    come first. Must exceed reason_s + answer_s."""
    waiting_notice_s: float = 5.0
    """Between two lines of the log about ranks of other nodes, awaited or cut off."""
    store_poll_s: float = 0.00005
    """Before the second look into a torch Store for ranks that meet there; the pauses grow. Must
    exceed one look into a store of this host."""
    failed_turn_s: float = 5.0
    """To store that once() or master_first() failed, whatever its own deadline."""
    linger_s: float = 2.0
    """Of rank 0 in a failed group, for the others to hear why it failed. Must exceed reason_s."""

    def for_ranks(self, world_size: int, num_nodes: int | None = None) -> CoordinatorTimings:
        """With longer pauses where rank 0 could not bear what all ranks ask, and longer limits
        for what is learnt from it.

        num_nodes: as soon as each node sends its heartbeats together.
        """
        questions = ("membership_s", "departed_s", "master_silent_s")
        heartbeats = ("heartbeat_s", "reports_s", "new_group_s", "ping_after_s", "silent_s")
        most = HEARTBEATS_PER_S * self.heartbeat_s
        factors = dict.fromkeys(questions, max(1.0, world_size / most))
        factors |= dict.fromkeys(heartbeats, max(1.0, (num_nodes or world_size) / most))
        return replace(self, **{name: n * getattr(self, name) for name, n in factors.items()})

    def with_patience(self, patience_s: float) -> CoordinatorTimings:
        """With limits of at least so long for what is silent, and lives on perhaps."""
        return replace(
            self,
            suspended_s=max(self.suspended_s, patience_s),
            silent_s=max(self.silent_s, patience_s),
            new_group_s=max(self.new_group_s, patience_s + 2 * self.heartbeat_s),
            master_silent_s=max(self.master_silent_s, patience_s + self.heartbeat_s),
        )


DEFAULT = CoordinatorTimings().scaled(time_scale())
