"""Every waiting time of the communicator, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from launcher import ScalableTimings, time_scale


@dataclass(frozen=True)
class CommunicatorTimings(ScalableTimings):
    """Seconds, each with what it must be longer than. Tests replace TIMINGS by a scaled copy."""

    # Longer than one message to rank 0 takes, or the comparison of a call is tried twice.
    call_check_poll_s: float = 1.0
    # Longer than Coordinator.check() takes; how late a lost peer is noticed.
    liveness_poll_s: float = 0.1
    # Longer than the kernel takes from closing a dead process's sockets to reaping it.
    exit_lag_s: float = 0.5
    # Longer than reading the state of the peers takes.
    exit_poll_s: float = 0.005
    # Longer than asking NCCL for its asynchronous error takes.
    watchdog_poll_s: float = 0.25
    # Longer than a kernel that a dead peer has finished needs to be done here as well.
    watchdog_grace_s: float = 1.0
    # Longer than CUDA takes to report that a graph has ended.
    graph_end_s: float = 1.0
    # Longer than a CUDA event query or MPI_Test takes; the longest pause between two of them.
    stream_poll_s: float = 0.0005
    # Longer than NCCL's RAS waits for its threads in other processes (5 s).
    ras_s: float = 10.0
    # Longer than rank 0 takes to answer while it is busy.
    exit_notice_s: float = 5.0
    # Conformance: longer than a barrier takes, so that an early exit from it shows.
    conformance_late_s: float = 0.05
    # Conformance: longer than a collective takes, so that a late rank is late.
    conformance_pause_s: float = 0.015
    # Longer than the slowest call of a conformance check; when a backend that hangs has failed.
    check_call_s: float = 60.0
    # Longer than check_call_s and the rest of the check, with two processes.
    doctor_launch_s: float = 120.0


TIMINGS = CommunicatorTimings().scaled(time_scale())
