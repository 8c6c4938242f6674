"""Ranks that die or are suspended, and start again; their model is a counter."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures import ThreadPoolExecutor as ThreadPool
from contextlib import closing
from types import SimpleNamespace

import pytest

import launcher
from drumline import timings
from drumline.errors import PeerLost
from drumline.serving.front.rank_launch import follow_front
from drumline.serving.front.remote_scheduler import RemoteScheduler
from drumline.serving.front.restarting_ranks import RankConnection, RestartingRanks, nodes_within
from drumline.serving.sampling import SamplingParams
from drumline.serving.scheduler import Generation, ServerBusy, ServingLimits
from drumline.timings import ModelTimings
from launcher.authentication.launch_token import LaunchToken
from tests.programs.counting_rank import count, count_on_devices

LIMITS = ServingLimits(max_length=100, max_running=1, max_waiting=2)


class TellingScheduler(RemoteScheduler):
    """Calls on_ready with the first message of each rank 0."""

    def __init__(self, on_ready, on_loss=print):
        super().__init__(LIMITS, on_loss)
        self.on_ready = on_ready

    def resume(self, info, send):
        self.on_ready(info)
        super().resume(info, send)


def sequence(max_tokens):
    """A sequence, what it posts a token or its end to, and how it ended."""
    posted, reasons = threading.Semaphore(0), []

    def on_end(reason):
        reasons.append(reason)
        posted.release()

    params = SamplingParams(max_tokens=max_tokens)
    return Generation([5], params, lambda _: posted.release() or True, on_end), posted, reasons


def job(work, *arguments, **fields):
    """Two ranks that call work with the arguments, behind the front's address."""
    target = launcher.Target("function", f"{work.__module__}:{work.__qualname__}")
    return launcher.Job(target, arguments, **fields)


def wait_for(posted, number):
    for _ in range(number):
        assert posted.acquire(timeout=60)


def pids_of(rank_0):
    """Of both ranks, which are children of one fork server, once both are."""
    parent, deadline = launcher.linux.process_stat(rank_0).parent, time.monotonic() + 60
    while time.monotonic() < deadline:
        processes = launcher.linux.processes().items()
        others = [pid for pid, stat in processes if stat.parent == parent and pid != rank_0]
        if others:
            return [rank_0, *others]
    raise AssertionError("rank 1 was not started")


@pytest.fixture
def serve(monkeypatch):
    """Starts ranks of which each sends two tokens of a sequence; gives the pids of each start."""
    monkeypatch.setattr(timings, "TIMINGS", ModelTimings(suspended_s=0.5, ranks_end_s=1))

    def run(scheduler, restarts):
        starts = []
        scheduler.on_ready = lambda info: starts.append(pids_of(info["pid"]))
        return RestartingRanks(scheduler, job(count, 2), restarts), starts

    return run


def test_a_sequence_survives_its_ranks_until_no_restart_is_left(serve):
    losses = []
    scheduler = TellingScheduler(print, losses.append)
    ranks, starts = serve(scheduler, restarts=2)
    with closing(ranks):
        ranks.wait_until_ready()
        item, posted, reasons = sequence(9)
        scheduler.submit([item])
        for rank, number in ((1, signal.SIGKILL), (0, signal.SIGSTOP)):
            wait_for(posted, 2)
            assert not scheduler.is_restarting and scheduler.num_running == 1
            os.kill(starts[-1][rank], number)
        wait_for(posted, 2)
        assert item.new_tokens == [0, 1, 2, 3, 4, 5] and scheduler.num_restarts == 2
        os.kill(starts[-1][0], signal.SIGKILL)
        wait_for(posted, 1)
    assert reasons == losses and "no restart is left" in str(losses[0])
    assert len({pid for pids in starts for pid in pids}) == 6
    assert not any(launcher.linux.process_stat(pid) for pids in starts for pid in pids)


def test_a_sequence_that_is_cancelled_before_its_first_token_is_told_to_rank_0_at_once():
    """A long prompt was computed to its end for a client that had left."""
    scheduler, sent = RemoteScheduler(LIMITS, print), []
    info = {"vocabulary": 9, "end_tokens": [], "device_map": None, "peers": []}
    scheduler.resume(info, sent.append)
    item, _, reasons = sequence(9)
    scheduler.submit([item])
    item.cancel()
    item.cancel()
    assert reasons == ["cancelled"] and scheduler.unfinished() == []
    assert [[*message] for message in sent] == [["start"], ["cancel"]]


