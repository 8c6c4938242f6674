"""The errors of a launch, and the record of a rank that failed.

LaunchError(RuntimeError)     a rank failed; .failures has the earliest first
├── LaunchTimeout             the launch exceeded its timeout (also a TimeoutError)
└── LaunchInterrupted         a signal to the launcher ended it
TargetError(ValueError)       the script, module or function cannot be run
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from launcher import timings

TIMEOUT_CODE = 124  # as timeout(1)


@dataclass(frozen=True)
class Failure:
    """The failure of one rank.

    time_s: since the launch began. exit_code: 128 and the number for a signal. signal: the one that
    killed it, 0 if none did. ended_by_launcher: it failed only after the launcher had asked it to
    end. blames: the ranks whose failure its exception reports, -1 for an unknown one.
    """

    rank: int
    local_rank: int = 0
    host: str = ""
    pid: int = 0
    time_s: float = 0.0
    exit_code: int = 1
    signal: int = 0
    type: str = ""
    message: str = ""
    traceback: str = ""
    ended_by_launcher: bool = False
    blames: Sequence[int] = ()

    def summary(self) -> str:
        """One line: the rank, its process, and how it ended."""
        process = f"local rank {self.local_rank}, pid {self.pid} on {self.host or 'this node'}"
        return f"rank {self.rank} ({process}) {self.how()}"

    def how(self) -> str:
        """The end of the rank as a predicate: "was killed by SIGSEGV"."""
        raised = self._raised()
        if self.ended_by_launcher:
            was_killed = self.signal == signal.SIGKILL
            details = f" ({raised})" if raised else ""
            return f"was ended by the launcher{details}" + (
                ", with SIGKILL, since it did not exit when asked" * was_killed
            )
        if raised:
            return f"raised {raised}"
        if not self.type and self.message:
            return self.message
        if self.signal:
            return f"was killed by {signal_name(self.signal)}"
        return f"exited with code {self.exit_code}"

    def _raised(self) -> str:
        """The exception's type, and the first line of its message."""
        if self.type in ("", "SystemExit"):
            return ""
        first_line = self.message.splitlines()[0] if self.message else ""
        return f"{self.type}: {first_line}" if first_line else self.type


class CauseOrder(NamedTuple):
    """A sort key of failures: causes before consequences, and then by time."""

    is_consequence: int
    time_s: float
    rank: int

    @classmethod
    def of(
        cls, rank: int, time_s: float, *, died_silently: bool, is_consequence: int
    ) -> CauseOrder:
        """time_s: when the failure was noticed. is_consequence: the larger, the more surely.

        A process that dies without a word is noticed later than it happened: its peers lose their
        connection to it, and may raise and exit, before its parent reaps it.
        """
        lag_s = timings.TIMINGS.reap_lag_s if died_silently else 0.0
        return cls(is_consequence, time_s - lag_s, rank)


def by_cause(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """The failures of a launch, the cause first."""
    failures = list(failures)
    failed = {-1, *(failure.rank for failure in failures if not failure.ended_by_launcher)}

    def order(failure: Failure) -> CauseOrder:
        # An abort is more often the consequence of another's death than a cause.
        died_silently = not failure.type and failure.signal != signal.SIGABRT
        is_consequence = 2 if failure.ended_by_launcher else bool(failed & {*failure.blames})
        time_s = 0.0 if failure.ended_by_launcher else failure.time_s
        return CauseOrder.of(
            failure.rank, time_s, died_silently=died_silently, is_consequence=is_consequence
        )

    return tuple(sorted(failures, key=order))


def signal_name(number: int) -> str:
    """SIGTERM for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class LaunchError(RuntimeError):
    """A launch that failed. failures: the cause first. exit_code: of the first failure.

    has_begun: False if its nodes have not met, so that it has started no rank.
    """

    has_begun = True

    def __init__(
        self, message: str, failures: tuple[Failure, ...] = (), exit_code: int = 1
    ) -> None:
        super().__init__(message)
        self.failures = failures
        self.exit_code = exit_code


class LaunchTimeout(LaunchError, TimeoutError):
    """The launch was ended because it exceeded its timeout."""


class LaunchInterrupted(LaunchError):
    """A signal to the launcher ended the launch. exit_code: 128 and the signal's number."""


class TargetError(ValueError):
    """The script, module or function to run cannot be found."""


def failed(failures: Sequence[Failure], note: str = "") -> LaunchError:
    """The error of failed ranks, the cause first. note: further lines after its summary."""
    first = failures[0]
    text = "\n".join(filter(None, [first.summary(), note]))
    details = f"\n\n{first.traceback}" if first.traceback else ""
    return LaunchError(text + details, tuple(failures), first.exit_code)


def interrupted(number: int, failures: tuple[Failure, ...] = ()) -> LaunchInterrupted:
    """The error of a launch that this signal to the launcher has ended."""
    return LaunchInterrupted(f"stopped by {signal_name(number)}", failures, 128 + number)


def timed_out(
    timeout_s: float | None, failures: tuple[Failure, ...] = (), note: str = ""
) -> LaunchTimeout:
    """The error of a launch that has exceeded timeout_s."""
    return LaunchTimeout(
        f"not over after {timeout_s} s, so it was ended{note}", failures, TIMEOUT_CODE
    )
