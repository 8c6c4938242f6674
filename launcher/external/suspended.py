"""The processes of a launch that somebody has suspended, told once each.

A backend launcher waits for a suspended process without a word, and so do the ranks that have no
Coordinator, which would notice.
"""

from __future__ import annotations

from launcher.external.node_messages import notice
from launcher.system import linux


class SuspendedProcesses:
    """The suspended processes at and below one process of this node."""

    def __init__(self, top: int) -> None:
        self.top = top
        self._suspended: dict[int, str] = {}

    def tell(self) -> None:
        """Print a line for each that is suspended now, and was not at the last look."""
        before, self._suspended = self._suspended, self._find()
        for pid, name in self._suspended.items():
            if pid not in before:
                notice(
                    f"{name} was suspended (SIGSTOP), and the launch will wait for it: "
                    f"`kill -CONT {pid}` resumes it."
                )

    def note(self) -> str:
        """The end of a sentence about a launch that did not end in time; empty if none is."""
        names = ", ".join(self._find().values())
        return f". Suspended meanwhile (SIGSTOP): {names}" if names else ""

    def _find(self) -> dict[int, str]:
        pids = sorted({self.top, *linux.descendants(self.top)})
        stats = {pid: linux.process_stat(pid) for pid in pids}
        # Not "t": a debugger that holds it knows.
        stopped = [pid for pid, stat in stats.items() if stat and stat.state == "T"]
        return {pid: f"{linux.process_name(pid)} (pid {pid})" for pid in stopped}