def test_a_rank_that_is_suspended_for_less_than_the_patience_goes_on(serve, monkeypatch):
    """It was killed after 3 s, whatever was set."""
    monkeypatch.setenv("DRUMLINE_PATIENCE", "60")
    scheduler = TellingScheduler(print)
    ranks, starts = serve(scheduler, restarts=2)
    with closing(ranks):
        ranks.wait_until_ready()
        os.kill(starts[0][0], signal.SIGSTOP)
        time.sleep(3 * timings.TIMINGS.suspended_s)
        os.kill(starts[0][0], signal.SIGCONT)
        item, posted, _ = sequence(2)
        scheduler.submit([item])
        wait_for(posted, 2)
        assert item.new_tokens == [0, 1] and scheduler.num_restarts == 0 and len(starts) == 1


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sequence_survives_processes_that_are_lost_while_ranks_start_again(monkeypatch, number):
    """From the fork of the first new process on, until the ranks are ready and later."""
    quick = ModelTimings(suspended_s=0.5, ranks_end_s=1, start_pause_s=0.1)
    monkeypatch.setattr(timings, "TIMINGS", quick)
    infos = queue.SimpleQueue()
    scheduler = TellingScheduler(infos.put)
    children = set(launcher.linux.descendants(os.getpid()))
    ranks = RestartingRanks(scheduler, job(count, 2), 99)
    with closing(ranks):
        rank_0 = infos.get(timeout=60)["pid"]
        item, posted, _ = sequence(90)
        scheduler.submit([item])
        wait_for(posted, 2)
        for delay_s in (0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3):
            before = set(launcher.linux.descendants(os.getpid()))
            os.kill(rank_0, signal.SIGKILL)
            while not (new := sorted(set(launcher.linux.descendants(os.getpid())) - before)):
                time.sleep(0.001)
            time.sleep(delay_s)
            launcher.linux.send_signal(new[-1], number)
            while launcher.linux.process_stat(new[-1]) or scheduler.is_restarting:
                time.sleep(0.01)
            while not infos.empty():
                rank_0 = infos.get()["pid"]
            wait_for(posted, 2)
        assert scheduler.num_restarts >= 7
        assert item.new_tokens == list(range(len(item.new_tokens)))
    assert set(launcher.linux.descendants(os.getpid())) <= children


def test_fewer_ranks_go_on_where_not_all_come_up_until_they_are_too_few(monkeypatch, tmp_path):
    """A device is gone, comes back, and is gone again when one rank has become too few."""
    monkeypatch.setattr(timings, "TIMINGS", ModelTimings(start_pause_s=0.1))
    losses, pids, is_ready = [], [], threading.Semaphore(0)
    (tmp_path / "devices").write_text("2 1")

    def on_ready(info):
        pids.append(info["pid"])
        is_ready.release()

    def on_loss(loss):
        losses.append(loss)
        is_ready.release()

    scheduler = TellingScheduler(on_ready, on_loss)
    work = job(count_on_devices, 2, str(tmp_path / "devices"))
    ranks = RestartingRanks(scheduler, work, 9)
    with closing(ranks):
        for devices, num_missing, num_restarts in (("1 1", 1, 3), ("2 1", 0, 4), ("1 2", 1, 7)):
            wait_for(is_ready, 1)
            (tmp_path / "devices").write_text(devices)
            os.kill(pids[-1], signal.SIGKILL)
            wait_for(is_ready, 1)
            assert scheduler.num_missing_ranks == num_missing
            assert scheduler.num_restarts == num_restarts
            is_ready.release()
    assert len(pids) == 3 and "1 of 2 cannot hold the model: rank 0" in str(losses[0])


def test_ranks_that_share_layers_are_left_out_together_and_never_all(monkeypatch):
    """One rank of two was started, whose layers tp=2 cannot split, and that was the end."""
    started = []

    def serve_once(ranks, nodes, num_ranks):
        started.append(num_ranks)
        ranks._failed_starts += 1
        return PeerLost("it did not come up")

    pauses_between_starts(monkeypatch, 5, lambda nodes, *_: nodes, serve_once, tp=2)
    assert started == [4, 4, 2, 2, 2, 2]


def test_nodes_that_cannot_be_gathered_are_no_ranks_that_did_not_come_up(monkeypatch):
    """Every time there was one rank less."""
    outcomes, started = iter([True, True, False, False, True, True]), []

    def gather(nodes, *_):
        if not next(outcomes):
            raise OSError("no descriptors are left")
        return nodes

    def serve_once(ranks, nodes, num_ranks):
        started.append(num_ranks)
        ranks._failed_starts += 1
        return PeerLost("it did not come up")

    assert len(pauses_between_starts(monkeypatch, 5, gather, serve_once)) == 5
    assert started == [4, 4, 3, 3]


def test_ranks_that_do_not_come_up_are_started_again_after_a_pause(monkeypatch):
    """All restarts were used up within milliseconds."""
    failures = iter([None, OSError("no process can be started"), PeerLost("it did not come up")])

    def serve_once(ranks, *_):
        failure = next(failures)
        ranks._failed_starts = 0 if failure is None else ranks._failed_starts + 1
        if isinstance(failure, OSError):
            raise failure
        return failure or PeerLost("it came up, and was killed")

    pauses = pauses_between_starts(monkeypatch, 2, lambda nodes, *_: nodes, serve_once)
    assert pauses == [timings.TIMINGS.start_pause_s]


