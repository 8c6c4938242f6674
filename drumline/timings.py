"""Timings of the model layer, in seconds: one place, so that tests can shorten them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelTimings:
    """How long the ranks of a model wait for each other before they draw a conclusion."""

    next_message_s: float = 20.0 * 24 * 3600
    """A rank waits so long for the next message: must exceed any pause of the user. The failure
    detector ends the wait if a rank fails."""
    failure_notice_s: float = 2.0
    """Between the error of a connection and the notice of what ended it. Must exceed the
    coordinator's exit_notice_s and membership_s together."""
    step_agreement_s: float = 4.0
    """A rank whose step failed waits so long for its TP group to fail in the same step. Must exceed
    the time by which ranks differ in their first step, which loads libraries."""
    master_end_s: float = 5.0
    """A failing rank lets a failing master of its host end first, so that the launcher shows the
    master's error. Must exceed the time in which Python ends."""
    remote_master_end_s: float = 1.0
    """The same for a master on another host, whose end cannot be seen."""


TIMINGS = ModelTimings()
