"""What goes wrong on one rank is told by name to the master, and nobody is left waiting."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaMLP

import communicator
import coordinator
import drumline
from coordinator import Coordinator
from coordinator.store.torch_store import StoreTimeout
from drumline.checkpoint import plan_executor
from drumline.errors import story
from drumline.liveness import stopped_ranks
from drumline.liveness.stopped_ranks import outlast_master
from drumline.pipeline.interrupt import Uninterrupted
from drumline.stages.messages import Kind, Message
from drumline.stages.tp_stage import Leader
from drumline.strategies import pipeline_parallel

HEAD = """
import os, random, signal, sys, threading, time
import torch
import drumline
from coordinator import Coordinator

torch.set_num_threads(1)
prompt = torch.arange(3, 12)[None]

def load(**options):
    coor = Coordinator()
    room = [1 << 30] * coor.world_size
    return coor, drumline.load(sys.argv[1], coor=coor, max_memory=room, **options)
"""


def script(body: str) -> str:
    return HEAD + textwrap.dedent(body)


def ended(processes: list[subprocess.Popen[str]], within_s: float) -> list[tuple[int, str]]:
    """Exit code and standard error of each; fails if one is still there after `within_s`."""
    deadline = time.monotonic() + within_s
    results = []
    for process in processes:
        _, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        results.append((process.returncode, err))
    return results


@pytest.mark.parametrize(("victim", "backend"), [(1, "shm"), (2, "gloo")])
def test_a_rank_that_is_killed_at_any_token_is_named_within_seconds(
    checkpoints, start, victim, backend
):
    body = """
    coor, model = load(backend=sys.argv[3])
    model.generate(prompt, max_new_tokens=2, do_sample=False)
    pid = coor.peers[int(sys.argv[2])].pid
    wait_s = random.random() / 2
    threading.Timer(wait_s, os.kill, (pid, signal.SIGKILL)).start()
    begun = time.monotonic() + wait_s
    try:
        for _ in range(10000):
            model.generate(prompt, max_new_tokens=20, do_sample=False)
    except drumline.PeerLost as lost:
        print(lost)
        sys.exit(0 if time.monotonic() - begun < 5 else 7)
    """
    processes = start(script(body), 3, checkpoints.llama()[1], victim, backend)
    out, err = processes[0].communicate(timeout=60)
    assert processes[0].returncode == 0, err
    assert f"rank {victim} (host {socket.gethostname()}, pid {processes[victim].pid})" in out
    assert "model.layers." in out
    codes = [code for code, _ in ended(processes[1:], within_s=10)]
    assert codes[victim - 1] == -signal.SIGKILL
    assert codes[2 - victim] == 1


@pytest.mark.parametrize(("victim", "backend"), [(1, "shm"), (2, "tcp")])
def test_a_rank_that_is_stopped_is_named_within_seconds(checkpoints, start, victim, backend):
    body = """
    coor, model = load(backend=sys.argv[3])
    model.generate(prompt, max_new_tokens=2, do_sample=False)
    os.kill(coor.peers[int(sys.argv[2])].pid, signal.SIGSTOP)
    begun = time.monotonic()
    try:
        model.generate(prompt, max_new_tokens=20, do_sample=False)
    except drumline.PeerLost as lost:
        print(lost)
        sys.exit(0 if time.monotonic() - begun < 5 else 7)
    """
    processes = start(script(body), 3, checkpoints.llama()[1], victim, backend)
    out, err = processes[0].communicate(timeout=60)
    assert processes[0].returncode == 0, err
    named = f"rank {victim} (host {socket.gethostname()}, pid {processes[victim].pid}) is stopped"
    assert named in out and "model.layers." in out
    bystander = processes[3 - victim]
    assert bystander.wait(timeout=30) == 1
    assert "is stopped" in bystander.communicate()[1]
    processes[victim].send_signal(signal.SIGCONT)
    assert processes[victim].wait(timeout=30) == 1  # it finds that nobody is left


@pytest.mark.parametrize(("victim", "nprocs"), [(1, 2), (3, 4)])
def test_a_stopped_rank_that_follows_in_a_team_is_named_within_seconds(
    checkpoints, start, victim, nprocs
):
    """Nobody hears from it but the first of its team, who waits for it in a sum."""
    body = """
    coor, model = load(tp=2, device_map="auto")
    model.generate(prompt, max_new_tokens=2, do_sample=False)
    os.kill(coor.peers[int(sys.argv[2])].pid, signal.SIGSTOP)
    begun = time.monotonic()
    try:
        model.generate(prompt, max_new_tokens=20, do_sample=False)
    except drumline.PeerLost as lost:
        print(lost)
        sys.exit(0 if time.monotonic() - begun < 8 else 7)
    """
    processes = start(script(body), nprocs, checkpoints.llama()[1], victim)
    out, err = processes[0].communicate(timeout=60)
    assert processes[0].returncode == 0, err
    named = f"rank {victim} (host {socket.gethostname()}, pid {processes[victim].pid}) is stopped"
    assert named in out and "model.layers." in out
    for bystander in range(1, nprocs):
        if bystander != victim:
            assert processes[bystander].wait(timeout=30) == 1
            assert "is stopped" in processes[bystander].communicate()[1]
    processes[victim].send_signal(signal.SIGCONT)
    assert processes[victim].wait(timeout=30) == 1  # it finds that nobody is left


def test_a_rank_that_is_killed_where_it_follows_in_a_later_team_is_named_at_once(
    checkpoints, start
):
    """It was a StageError first, after which nothing worked."""
    body = """
    coor, model = load(tp=2, device_map="auto")
    model.generate(prompt, max_new_tokens=2, do_sample=False)
    os.kill(coor.peers[3].pid, signal.SIGKILL)
    begun = time.monotonic()
    try:
        model.generate(prompt, max_new_tokens=20, do_sample=False)
    except drumline.PeerLost as lost:
        print(lost)
        sys.exit(0 if time.monotonic() - begun < 5 else 7)
    """
    processes = start(script(body), 4, checkpoints.llama()[1])
    out, err = processes[0].communicate(timeout=60)
    assert processes[0].returncode == 0, err
    assert f"rank 3 (host {socket.gethostname()}, pid {processes[3].pid}) is gone" in out
    assert "model.layers.3-5" in out
    assert [code for code, _ in ended(processes[1:3], within_s=30)] == [1, 1]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_of_a_cut_model_is_named_within_seconds(checkpoints, start, victim):
    """Nobody drives: each rank waits for every other in each layer, the first one like any."""
    body = """
    coor = Coordinator()
    model = drumline.load(sys.argv[1], coor=coor, tp=2)
    model.generate(prompt, max_new_tokens=2, do_sample=False)
    if coor.rank == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGSTOP)
    begun = time.monotonic()
    try:
        model.generate(prompt, max_new_tokens=20, do_sample=False)
    except drumline.PeerLost as lost:
        print(lost)
        sys.exit(0 if time.monotonic() - begun < 5 else 7)
    """
    processes = start(script(body), 2, checkpoints.llama()[1], victim)
    out, err = processes[1 - victim].communicate(timeout=60)
    assert processes[1 - victim].returncode == 0, err
    named = f"rank {victim} (host {socket.gethostname()}, pid {processes[victim].pid}) is stopped"
    assert named in out and "its part of every layer" in out
    processes[victim].send_signal(signal.SIGCONT)
    assert processes[victim].wait(timeout=30) == 1  # it finds that nobody is left


@pytest.mark.parametrize(
    ("looks", "stopped", "is_accused"),
    [
        pytest.param([0.5, 60.0, 60.5, 61.0], {60.0}, False, id="both, and this one went on first"),
        pytest.param([0.5, 1.0, 1.5, 2.0, 2.5], {1.0, 1.5}, False, id="for less than a second"),
        pytest.param([0.5, 1.0, 1.5, 2.0], {1.0, 1.5, 2.0}, True, id="for a second"),
    ],
)
def test_only_who_is_stopped_for_a_second_is_accused(monkeypatch, looks, stopped, is_accused):
    """A stop of half a second once ended the model, if it began just before a look."""
    clock, accused = [0.0], []
    over = SimpleNamespace(
        wait=lambda _: not looks or clock.__setitem__(0, looks.pop(0)), is_set=lambda: False
    )
    monkeypatch.setattr(stopped_ranks, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(stopped_ranks, "_state", lambda pid: "T" if clock[0] in stopped else "S")
    peers = [SimpleNamespace(pid=pid, is_visible=True) for pid in (1, 2)]
    coor = SimpleNamespace(rank=0, world_size=2, peers=peers)
    store = SimpleNamespace(set=lambda key, value: None)
    stopped_ranks.Lookout(coor, store, lambda: True, lambda *told: accused.append(told), over).run()
    assert not looks and accused == [(1, "is stopped")] * is_accused


@pytest.mark.parametrize(
    ("is_mutual", "is_waiting", "patience_s", "for_s", "is_accused"),
    [(True, True, 3.0, 3.0, True), (True, False, 3.0, 3.0, False), (True, True, 3.0, 60.0, False)]
    + [(True, True, 10.0, 10.0, True), (False, True, 3.0, 300.0, False)],
)
def test_a_master_on_another_host_that_does_not_answer_is_missed_where_it_is_waited_for(
    monkeypatch, is_mutual, is_waiting, patience_s, for_s, is_accused
):
    """A first rank that was stopped was named after 300 s only; not at all if all were stopped,
    nor where it is the user who drives."""
    clock, beats, accused, looks = [0.0], [], [], [0.5, 1.0]

    def check(keys):
        clock[0] += for_s
        raise StoreTimeout("rank 1 waited")

    over = SimpleNamespace(
        wait=lambda _: not looks or clock.__setitem__(0, looks.pop(0)), is_set=lambda: False
    )
    monkeypatch.setattr(stopped_ranks, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    peers = [SimpleNamespace(pid=pid, is_visible=pid == 2) for pid in (1, 2)]
    coor = SimpleNamespace(rank=1, world_size=2, peers=peers)
    store = SimpleNamespace(set=lambda key, value: beats.append(key), check=check)
    told = lambda *verdict: accused.append(verdict)  # noqa: E731
    how = {"is_mutual": is_mutual, "patience_s": patience_s}
    stopped_ranks.Lookout(coor, store, lambda: is_waiting, told, over, **how).run()
    silent = [(0, f"has said nothing for {patience_s:.0f} s: stopped, or stuck")]
    assert beats[0] == "beat 1" and accused == silent * is_accused


def test_a_rank_that_is_stopped_while_it_loads_is_named_within_seconds(checkpoints, start):
    """Nobody looked for stopped ranks before the model was there: all waited for minutes."""
    body = """
    from drumline.stages import stage_weights as fill
    here = Coordinator()
    if here.rank == 1:
        fill.carry_out = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    if here.rank:
        sys.argv[1] = "nowhere"  # and is sent what it holds
    here.barrier()
    begun = time.monotonic()
    try:
        drumline.load(sys.argv[1], coor=here, max_memory=[1 << 30] * 3)
    except drumline.PeerLost as lost:
        print(lost)
        os._exit(0 if time.monotonic() - begun < 5 else 7)
    """
    processes = start(script(body), 3, checkpoints.llama()[1])
    outputs = [processes[rank].communicate(timeout=60) for rank in (0, 2)]
    assert [processes[rank].returncode for rank in (0, 2)] == [0, 0], outputs
    named = rf"rank 1 \(host {socket.gethostname()}, pid {processes[1].pid}(\)|,) is stopped"
    assert all(re.search(named, out) for out, _ in outputs), outputs
    assert "model.layers." in outputs[0][0], outputs


def test_a_short_stop_is_borne_and_ctrl_c_in_generate_ends_all_ranks(checkpoints, start):
    """Ctrl-C between two frames of a message once had the second one taken for another message."""
    body = """
    coor, model = load()
    before = model.generate(prompt, max_new_tokens=8, do_sample=False)
    os.kill(coor.peers[1].pid, signal.SIGSTOP)
    threading.Timer(0.7, os.kill, (coor.peers[1].pid, signal.SIGCONT)).start()
    after = model.generate(prompt, max_new_tokens=8, do_sample=False)
    comm, long = model._session.ring.previous.comm, prompt.repeat(3, 12)
    real = comm.recv
    def recv(*given):
        del comm.recv
        real(*given)
        signal.raise_signal(signal.SIGINT)  # as if it had come while this waited
    right = model.generate(long, max_new_tokens=3, do_sample=False)
    for ids in (long, prompt):
        comm.recv = recv
        try:
            model.generate(ids, max_new_tokens=8, do_sample=False)
        except KeyboardInterrupt:
            continue
    again = model.generate(long, max_new_tokens=3, do_sample=False)
    from transformers import DynamicCache
    cache, comm.recv = DynamicCache(config=model.config), recv
    said = ""
    for _ in range(2):
        try:
            model(prompt, past_key_values=cache)
        except KeyboardInterrupt:
            continue
        except inference.DrumlineError as error:
            said = str(error)
    print(before.tolist() == after.tolist(), right.tolist() == again.tolist(),
          "empty cache" in said, flush=True)
    model.generate(prompt, max_new_tokens=100000, do_sample=False, eos_token_id=None)
    """
    processes = start(script(body), 3, checkpoints.llama()[1])
    assert processes[0].stdout.readline() == "True True True\n"
    time.sleep(0.3)
    processes[0].send_signal(signal.SIGINT)
    results = ended(processes, within_s=30)
    assert "KeyboardInterrupt" in results[0][1]
    assert [code for code, _ in results] == [-signal.SIGINT, 1, 1], results


def test_an_interrupt_waits_for_the_end_of_a_message_and_a_second_one_does_not():
    done = []
    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append("the rest")
    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("never")
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert done == ["the rest"]


def test_servers_end_when_an_idle_master_is_killed(checkpoints, start):
    body = """
    coor, model = load()
    model.generate(prompt, max_new_tokens=2)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    processes = start(script(body), 3, checkpoints.llama()[1])
    for code, err in ended(processes[1:], within_s=40):
        assert code == 1 and "rank 0" in err and "is gone" in err