def pauses_between_starts(monkeypatch, restarts, gather, serve_once, tp=1):
    """Of ranks that were ready, the pauses until no restart is left."""
    monkeypatch.setattr(RestartingRanks, "_serve_once", serve_once)
    ranks, was_ready, pauses = object.__new__(RestartingRanks), Future(), []
    was_ready.set_result(None)
    ranks._leader = SimpleNamespace(gather=gather, ranks_of_nodes=[4])
    ranks._scheduler, ranks._job = SimpleNamespace(), SimpleNamespace(nnodes=1)
    ranks._restarts, ranks._tp, ranks._failed_starts = restarts, tp, 0
    ranks._is_closed = SimpleNamespace(is_set=lambda: False, wait=pauses.append)
    ranks._was_ready = was_ready
    ranks._serve()
    return pauses


FOLLOW = """
import os
import sys
import launcher
from launcher.authentication import launch_token
from drumline.serving.front.rank_launch import follow_front
work = launcher.Target("function", "tests.programs.counting_rank:count")
place = {"nnodes": 2, "node_rank": 1, "master_port": int(sys.argv[1])}
follow_front(launcher.Job(work, ("", (), 2), 2, token=launch_token.take(os.environ), **place))
"""


@pytest.mark.parametrize(
    ("most", "nodes", "num_ranks"),
    [(9, [0, 1, 3], 6), (5, [0, 1], 5), (3, [0, 3], 3), (2, [0], 2), (1, [0], 1)],
)
def test_where_fewer_ranks_are_to_start_whole_nodes_are_left_out(most, nodes, num_ranks):
    assert nodes_within([0, 1, 3], [2, 3, 4, 1], most) == (nodes, num_ranks)


def test_a_node_that_is_gone_is_done_without_and_comes_in_with_a_restart(
    monkeypatch, capfd, kept_port
):
    """The other node has another number of ranks than the first, and yet another after it."""
    quick = ModelTimings(node_return_s=0.5, ranks_end_s=0.5)
    monkeypatch.setattr(timings, "TIMINGS", quick)
    infos = queue.SimpleQueue()
    scheduler = TellingScheduler(infos.put)
    token = LaunchToken.draw()
    place = {"nprocs": 1, "nnodes": 2, "master_port": kept_port(), "token": token}
    ranks = RestartingRanks(scheduler, job(count, 2, **place), 9)
    command = [sys.executable, "-c", FOLLOW, str(place["master_port"])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environ["DRUMLINE_TOKEN"] = str(token)
    with ThreadPool(1) as pool, subprocess.Popen(command, env=environ) as other, closing(ranks):
        infos.get(timeout=60)
        item, posted, _ = sequence(90)
        scheduler.submit([item])
        wait_for(posted, 2)
        assert scheduler.num_missing_ranks == 0
        other.kill()
        rank_0 = infos.get(timeout=60)["pid"]
        wait_for(posted, 2)
        assert scheduler.num_missing_ranks == 2
        place["nprocs"] = 3
        follower = pool.submit(follow_front, job(count, "", (), 2, node_rank=1, **place))
        until = time.monotonic() + 60
        while "is in the next restart" not in capfd.readouterr().err:
            assert time.monotonic() < until
            time.sleep(0.05)
        os.kill(rank_0, signal.SIGKILL)
        infos.get(timeout=60)
        wait_for(posted, 2)
        assert scheduler.num_missing_ranks == 0 and item.new_tokens == [0, 1, 2, 3, 4, 5]
        ranks.close()
        assert follower.result(60) is None


def test_what_comes_while_ranks_start_waits_for_them_and_the_queue_keeps_its_length(serve):
    scheduler = TellingScheduler(print)
    items = [sequence(2) for _ in range(3)]
    for item, _, _ in items:
        scheduler.submit([item])
    with pytest.raises(ServerBusy):
        scheduler.submit([sequence(2)[0]])
    assert scheduler.is_restarting and (scheduler.num_running, scheduler.num_waiting) == (0, 3)
    items[1][0].cancel()
    ranks, starts = serve(scheduler, restarts=0)
    with closing(ranks):
        for (_, posted, reasons), tokens, end in zip(
            items, (2, 0, 2), ("length", "cancelled", "length"), strict=True
        ):
            wait_for(posted, tokens + 1)
            assert reasons == [end]
    assert not any(map(launcher.linux.process_stat, starts[0]))


def test_ranks_that_never_were_ready_are_not_started_again(serve):
    ranks = RestartingRanks(RemoteScheduler(LIMITS, print), job(count, "two", 2), 3)
    with closing(ranks), pytest.raises(launcher.LaunchError, match="TypeError"):
        ranks.wait_until_ready()


def test_a_connection_can_be_closed_while_rank_0_reads_nothing():
    """A rank 0 that is suspended takes what its socket's buffer holds, and no more."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as rank:
        listener.bind("")  # the kernel chooses a name
        listener.listen()
        connection = RankConnection(listener)
        reader = threading.Thread(target=list, args=(connection.messages(),))
        reader.start()
        rank.connect(listener.getsockname())
        connection.send({"start": ["x" * (8 << 20)]})
        assert rank.recv(1)  # the sender is at it
        connection.close()
        reader.join(60)
        assert not reader.is_alive()
