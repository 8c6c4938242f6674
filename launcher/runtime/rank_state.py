"""The launcher's record of each rank that it has started, and the Failure made from it."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass, field
from typing import Any

from launcher import timings
from launcher.errors import Failure
from launcher.launch_info import LaunchInfo

LAUNCHER_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass
class LaunchedRank:
    """One rank so far. Times are of the monotonic clock.

    record: how its target ended. dump: the stacks of a crash, line by line. signalled_s: when the
    launcher first asked it to end. outlives_failures: it goes on when others fail. was_outlived: it
    has failed, and another one has gone on. has_met: it has said that all ranks have met.
    """

    info: LaunchInfo
    pid: int = 0
    exit_code: int | None = None
    signal: int = 0
    ended_s: float = 0.0
    record: dict[str, Any] = field(default_factory=dict)
    dump: list[str] = field(default_factory=list)
    signalled_s: float | None = None
    outlives_failures: bool = False
    was_outlived: bool = False
    has_met: bool = False
    is_suspended: bool = False

    @property
    def is_running(self) -> bool:
        return self.exit_code is None

    @property
    def has_failed(self) -> bool:
        return "failure" in self.record or bool(self.exit_code)

    @property
    def exited_early(self) -> bool:
        """True if it exited with code 0 before its target returned."""
        return self.exit_code == 0 and not self.record

    def result(self) -> Any:
        return self.record.get("result")

    def failure(self, began_s: float) -> Failure:
        """The Failure that the rank reported; without one, as its exit status shows it."""
        report: dict[str, Any] = self.record.get("failure") or {
            "rank": self.info.rank,
            "local_rank": self.info.local_rank,
            "pid": self.pid,
            "time_s": self.ended_s,
            "host": socket.gethostname(),
            "message": "exited with code 0 before its function returned" * self.exited_early,
            "traceback": without_launcher(self.dump),
            "exit_code": self.exit_code or 1,
            "signal": self.signal,
        }
        return Failure(
            ended_by_launcher=failed_on_request(
                report["time_s"],
                self.signalled_s,
                "failure" in self.record or self.exit_code == 128 + signal.SIGTERM,
            ),
            **{**report, "time_s": report["time_s"] - began_s},
        )


def failed_on_request(failed_s: float, signalled_s: float | None, reacted: bool) -> bool:
    """True if a rank failed because it was asked to end, not just at the same time.

    signalled_s: when it was, or None. reacted: whether it said so, by its error or its exit code.
    """
    if signalled_s is None:
        return False
    return failed_s >= signalled_s + (0 if reacted else timings.TIMINGS.reap_lag_s)


def without_launcher(dump: list[str]) -> str:
    """The stacks that faulthandler dumped, without the launcher's frames below the target's."""
    return "\n".join(line for line in dump if f'File "{LAUNCHER_FOLDER}{os.sep}' not in line)
