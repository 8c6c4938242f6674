"""Timings of the model layer, in seconds: one place, so that tests can shorten them."""

from __future__ import annotations

from dataclasses import dataclass

from launcher import ScalableTimings, time_scale


@dataclass(frozen=True)
class ModelTimings(ScalableTimings):
    """The patience of the ranks of a model with each other."""

    next_message_s: float = 20.0 * 24 * 3600
    """A rank waits so long for the next message: must exceed any pause of the user. The failure
    detector ends the wait if a rank fails."""
    failure_notice_s: float = 2.0
    """Between the error of a connection and the notice of what ended it. Must exceed the
    coordinator's exit_notice_s and membership_s together."""
    busy_master_s: float = 10.0
    """While a model loads, a rank that does not answer counts as failed after so long. Must exceed
    the time for which loading keeps rank 0 from everything else."""
    step_agreement_s: float = 4.0
    """A rank whose step failed waits so long for its TP group to fail in the same step. Must exceed
    the time by which ranks differ in their first step, which loads libraries."""
    master_end_s: float = 5.0
    """A failing rank lets a failing master of its host end first, so that the launcher shows the
    master's error. Must exceed the time in which Python ends."""
    remote_master_end_s: float = 1.0
    """The same for a master on another host, whose end cannot be seen."""
    regroup_s: float = 75.0
    """When a rank was lost, the master waits 0.8 of this for the others, then goes on without them.
    That must exceed the longest pass, from which they come."""
    meet_s: float = 10.0
    """For those that go on to connect to each other, before they look who is left again."""
    master_poll_s: float = 0.02
    """Between two checks whether the master has ended. Must exceed the time of a check."""

    # ---- loading and compiling: checkpoint/, compile_once/, planner/ ----
    load_s: float = 24 * 3600.0
    """For the other ranks to load, or for the one that compiles. Must exceed the time to read the
    largest checkpoint, or to compile it; the failure detector ends the wait if a rank fails."""
    progress_s: float = 0.2
    """Between two reports of a rank, and between two updates of the bar. Must exceed the time of a
    report many times; a few updates a second are smooth."""
    round_s: float = 0.05
    """Of each measurement of a device, after a round to warm up. Must exceed many rounds."""
    message_pause_s: float = 0.002
    """Before a message whose latency is measured. Must exceed the time that a receiver polls, so
    that it sleeps, as between tokens."""

    # ---- serving/ ----
    disconnect_poll_s: float = 0.2
    """Between two checks whether a client is still connected. Must exceed the time of a check."""
    template_s: float = 5.0
    """For a chat template, which may loop without end. Must exceed the time for a long chat."""
    ping_s: float = 15.0
    """Between two comments in a stream that waits. Must stay below the time for which proxies wait
    for an answer, often 60 s."""
    header_s: float = 10.0
    """For the head of a request, from the connection or from the answer before. Must exceed the
    slowest round trip."""
    body_s: float = 60.0
    """For the body of a request to arrive, and for a client to take what is ready of its answer.
    Must exceed the upload of the largest body."""
    failure_poll_s: float = 0.1
    """Between two checks whether all ranks are alive and the server may go on."""
    drain_s: float = 2.0
    """For running requests after the server is stopped. drain_s, failure_poll_s and notify_s
    together must stay below the backend_grace_s of the launcher, which then kills the rank."""
    notify_s: float = 2.0
    """After drain_s, for clients to receive the error that ends their requests. Must exceed
    the time of one pass, which a request cannot leave."""

    suspended_s: float = 3.0
    """A rank that is suspended for so long is killed, and all are started again. Must exceed the
    time in which the other ranks notice it, and say so."""
    start_pause_s: float = 1.0
    """Before ranks that did not come up are started again. Must exceed the time in which processes
    that end free what they held."""
    node_return_s: float = 20.0
    """For a node that was lost, before ranks are started without it. Must exceed ranks_end_s, and
    the time in which its command starts again."""
    ranks_end_s: float = 5.0
    """For all ranks to end once one has, or the server has; then they are killed. Must exceed
    drain_s, and master_end_s must not count on more."""


TIMINGS = ModelTimings().scaled(time_scale())