@pytest.mark.parametrize(("line", "code"), [("pass", 1), ("with model: sys.exit(7)", 7)])
def test_an_exception_in_the_masters_script_ends_the_servers_with_its_code(
    checkpoints, start, line, code
):
    body = f"""
    coor, model = load()
    {line}
    raise KeyError("in the script of the master")
    """
    results = ended(start(script(body), 2, checkpoints.llama()[1]), within_s=40)
    assert [code for code, _ in results] == [code, code]
    assert "KeyError" not in results[1][1]


def test_a_server_that_ends_with_a_failure_lets_the_master_end_first():
    """The launcher shows the first failure, and that was a server's, which had none of its own."""
    with subprocess.Popen(["sleep", "60"]) as master:
        near = SimpleNamespace(pid=master.pid, is_visible=True)
        coor = SimpleNamespace(peers=[near, SimpleNamespace(is_visible=True)], rank=1)
        outlast_master(coor, 0)
        assert master.poll() is None
        thread = threading.Timer(0.3, master.kill)
        thread.start()
        outlast_master(
            coor, 1
        )  # of which the process is a zombie by then: nobody has waited for it
        assert master.wait() == -signal.SIGKILL
        thread.join()


def test_a_script_that_ends_releases_the_servers(checkpoints, start):
    body = """
    coor, model = load()
    print(model.generate(prompt, max_new_tokens=2).shape)
    """
    results = ended(start(script(body), 2, checkpoints.llama()[1]), within_s=40)
    assert [code for code, _ in results] == [0, 0], results


