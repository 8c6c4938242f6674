"""What the launcher knows of its ranks, and how one that failed is told about."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass, field
from typing import Any

from launcher.errors import Failure
from launcher.launch_info import LaunchInfo
from launcher.records import json_values

REAPING_LAG_S = 0.1  # a death is noticed this much later than it happened, at most
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass
class Rank:
    """One rank so far. Times are of the monotonic clock. dump: what a crash wrote, line by line."""

    info: LaunchInfo
    pid: int = 0
    exit_code: int | None = None
    signal: int = 0
    ended_s: float = 0.0
    record: dict[str, Any] = field(default_factory=dict)
    dump: list[str] = field(default_factory=list)
    told_to_end_s: float | None = None

    @property
    def lives(self) -> bool:
        return self.exit_code is None

    @property
    def failed(self) -> bool:
        return "failure" in self.record or bool(self.exit_code)

    @property
    def left_early(self) -> bool:
        """Whether its exit code says that all is well, but its target did not come to its end."""
        return self.exit_code == 0 and not self.record

    def result(self) -> Any:
        return json_values.loads(self.record["result"]) if "result" in self.record else None

    def failure(self, began_s: float) -> Failure:
        said: dict[str, Any] = self.record.get("failure") or {
            "time_s": self.ended_s,
            "host": socket.gethostname(),
            "message": "left with exit code 0 before its function returned" * self.left_early,
            "traceback": without_launcher(self.dump),
            "exit_code": self.exit_code or 1,
            "signal": self.signal,
        }
        return Failure(
            rank=self.info.rank,
            local_rank=self.info.local_rank,
            pid=self.pid,
            ended_by_launcher=self._was_ended(said["time_s"]),
            **{**said, "time_s": said["time_s"] - began_s},
        )

    def _was_ended(self, failed_s: float) -> bool:
        """Whether it failed because it was told to end, and not just when it was told."""
        if self.told_to_end_s is None:
            return False
        obeyed = "failure" in self.record or self.exit_code == 128 + signal.SIGTERM
        return failed_s >= self.told_to_end_s + (0 if obeyed else REAPING_LAG_S)


def without_launcher(dump: list[str]) -> str:
    """The stacks that faulthandler dumped, without the launcher's frames below the target's."""
    return "\n".join(line for line in dump if f'File "{HERE}{os.sep}' not in line)
