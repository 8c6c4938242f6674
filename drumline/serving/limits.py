"""Limits of a server."""

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
