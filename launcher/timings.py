"""Every waiting time of the launcher, in seconds."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Self

from launcher.launch_info import PATIENCE, TIME_SCALE, number


@dataclass(frozen=True)
class ScalableTimings:
    """Waiting times, all in seconds, of one layer."""

    def scaled(self, factor: float) -> Self:
        """A copy with every time multiplied by factor."""
        return replace(self, **{name: time_s * factor for name, time_s in vars(self).items()})


@dataclass(frozen=True)
class ConnectionTimings(ScalableTimings):
    """Seconds of a connection whose two ends prove a secret: launcher/authentication/."""

    # Longer than a slow client takes to prove itself, after which it is sent away.
    handshake_s: float = 10.0
    # Longer than the round trip between two hosts: every client has it, even if many others come.
    pending_s: float = 0.5
    # Longer than a look at failures costs, while waiting for a socket or for descriptors to accept
    # one.
    idle_s: float = 0.1


@dataclass(frozen=True)
class Timings(ConnectionTimings):
    """Seconds, each with what it must be longer than. Tests replace TIMINGS by a scaled copy."""

    # Local launches: fork server, supervisor, output.
    # Longer than a child's exit takes to reach waitpid in its parent, or a consequence looks like
    # the cause; shorter than a peer takes to run into a second, unrelated error.
    reap_lag_s: float = 0.25
    # Longer than a rank takes to run its SIGTERM handler and print a traceback.
    failure_grace_s: float = 0.5
    # Longer than a rank takes to write a checkpoint after Ctrl-C.
    stop_grace_s: float = 10.0
    # Longer than faulthandler takes to write the stacks of all ranks into their pipes.
    stack_dump_s: float = 0.2
    # Longer than a process that a rank has left behind needs to exit on SIGTERM.
    orphan_grace_s: float = 0.25
    # Longer than kill(2) takes to turn a process into a zombie, usually.
    reap_poll_s: float = 0.002
    # Longer than orphan_grace_s; the kernel may hold a process in I/O for any time.
    unkillable_s: float = 2.0
    # Longer than a debugger or a snapshot of the machine stops a process.
    stopped_server_s: float = 3.0
    # Longer than a program pauses between two parts of one line.
    prompt_s: float = 0.05
    # Longer than one write to a pipe; how often a full output is tried again.
    output_poll_s: float = 0.02
    # Longer than any deadline that matters; epoll_wait(2) takes an int of milliseconds.
    longest_poll_s: float = 3600.0
    # Longer than any launch; no clock can be waited for with more seconds than this.
    longest_timeout_s: float = 366 * 24 * 3600.0

    # Ranks that are threads.
    # Longer than a Coordinator takes to raise PeerLost in the other ranks.
    thread_grace_s: float = 2.0

    # Backend launchers: torchrun, mpiexec, srun.
    # Longer than people take to start a command on every node; --timeout replaces it.
    node_wait_s: float = 300.0
    # Longer than the first machine's command takes from its start until it listens.
    node_join_s: float = 60.0
    # Longer than a line about the awaited nodes takes to read.
    node_status_s: float = 5.0
    # Longer than a lost first packet of a connection takes to be sent again, 1 s (RFC 6298).
    node_connect_s: float = 1.25
    # Longer than an attempt to connect costs.
    node_retry_s: float = 0.2
    # Longer than a node that has heard of the end takes to end its ranks and say so.
    node_end_s: float = 10.0
    # Longer than the backend launcher takes to end its ranks when asked.
    backend_grace_s: float = 5.0
    # Longer than backend_grace_s and unkillable_s together: the reaper works within it.
    reaper_exit_s: float = 10.0
    # Longer than reading the records of all ranks; how late a failure of one is noticed, and a
    # stopped fork server.
    backend_poll_s: float = 0.5
    # Longer than a look at all processes of a machine costs; how late a suspended one is told.
    suspended_poll_s: float = 2.0
    # Longer than `mpiexec --version` and its like take on a cold file system.
    version_answer_s: float = 30.0

    # Ray.
    # Longer than a busy cluster takes to free resources.
    ray_placement_s: float = 300.0
    # Longer than Ray takes to notice the dead process that caused a failure elsewhere, and than the
    # interval at which it reads the log files of its workers.
    ray_lag_s: float = 1.0

    # The doctor.
    # Longer than two ranks take to import torch and check every backend.
    doctor_layer_s: float = 180.0


def time_scale() -> float:
    """The factor of all waiting times of all layers: that of DRUMLINE_TIME_SCALE, or 1.

    For tests that start processes. Raises ValueError unless it is a number from above 0 to 1.
    """
    text = os.environ.get(TIME_SCALE, "1")
    if not 0 < number(text) <= 1:
        raise ValueError(f"{TIME_SCALE}={text:.99} is not a factor: set a number from above 0 to 1")
    return number(text)


def patience_s() -> float:
    """The seconds for which silence of a rank or of its host is borne: DRUMLINE_PATIENCE, or 0.

    0 leaves the limits as they are. Raises ValueError for what is not a number of seconds.
    """
    text = os.environ.get(PATIENCE, "0")
    if not 0 <= number(text) < math.inf:
        raise ValueError(f"{PATIENCE}={text:.99} is not a number of seconds: set one from 0 on")
    return number(text)


def borne_s(limit_s: float) -> float:
    """A limit for the silence of a host or a process, or the patience of the launch if longer."""
    return max(limit_s, patience_s())


TIMINGS = Timings().scaled(time_scale())
