"""All tests in a few processes at once, each of which takes the next file that no other has taken.

    python -m tests.programs.side_by_side 3 [options of pytest]

Most tests of processes wait for something, so there may be twice as many as cores. What all need is
imported once and the tests are collected once, and they are forked from that. The last of several
takes the files from the last one on, for the tests that compute come last, and before them those
that take long, so that none of these is the last one of all. What the first says comes at once, and
that of the others below.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

from launcher.system import linux
from tests.programs.warm import WARM, WarmParent, prepare

LONG = ("test_failures.py", "test_rank_environment.py", "test_parallelize.py", "test_families.py")
QUIETLY = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # of plugins imported already


class Share:
    """The tests of the files that this process was the first to come to."""

    def __init__(self, taken: Path) -> None:
        self._taken = taken
        self._ours: dict[Path, bool] = {}

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


class Processes:
    """Forks this process once it has collected the tests: each goes on with a share of them."""

    def __init__(self, count: int) -> None:
        self._count, self._folder = count, Path(tempfile.mkdtemp(prefix="tests-"))
        self._warm = [WarmParent(forked=True) for _ in range(count)]  # tests count their children

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        if session.testsfailed or session.config.option.collectonly:
            return  # what could not be collected is told
        gc.collect()
        gc.freeze()  # what is never collected is never written to, so its pages stay shared
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
        parent, pids = os.getpid(), []
        for number in range(self._count):
            pids.append(os.fork())
            if not pids[-1]:
                linux.die_with(parent)
                return self._begin(number, session)
        self._end(pids)

    def _begin(self, number: int, session: pytest.Session) -> None:
        """In a child: what it says goes into its log, except what the first says."""
        random.seed()
        plugins = session.config.pluginmanager
        if number:
            captured = plugins.get_plugin("capturemanager")
            captured.stop_global_capturing()
            with self._log(number).open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            captured.start_global_capturing()
            captured.suspend_global_capture()
        plugins.register(self._warm[number], WARM)
        plugins.register(Share(self._folder))
        if 0 < number == self._count - 1:
            files = [*dict.fromkeys(item.path for item in session.items)]
            session.items.sort(
                key=lambda item: (item.path.name in LONG, files.index(item.path)), reverse=True
            )

    def _end(self, pids: list[int]) -> NoReturn:
        """In the parent: ends with the code of the one that failed."""
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        self.close()
        for number, code in enumerate(codes):
            sys.stdout.write(self._log(number).read_text() if number else "")
            if code < 0:
                sys.stdout.write(f"\nprocess {number} of the tests was ended by signal {-code}\n")
        sys.stdout.flush()
        shutil.rmtree(self._folder)
        os._exit(max(map(abs, codes)))

    def close(self) -> None:
        for warm in reversed(self._warm):  # each has the doors of those before it
            warm.close()

    def _log(self, number: int) -> Path:
        return self._folder / f"{number}.log"


def main(count: int, options: list[str]) -> int:
    prepare()
    return pytest.main([*QUIETLY, *options], plugins=[Processes(count)])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
