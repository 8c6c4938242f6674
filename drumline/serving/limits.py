"""Limits of a server: sizes and times."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServingLimits:
    """Sizes that the server accepts."""

    max_length: int
    """Tokens of a prompt together with its completion."""
    max_running: int = 16
    """Sequences that run at a time, in all batches."""
    max_waiting: int = 64
    """Sequences in the queue."""
    num_threads: int = 2
    """Batches that run at a time."""
    max_body_nbytes: int = 4 << 20
    """Bytes of the body of a request."""


@dataclass(frozen=True)
class ServingTimings:
    """Seconds that the server waits."""

    gather_s: float = 0.003
    """For more requests before a batch starts: longer than requests sent together are apart."""
    disconnect_poll_s: float = 0.2
    """Between checks whether a client is still connected."""
    body_s: float = 60
    """For the body of a request to arrive."""
    failure_poll_s: float = 0.5
    """Between checks whether all ranks are alive and the server may go on."""
    drain_s: float = 2
    """For running requests after the server is stopped. drain_s, failure_poll_s and notify_s
    together must stay below the time after which a launcher kills a rank (5 s)."""
    notify_s: float = 2
    """After drain_s, for clients to receive the error that ends their requests."""