def test_servers_wait_for_a_master_that_thinks_longer_than_any_deadline(checkpoints, ranks):
    _, path = checkpoints.llama()

    def rank(info):
        coor = Coordinator(info, timeout_s=1.5)
        with drumline.load(path, coor=coor, max_memory=[1 << 30] * 2) as model:
            time.sleep(3)
            return model.generate(torch.arange(3, 12)[None], max_new_tokens=3).shape[-1]

    assert ranks(quiet(rank), 2)[0] == 12


def quiet(rank):
    """A rank whose serving has ended returns nothing."""

    def run(info):
        try:
            return rank(info)
        except drumline.WorkerExit:
            return None

    return run


def failing_once(monkeypatch, module_rank: str) -> list[bool]:
    """LlamaMLP raises on one rank while the list holds True."""
    armed = [False]
    forward = LlamaMLP.forward

    def bomb(self, x):
        if armed[0] and threading.current_thread().name == module_rank:
            raise ArithmeticError("planted")
        return forward(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", bomb)
    return armed


@pytest.mark.parametrize("where", ["sent", "received"])
def test_a_generate_after_an_interruption_gives_its_own_tokens(checkpoints, on_master, where):
    """A reply that nobody took, or a question that was never sent, once left all later ones off."""
    prompts = [torch.arange(start, start + 6)[None] for start in (3, 20)]

    def work(model):
        ring = model._session.ring
        right = [model.generate(ids, max_new_tokens=5, do_sample=False) for ids in prompts]
        send, receive = ring.send, ring.receive

        def interrupt(*_):
            ring.send, ring.receive = send, receive
            if where == "received":
                receive()
            raise KeyboardInterrupt

        if where == "sent":
            ring.send = interrupt
        else:
            ring.receive = interrupt
        with pytest.raises(KeyboardInterrupt):
            model.generate(prompts[0], max_new_tokens=5)
        after = [model.generate(ids, max_new_tokens=5, do_sample=False) for ids in prompts]
        return [torch.equal(*pair) for pair in zip(right, after, strict=True)]

    assert on_master(checkpoints.llama()[1], 3, work) == [True, True]


@pytest.mark.parametrize("rank", [1, 2])
def test_a_layer_that_raises_is_named_with_its_traceback_and_the_model_goes_on(
    checkpoints, on_master, monkeypatch, rank
):
    armed = failing_once(monkeypatch, f"rank-{rank}")
    prompt = torch.arange(3, 12)[None]

    def work(model):
        before = model.generate(prompt, max_new_tokens=5, do_sample=False)
        armed[0] = True
        with pytest.raises(drumline.StageError) as raised:
            model.generate(prompt, max_new_tokens=5, do_sample=False)
        armed[0] = False
        after = model.generate(prompt, max_new_tokens=5, do_sample=False)
        assert before.tolist() == after.tolist()
        return str(raised.value)

    story = on_master(checkpoints.llama()[1], 3, work)
    assert f"rank {rank}" in story and "model.layers." in story
    assert "ArithmeticError: planted" in story and "in bomb" in story


def test_a_rank_that_leaves_in_a_layer_is_the_one_that_is_named(
    checkpoints, ranks_or_errors, monkeypatch
):
    """Each survivor once took the words of who left for the loss of rank 0."""
    forward, prompt = LlamaMLP.forward, torch.arange(3, 12)[None]
    here = threading.local()

    def leave(self, x):
        return sys.exit(5) if getattr(here, "rank", 0) == 2 else forward(self, x)

    def rank(info):
        here.rank = info.rank
        with (
            Coordinator(info) as coor,
            drumline.load(path, coor=coor, max_memory=[1 << 30] * 4) as model,
        ):
            monkeypatch.setattr(LlamaMLP, "forward", leave)
            return model.generate(prompt, max_new_tokens=3)

    path = checkpoints.llama()[1]
    found = ranks_or_errors(rank, 4)
    assert isinstance(found[2], SystemExit) and found[2].code == 5
    for other in (0, 1, 3):
        assert isinstance(found[other], drumline.PeerLost)
        assert "rank 2 (host" in str(found[other]).partition(" is gone")[0]


def test_a_rank_that_cannot_load_is_named_with_its_traceback(
    checkpoints, ranks_or_errors, monkeypatch
):
    settle = pipeline_parallel.install_device_hooks

    def bomb(model, chosen, rank, prefetcher):
        return 1 // 0 if rank == 1 else settle(model, chosen, rank, prefetcher)

    monkeypatch.setattr(pipeline_parallel, "install_device_hooks", bomb)

    def rank(info):
        with Coordinator(info) as coor:
            drumline.load(path, coor=coor, max_memory=[1 << 30] * 3)

    path = checkpoints.llama()[1]
    story = str(ranks_or_errors(rank, 3)[0])
    assert f"rank 1 (host {socket.gethostname()}" in story
    assert "ZeroDivisionError" in story and "in bomb" in story


def test_who_reads_for_others_and_fails_tells_them_at_once(
    checkpoints, ranks_or_errors, monkeypatch
):
    """Where the user had made the Coordinator, and went on, the others waited for hours."""
    have_heard = threading.Barrier(3)

    def bomb(self, plan, rank):
        return 1 // 0 if rank == 0 else real(self, plan, rank)

    real = plan_executor.PlanExecutor.run
    monkeypatch.setattr(plan_executor.PlanExecutor, "run", bomb)

    def rank(info):
        path = checkpoints.llama()[1] if info.rank == 0 else "nowhere"
        with Coordinator(info) as coor:
            try:
                drumline.load(path, coor=coor, max_memory=[1 << 30] * 3)
            finally:
                have_heard.wait(30)

    errors = ranks_or_errors(rank, 3)
    assert isinstance(errors[0], ZeroDivisionError)
    for error in errors[1:]:
        assert isinstance(error, drumline.PeerLost)
        assert re.search(r"rank 0 \(host .*cannot load: ZeroDivisionError", str(error)), error
        assert "in bomb" in str(error) and "Rank 0 was to hold model.embed_tokens" in str(error)


@pytest.mark.parametrize("loss", [communicator.PeerLost, coordinator.PeerLost])
def test_who_lost_another_while_it_loaded_is_not_accused(ranks, loss):
    """Which of the others noticed first that a rank was killed was itself named to the master."""

    def rank(info):
        with Coordinator(info) as coor:
            if info.rank == 1:
                with pytest.raises(loss), plan_executor.abort_peers_on_error(coor):
                    raise loss("rank 1: rank 2 is gone")
            return coor.allgather(b"well")

    assert ranks(rank, 3) == [[b"well"] * 3] * 3


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Kind.CALL, ["the team is not whole"]),
        (Kind.ERROR, ["the team is not whole"]),
        (Kind.MARK, ["the team is not whole"]),
        (Kind.LOST, ["an earlier team is lost"]),
        (Kind.LEAVE, []),
    ],
)
def test_whatever_passes_a_team_that_is_not_whole_becomes_the_news_of_it(kind, told):
    """Where it was not a call, nothing went on, and the team's first rank was taken for lost."""
    sent = []

    def tell(message):
        raise drumline.PeerLost("the team is not whole")

    vigil = SimpleNamespace(verdict="", explained=lambda work: work())
    arrived = Message(kind, note="an earlier team is lost")
    ring = SimpleNamespace(coor=None, close=None, receive=lambda _: arrived, send=sent.append)
    with pytest.raises(drumline.PeerLost, match="not whole"):
        Leader(SimpleNamespace(rank=2, vigil=vigil, tell=tell), ring).receive()
    assert [(message.kind, message.note) for message in sent] == [(Kind.LOST, why) for why in told]


