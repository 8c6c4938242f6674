"""The errors of a launch, and the record of a rank that failed.

LaunchError(RuntimeError)     a rank failed; .failures has the earliest first
├── LaunchTimeout             the launch exceeded its timeout (also a TimeoutError)
└── LaunchInterrupted         a signal to the launcher ended it
TargetError(ValueError)       the script, module or function cannot be run
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

TIMEOUT_CODE = 124  # as timeout(1)


@dataclass(frozen=True)
class Failure:
    """The failure of one rank.

    time_s: since the launch began. exit_code: 128 and the number for a signal. signal: the one that
    killed it, 0 if none did. ended_by_launcher: it failed only after the launcher had asked it to
    end.
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


def signal_name(number: int) -> str:
    """SIGTERM for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class LaunchError(RuntimeError):
    """A launch that failed. failures: the cause first. exit_code: of the first failure."""

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
