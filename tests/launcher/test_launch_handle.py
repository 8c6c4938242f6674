"""launcher.start: a launch beside a program that goes on."""

import asyncio
import contextlib
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import launcher
from launcher.local import launch_local
from launcher.system import linux

SOON_S = 30  # a launch that does nothing ends by then
FOREVER_S = 120  # longer than any test may take


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """The functions of this file, for ranks that import them."""
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    for work in (rank_and, sleep_on_rank_0, die_untold_on_rank_1):
        monkeypatch.setattr(work, "__module__", "test_launch_handle")


def rank_and(*args):
    return [launcher.current().rank, *args]


def sleep_on_rank_0(path):
    """Rank 1 ends once the file is there; the others sleep."""
    while launcher.current().rank == 1 and not os.path.exists(path):
        time.sleep(0.01)
    if launcher.current().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER_S)


def crash_amid_the_result():
    write = os.write

    def write_a_part(fd, data):
        write(fd, data[:100])
        os.kill(os.getpid(), signal.SIGSEGV)

    os.write = write_a_part
    return "a" * 1000


def await_pids(launch):
    while not (launch.pids and all(launch.pids)):
        time.sleep(0.01)
    return launch.pids


def is_alive(pid):
    return os.path.exists(f"/proc/{pid}")


def test_results_come_to_whoever_waits():
    launch = launcher.start(rank_and, 2, args=("x",))
    assert launch.wait() == [[0, "x"], [1, "x"]]
    assert launch.poll() == 0 and launch.wait(timeout_s=0) == [[0, "x"], [1, "x"]]
    launch.stop()  # has nothing to do any longer


def test_a_program_that_forks_just_then_has_results(monkeypatch):
    """The child kept the pipe of the fork server open, and its end was awaited for ever."""
    fds, close = [], launch_local._close

    def fork_and_close(plan):
        fds.append(os.dup(plan.reports))
        close(plan)

    monkeypatch.setattr(launch_local, "_close", fork_and_close)
    try:
        assert launcher.start(rank_and, 2).wait(SOON_S) == [[0], [1]]
    finally:
        os.close(fds[0])


def test_two_launches_are_awaited_in_one_event_loop():
    async def both():
        return await asyncio.gather(*(launcher.start(rank_and, 1, args=(k,)) for k in range(2)))

    assert asyncio.run(both()) == [[[0, 0]], [[0, 1]]]


def test_a_task_that_stops_awaiting_leaves_the_launch_as_it_is(tmp_path):
    """poll() raised CancelledError after asyncio.wait_for, and no result came any longer."""

    async def give_up(launch):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(launch, 0.01)

    with launcher.start(sleep_on_rank_0, 1, args=(str(tmp_path / "never"),)) as launch:
        asyncio.run(give_up(launch))
        assert launch.poll() is None
    assert launch.poll() == 128 + signal.SIGTERM


def test_the_first_death_is_reported_while_the_launch_goes_on(tmp_path):
    failures, reported = [], threading.Event()

    def on_failure(failure):
        failures.append(failure)
        reported.set()

    with launcher.start(
        sleep_on_rank_0, 2, args=(str(tmp_path / "go"),), on_failure=on_failure
    ) as launch:
        pids = await_pids(launch)
        assert launch.poll() is None and all(map(is_alive, pids))
        with pytest.raises(TimeoutError, match="did not finish within"):
            launch.wait(timeout_s=0.01)
        (tmp_path / "go").touch()
        assert reported.wait(FOREVER_S)
        with pytest.raises(launcher.LaunchError, match=r"rank 1 .*SIGKILL"):
            launch.wait()
    assert [(failure.rank, failure.pid, failure.signal) for failure in failures] == [
        (1, pids[1], signal.SIGKILL)
    ]
    assert launch.poll() == 128 + signal.SIGKILL and not any(map(is_alive, pids))


def die_untold_on_rank_1(folder):
    """Rank 1 dies while the fork server is suspended; rank 0 fails once it sees that."""
    pid_file, seen = Path(folder) / "pid", Path(folder) / "seen"
    if launcher.current().rank == 1:
        server = os.getppid()
        (pid_file.with_suffix(".part")).write_text(f"{os.getpid()} {server}")
        pid_file.with_suffix(".part").rename(pid_file)
        os.kill(server, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)
    while (
        not pid_file.exists() or linux.process_stat(int(pid_file.read_text().split()[0])).is_alive
    ):
        time.sleep(0.01)
    seen.touch()
    raise ConnectionError("rank 1 is gone")


def test_a_rank_that_crashes_while_it_sends_its_result_is_named():
    """Its stacks cut into the result, which the launcher could not read and failed itself."""
    with pytest.raises(launcher.LaunchError, match=r"rank 0 .*SIGSEGV"):
        launcher.launch(crash_amid_the_result, 1)


def test_a_rank_that_fails_for_the_death_of_another_comes_after_it(tmp_path):
    """The fork server told of the death later than the survivor of its error, which was named."""
    failures = []
    launch = launcher.start(
        die_untold_on_rank_1, 2, args=(str(tmp_path),), on_failure=failures.append
    )
    while not (tmp_path / "seen").exists():
        time.sleep(0.01)
    time.sleep(0.05)  # now rank 0's error is there, and the death is not told
    os.kill(int((tmp_path / "pid").read_text().split()[1]), signal.SIGCONT)
    with pytest.raises(launcher.LaunchError, match=r"rank 1 .*SIGKILL"):
        launch.wait()
    assert [failure.rank for failure in failures] == [1]


def test_a_death_comes_first_in_a_program_with_many_open_files(tmp_path):
    """Descriptors above 1023 made the launch end with ValueError instead of the failure."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while opened.enter_context(open(os.devnull)).fileno() < 1100:
            pass
        test_a_rank_that_fails_for_the_death_of_another_comes_after_it(tmp_path)


def test_a_launch_is_stopped_from_any_thread(tmp_path):
    launch = launcher.start(sleep_on_rank_0, 2, args=(str(tmp_path / "never"),))
    pids = await_pids(launch)
    stopping = threading.Thread(target=launch.stop)
    stopping.start()
    with pytest.raises(launcher.LaunchInterrupted, match="SIGTERM"):
        launch.wait()
    stopping.join()
    assert launch.poll() == 128 + signal.SIGTERM and not any(map(is_alive, pids))


def test_a_callback_that_raises_does_not_keep_the_ranks_alive(tmp_path, caplog):
    (tmp_path / "go").touch()
    launch = launcher.start(
        sleep_on_rank_0, 2, args=(str(tmp_path / "go"),), on_failure=lambda failure: 1 // 0
    )
    with pytest.raises(launcher.LaunchError, match="rank 1"):
        launch.wait()
    assert "on_failure raised" in caplog.text


def test_what_cannot_be_started_is_refused_at_once():
    with pytest.raises(launcher.TargetError, match="nested"):
        launcher.start(lambda: None)
    with pytest.raises(launcher.TargetError, match="cannot open the script"):
        launcher.start("missing.py")


def test_importing_the_launcher_loads_nothing_of_it():
    code = "import sys, launcher; sys.exit('launcher.launch_handle' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
