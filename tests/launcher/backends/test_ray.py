"""A real Ray cluster on this machine, of two nodes with room for 3 and 2 ranks."""

import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import launcher
from launcher import target
from launcher.backends.ray import ray_cluster
from launcher.backends.ray.ray_signals import DeferredSignals
from launcher.errors import LaunchError, LaunchInterrupted, LaunchTimeout
from launcher.job import Job
from launcher.launch_info import LaunchInfo
from launcher.records import json_values

ROOT = Path(__file__).parents[3]
WORK = """
import os, signal, socket, time
import launcher

def show():
    return launcher.current().to_bytes()

def meet():
    info = launcher.current()
    secret = os.pread(int(info.extras["secret_fd"]), 32, 0)
    return [info.to_bytes(), secret, _greeting(info), dict(os.environ)]

def _greeting(info):
    if info.rank == 0:
        with socket.socket(fileno=os.dup(int(info.extras["master_fd"]))) as listener:
            for _ in range(info.world_size - 1):
                with listener.accept()[0] as peer:
                    peer.sendall(b"welcome")
        return "master"
    with socket.create_connection((info.master_addr, info.master_port), timeout=20) as peer:
        return peer.recv(100).decode()

def fail(rank, how):
    if launcher.current().rank != rank:
        time.sleep(60)
    if how == "raise":
        raise KeyError("layer 3")
    os.kill(os.getpid(), signal.SIGKILL)

def sleep(seconds):
    time.sleep(seconds)

def end(launcher_pid):
    if launcher.current().rank == 1:
        os.kill(launcher_pid, signal.SIGTERM)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Functions for the ranks, while this process is connected to the cluster."""
    ray = pytest.importorskip("ray", reason="runs after `pip install ray`")
    from ray.cluster_utils import Cluster

    folder = tmp_path_factory.mktemp("ray")
    (folder / "work_under_ray.py").write_text(WORK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{folder}")
        patch.syspath_prepend(folder)
        head = {"num_cpus": 3, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(num_cpus=2)
            ray.init(address=cluster.address, log_to_driver=False)
            import work_under_ray

            yield work_under_ray
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(scope="module")
def five(work):
    """What each of five ranks says: its LaunchInfo, the secret, its greeting, and its variables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRUMLINE_PATIENCE", "7")
        return launcher.launch(work.meet, nprocs=5, launcher="ray", launch_id="ray", timeout_s=60)


def test_ranks_spread_unevenly_over_nodes_know_each_other(five):
    infos = [LaunchInfo.from_bytes(data) for data, *_ in five]
    assert [info.rank for info in infos] == [0, 1, 2, 3, 4]
    assert [info.local_world_size for info in infos] == [3, 3, 3, 2, 2]
    assert [info.local_rank for info in infos] == [0, 1, 2, 0, 1]
    assert {(info.launch_id, info.world_size) for info in infos} == {("ray", 5)}


def test_rank_0_listens_where_the_others_look(five):
    assert [greeting for _, _, greeting, _ in five] == ["master"] + ["welcome"] * 4


def test_ranks_have_the_variables_of_torchrun_and_one_free_port(five):
    environs = [environ for *_, environ in five]
    assert [environ["RANK"] for environ in environs] == ["0", "1", "2", "3", "4"]
    assert [environ["LOCAL_RANK"] for environ in environs] == ["0", "1", "2", "0", "1"]
    assert [environ["GROUP_RANK"] for environ in environs] == ["0", "0", "0", "1", "1"]
    (port,) = {environ["MASTER_PORT"] for environ in environs}
    assert port not in {environ["DRUMLINE_MASTER_PORT"] for environ in environs}


def test_settings_of_the_user_reach_the_ranks_of_every_node(five):
    """Only those of the shell in which `ray start` was typed did."""
    assert {environ.get("DRUMLINE_PATIENCE") for *_, environ in five} == {"7"}


def test_ranks_share_a_secret(five):
    (secret,) = {secret for _, secret, *_ in five}
    assert len(secret) == 32


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [("raise", 1, "KeyError: 'layer 3'"), ("kill", 1, "rank 1")],
)
def test_first_failure_ends_the_launch_and_is_named(work, how, code, message):
    with pytest.raises(LaunchError, match=message) as raised:
        launcher.launch(work.fail, nprocs=2, launcher="ray", args=(1, how), timeout_s=50)
    assert raised.value.exit_code == code
    assert raised.value.failures[0].rank == 1


FAILING_ACTOR = """
import sys
from launcher import LaunchInfo
from launcher.backends.ray.ray_actor import RankActor
sys.excepthook = lambda *error: print("Ray's hook")  # as in Ray's workers
info = LaunchInfo("once", 1, 1, 0, 0, "127.0.0.1", 1).to_bytes()
print(RankActor().run(info, 1, 0, bytes(32), False, "/", "script", sys.argv[1], "[]"))
"""


def test_a_failure_is_returned_and_not_printed_as_well(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("1 / 0")
    run = [sys.executable, "-c", FAILING_ACTOR, str(script)]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ended.stdout.startswith('{"failure"') and "division by zero" in ended.stdout, ended


def test_launch_that_takes_too_long_is_ended(work):
    with pytest.raises(LaunchTimeout, match=r"not over after 1.5 s"):
        launcher.launch(work.sleep, nprocs=2, launcher="ray", args=(60,), timeout_s=1.5)


def test_signal_to_the_launcher_ends_the_launch(work):
    job = Job(target.of(work.end), args=(os.getpid(),), nprocs=2)
    with pytest.raises(LaunchInterrupted, match="stopped by SIGTERM") as raised:
        ray_cluster.run(job)
    assert raised.value.exit_code == 128 + signal.SIGTERM


def test_more_ranks_than_the_cluster_has_cpus_is_an_error_at_once(work):
    with pytest.raises(LaunchError, match=r"6 ranks need a CPU each.*has 5"):
        launcher.launch(work.show, nprocs=6, launcher="ray")


def test_the_command_of_the_documents_gives_every_node_its_ranks(work, documented):
    """As printed, but with room for two ranks on a node, and not where the cluster was started."""
    line = documented("running.md", "drumline run --launcher ray --nnodes 2")
    address = sys.modules["ray"].get_runtime_context().gcs_address
    output = line(words=[("-n 4", "-n 2")], environ={**os.environ, "RAY_ADDRESS": address})
    assert sorted(re.findall(r"rank (\d) of 4, local rank (\d)", output)) == [
        (str(rank), str(rank % 2)) for rank in range(4)
    ]


@pytest.mark.soak  # under torchrun and MPI they run in CI
def test_every_recipe_runs_unchanged_under_ray(work):
    script = ROOT / "tests" / "programs" / "every_script.py"
    recipes = [str(ROOT / "examples" / "recipes")]
    assert len(launcher.launch(script, 2, launcher="ray", args=recipes, timeout_s=90)) == 2


class Elsewhere:
    """In place of ray: its init() says what Ray says of the clusters that it finds."""

    def __init__(self, says):
        self.says, self.started = says, []

    def init(self, **options):
        if "address" in options:
            raise ConnectionError(self.says)
        self.started.append(options)


@pytest.mark.parametrize("says", ["Found multiple active Ray instances: {}", "1.2.3.4:6 is gone"])
def test_a_cluster_that_cannot_be_joined_is_an_error_and_no_new_one(says):
    """All ranks once ran on this machine, in a cluster of its own, and nothing said so."""
    ray = Elsewhere(says)
    with pytest.raises(LaunchError, match=r"a cluster that cannot be joined.*RAY_ADDRESS"):
        ray_cluster._connect(ray, Job(print, 2))
    assert ray.started == []


def test_without_a_cluster_a_new_one_is_started():
    ray = Elsewhere("Could not find any running Ray instance. Please specify ...")
    ray_cluster._connect(ray, Job(print, 2))
    assert len(ray.started) == 1


class Actors:
    """In place of ray, whose calls have all ended: it names them in this order."""

    exceptions = types.SimpleNamespace(RayError=RuntimeError)

    def __init__(self, *calls):
        self.calls = calls

    def wait(self, calls, timeout):
        return list(self.calls), []

    def get(self, call):
        if isinstance(call, Exception):
            raise call
        return json_values.dumps({"failure": dict(call)})

    def nodes(self):
        return [{"NodeID": "first", "NodeManagerAddress": "10.0.0.7"}]


def test_a_rank_that_reports_the_failure_of_another_is_not_the_cause():
    """Ray names results that have come at once in any order, and the first was told."""
    common = {"type": "PeerLost", "traceback": "..."}
    consequence = (*{"rank": 0, "blames": (1,), **common}.items(),)
    cause = (*{"rank": 1, **common, "type": "KeyError"}.items(),)
    infos = [LaunchInfo("x", 3, 3, rank, rank, "x", 1) for rank in range(3)]
    calls = dict(zip((consequence, cause, RuntimeError("gone")), infos, strict=True))
    deadline = time.monotonic() + 10
    _, failures = ray_cluster._gather(Actors(*calls), calls, deadline, DeferredSignals())
    assert [failure.rank for failure in failures] == [2, 1, 0]


def test_an_actor_that_cannot_start_is_an_error_that_names_its_node():
    """As on a node without drumline: a traceback of Ray's."""
    gone = RuntimeError("No module named 'launcher'")
    listen = types.SimpleNamespace(remote=lambda *_: gone)
    actor = ray_cluster.PlacedActor(types.SimpleNamespace(listen=listen), "first")
    job, deadline = Job(target.of(print), 1), time.monotonic() + 10
    with pytest.raises(LaunchError, match=r"10.0.0.7: No module named"):
        ray_cluster._rendezvous(Actors(gone), job, [actor], DeferredSignals(), deadline)


def test_a_signal_that_is_ignored_stays_so(monkeypatch):
    """A launch under nohup ended with its terminal."""
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with DeferredSignals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, old)


def test_the_handler_of_ray_for_a_signal_that_is_ignored_is_undone():
    """It stayed during the launch, and after it."""
    old = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with DeferredSignals() as signals:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as by ray.init()
            signals.install()
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, old)


def test_a_time_that_joining_ray_has_taken_is_not_said_to_be_the_cluster_s():
    """The cluster was said to have no room, though it was not asked."""
    group = types.SimpleNamespace(ready=lambda: "ready")
    calls = {"placement_group": lambda *_, **__: group, "remove_placement_group": lambda _: None}
    util, resources = types.SimpleNamespace(**calls), lambda: {"CPU": 2.0}
    free = {"cluster_resources": resources, "available_resources": resources}
    ray = types.SimpleNamespace(util=util, **free)
    signals, job, over = DeferredSignals(), Job(print, 2, timeout_s=3.0), time.monotonic()
    with pytest.raises(LaunchTimeout, match="not over after 3"):
        ray_cluster._placed(ray, job, signals, over).__enter__()
    signals._received.append(signal.SIGTERM)
    with pytest.raises(LaunchInterrupted):
        ray_cluster._placed(ray, job, signals, over).__enter__()
