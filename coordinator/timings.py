"""Timings of the coordinator, in seconds: one place, so that tests can scale them."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Timings:
    """How long things may take before the coordinator draws a conclusion."""

    scan_s: float = 0.25
    """Between two looks at the other ranks while there is a subscriber to their failures. A death
    on this host is noticed at once; must be well below suspended_s."""
    suspended_s: float = 1.25
    """A process must have been stopped for so long to count as suspended: a debugger lets it go on
    before. Must exceed several scan_s."""
    silent_s: float = 2.5
    """Without a heartbeat at rank 0, after which a rank of another host counts as suspended. Must
    exceed several heartbeats."""
    master_silent_s: float = 10.0
    """Without an answer of rank 0, after which it counts as unreachable. Must exceed the time for
    which loading a model on all GPUs keeps rank 0 from everything else."""
    membership_s: float = 0.5
    """Between two questions to rank 0 about ranks of other hosts."""
    exit_notice_s: float = 0.5
    """For rank 0 to learn whether a process that ended had closed first. Must exceed the time
    between the end of a process's connections and the end of the process."""

    def scaled(self, factor: float) -> Timings:
        """All of them multiplied."""
        return Timings(*(factor * getattr(self, field.name) for field in fields(self)))