def test_what_is_told_of_an_error_can_always_be_sent():
    """Text that is no UTF-8 ended the rank whose layer had raised, in place of its error."""

    class Mute(Exception):
        def __str__(self):
            raise KeyError("within")

    for error in (OSError("\udcff"), ValueError("x" * 10**7), Mute()):
        told = story(error)
        assert type(error).__name__ in told
        assert len(told.encode()) < 50_000


def test_a_cache_from_a_call_that_failed_is_refused(checkpoints, on_master, monkeypatch):
    armed = failing_once(monkeypatch, "rank-1")
    ids = torch.arange(3, 12)[None]

    def work(model):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            armed[0] = True
            with pytest.raises(drumline.StageError):
                model(ids, past_key_values=cache)
            armed[0] = False
            with pytest.raises(drumline.DrumlineError, match="empty cache"):
                model(ids, past_key_values=cache)
            other = DynamicCache(config=model.config)
            return model(ids, past_key_values=other).logits.tolist()

    plain, path = checkpoints.llama()
    with torch.no_grad():
        assert on_master(path, 2, work) == plain(ids).logits.tolist()


def test_gradients_are_refused_rather_than_half_right(checkpoints, on_master):
    def work(model):
        logits = model(torch.arange(3, 12)[None]).logits
        with pytest.raises(drumline.DrumlineError, match="gradient"):
            logits.sum().backward()

    on_master(checkpoints.llama()[1], 2, work)


def test_a_closed_model_says_so(checkpoints, on_master):
    def work(model):
        model.close()
        with pytest.raises(drumline.DrumlineError, match="closed"):
            model.generate(torch.arange(3, 12)[None], max_new_tokens=2)

    on_master(checkpoints.llama()[1], 2, work)
