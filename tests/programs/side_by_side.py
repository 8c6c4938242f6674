"""All tests in a few processes at once, each of which takes the next file that no other has taken.

    python -m tests.programs.side_by_side 3 [options of pytest]

Most tests of processes wait for something, so there may be twice as many as cores. What all need is
imported once, and they are forked from that. The last of several takes the files from the
last one on, for the tests that compute come last, and before them those that take long, so that
none of these is the last one of all. What the first says comes at once, and that of the others
below.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from launcher.system import linux
from tests.programs.warm import WARM, WarmParent, prepare

LONG = ("test_failures.py", "test_rank_environment.py", "test_parallelize.py", "test_families.py")
QUIETLY = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # of plugins imported already


class Share:
    """The tests of the files that this process was the first to come to."""

    def __init__(self, taken: Path, warm: WarmParent, from_the_end: bool) -> None:
        self._taken, self._warm, self._from_the_end = taken, warm, from_the_end
        self._ours: dict[Path, bool] = {}

    def pytest_configure(self, config: pytest.Config) -> None:
        config.pluginmanager.register(self._warm, WARM)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._from_the_end:
            files = [*dict.fromkeys(item.path for item in items)]
            items.sort(
                key=lambda item: (item.path.name in LONG, files.index(item.path)), reverse=True
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """True leaves a test out."""
        if item.path not in self._ours:
            self._ours[item.path] = self._take(item.path)
            if self._ours[item.path]:  # the test before it left up what the next file needed
                item.session._setupstate.teardown_exact(item)
        return None if self._ours[item.path] else True

    def _take(self, path: Path) -> bool:
        with contextlib.suppress(FileExistsError):
            (self._taken / "-".join(path.parts[1:])).touch(exist_ok=False)
            return True
        return False


def forked(count: int) -> tuple[int, list[int]]:
    """In each of so many processes its number, and in their parent count and their pids."""
    parent, pids = os.getpid(), []
    for number in range(count):
        pids.append(os.fork())
        if not pids[-1]:
            linux.die_with(parent)
            random.seed()
            return number, []
    return count, pids


def main(count: int, options: list[str]) -> int:
    prepare()
    folder = Path(tempfile.mkdtemp(prefix="tests-"))
    logs = [folder / f"{number}.log" for number in range(1, count)]
    parents = [WarmParent(forked=True) for _ in range(count)]  # ours: tests count their children
    number, pids = forked(count)
    if number < count:
        share = Share(folder, parents[number], from_the_end=0 < number == count - 1)
        if number:
            with logs[number - 1].open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
        return pytest.main([*QUIETLY, *options], plugins=[share])
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    for warm in reversed(parents):  # each has the doors of those before it
        warm.close()
    for log in logs:
        sys.stdout.write(log.read_text())
    shutil.rmtree(folder)
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
