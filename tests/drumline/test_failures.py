"""An error or a lost rank is named to the driver, and no rank is left waiting."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaMLP

import communicator
import coordinator
import drumline
import launcher
from coordinator import Coordinator
from drumline.checkpoint import plan_executor
from drumline.errors import describe_with_traceback
from drumline.kv_cache import owner
from drumline.pipeline import master_model
from drumline.stages.stage import Stage
from drumline.strategies import pipeline_parallel
from tests.cases import soak

PROGRAMS = Path(__file__).parent / "programs"


def ended(processes, within_s: float) -> list[tuple[int, str]]:
    """Exit code and standard error of each; fails if one is still there after `within_s`."""
    deadline = time.monotonic() + within_s
    results = []
    for process in processes:
        _, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        results.append((process.returncode, err))
    return results


def names(text: str, process, rank: int, state: str) -> bool:
    """Whether a text names this rank, its host and pid, and says what became of it."""
    host = re.escape(socket.gethostname())
    return bool(re.search(rf"rank {rank} \(host {host}, pid {process.pid}[^)]*{state}", text))


@pytest.mark.parametrize(("victim", "backend"), [(1, "shm"), soak(2, "gloo")])
def test_a_rank_that_is_killed_at_any_token_is_named_within_seconds(
    checkpoints, start, victim, backend
):
    program = PROGRAMS / "kill_at_any_token.py"
    processes = start(program, 3, checkpoints.llama()[1], victim, backend)
    out, err = processes[0].communicate(timeout=60)
    assert processes[0].returncode == 0, err
    assert names(out, processes[victim], victim, "SIGKILL"), out
    assert "model.layers." in out
    codes = [code for code, _ in ended(processes[1:], within_s=40)]
    assert codes[victim - 1] == -signal.SIGKILL
    assert codes[2 - victim] == 1


def signalled(start, path, nprocs, victim, number, **options):
    """The processes of a model, one of which was signalled, and what rank 0 printed of it."""
    program = PROGRAMS / "signal_a_rank.py"
    processes = start(program, nprocs, path, victim, number.name, json.dumps(options))
    out, err = processes[0].communicate(timeout=60)
    assert processes[0].returncode == 0, out + err
    assert f"first failed: {victim}" in out and "model.layers." in out
    return processes, out


def check_suspended(processes, victim, out):
    """The driver and all others name the suspended rank; it ends when it goes on."""
    assert names(out, processes[victim], victim, "suspended"), out
    for rank in range(1, len(processes)):
        if rank != victim:
            assert processes[rank].wait(timeout=30) == 1
            err = processes[rank].communicate()[1]
            assert names(err, processes[victim], victim, "suspended"), err
    processes[victim].send_signal(signal.SIGCONT)
    assert processes[victim].wait(timeout=30) == 1  # it finds that nobody is left


@pytest.mark.parametrize(("victim", "backend"), [(2, "tcp"), soak(1, "shm")])
def test_a_suspended_rank_is_named_by_all_within_seconds(checkpoints, start, victim, backend):
    path = checkpoints.llama()[1]
    processes, out = signalled(start, path, 3, victim, signal.SIGSTOP, backend=backend)
    check_suspended(processes, victim, out)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_suspended_while_nobody_calls_is_named(checkpoints, start, victim):
    """The others waited for a suspended rank 0 for ever, and an idle rank 0 did not notice."""
    processes = start(PROGRAMS / "suspend_while_idle.py", 2, checkpoints.llama()[1], victim)
    out, err = processes[1 - victim].communicate(timeout=60)
    assert processes[1 - victim].returncode == 1, out + err
    assert names(err, processes[victim], victim, "suspended"), err
    processes[victim].send_signal(signal.SIGCONT)
    assert processes[victim].wait(timeout=30) == 1


@pytest.mark.parametrize(("victim", "nprocs"), [soak(1, 2), (3, 4)])
def test_a_suspended_follower_of_a_tp_group_is_named_by_all(checkpoints, start, victim, nprocs):
    """Only the leader of its group waits for it, in a sum."""
    options = {"tp": 2, "device_map": "auto"}
    path = checkpoints.llama()[1]
    processes, out = signalled(start, path, nprocs, victim, signal.SIGSTOP, **options)
    check_suspended(processes, victim, out)


def test_a_killed_follower_of_a_later_tp_group_is_named_at_once(checkpoints, start):
    """It was a StageError first, after which nothing worked."""
    options = {"tp": 2, "device_map": "auto"}
    processes, out = signalled(start, checkpoints.llama()[1], 4, 3, signal.SIGKILL, **options)
    assert names(out, processes[3], 3, "SIGKILL"), out
    assert "model.layers.3-5" in out
    assert [code for code, _ in ended(processes[1:3], within_s=30)] == [1, 1]


@pytest.mark.parametrize("victim", [0, soak(1)])
def test_a_suspended_rank_of_a_tensor_parallel_model_is_named(checkpoints, start, victim):
    """Nobody drives: each rank waits for every other in each layer, the first one like any."""
    processes = start(PROGRAMS / "suspend_in_tp.py", 2, checkpoints.llama()[1], victim)
    out, err = processes[1 - victim].communicate(timeout=60)
    assert processes[1 - victim].returncode == 0, err
    assert names(out, processes[victim], victim, "suspended") and "its part of every layer" in out
    processes[victim].send_signal(signal.SIGCONT)
    assert processes[victim].wait(timeout=30) == 0  # PeerLost, for nobody is left


def test_a_rank_that_is_suspended_while_it_loads_is_named_within_seconds(checkpoints, start):
    """Nobody looked for suspended ranks before the model was there: all waited for minutes."""
    processes = start(PROGRAMS / "suspend_while_loading.py", 3, checkpoints.llama()[1])
    outputs = [processes[rank].communicate(timeout=60) for rank in (0, 2)]
    assert [processes[rank].returncode for rank in (0, 2)] == [0, 0], outputs
    assert all(names(out, processes[1], 1, "suspended") for out, _ in outputs), outputs
    assert "model.layers." in outputs[0][0], outputs


def test_a_short_suspension_is_borne_and_ctrl_c_in_generate_ends_all_ranks(checkpoints, start):
    """Ctrl-C between two frames of a message once had the second one taken for another message."""
    processes = start(PROGRAMS / "interrupt_generate.py", 3, checkpoints.llama()[1])
    assert processes[0].stdout.readline() == "True True True\n"
    time.sleep(0.3)
    processes[0].send_signal(signal.SIGINT)
    results = ended(processes, within_s=30)
    assert "KeyboardInterrupt" in results[0][1]
    assert [code for code, _ in results] == [-signal.SIGINT, 1, 1], results


def test_servers_end_when_an_idle_driver_is_killed(checkpoints, start):
    processes = start(PROGRAMS / "kill_idle_driver.py", 3, checkpoints.llama()[1])
    for code, err in ended(processes[1:], within_s=40):
        assert code == 1 and names(err, processes[0], 0, "SIGKILL"), err


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("exit", 7)])
def test_an_exception_in_the_drivers_script_ends_the_servers_with_its_code(
    checkpoints, start, how, code
):
    program = PROGRAMS / "raise_in_script.py"
    results = ended(start(program, 2, checkpoints.llama()[1], how), within_s=40)
    assert [code for code, _ in results] == [code, code]
    assert "KeyError" not in results[1][1]


def test_a_script_that_ends_releases_the_servers(checkpoints, start):
    program = PROGRAMS / "generate_and_end.py"
    results = ended(start(program, 2, checkpoints.llama()[1]), within_s=40)
    assert [code for code, _ in results] == [0, 0], results


def test_servers_wait_for_a_master_that_thinks_longer_than_any_deadline(checkpoints, ranks):
    _, path = checkpoints.llama()

    def rank(info):
        coor = Coordinator(info, timeout_s=3)
        with drumline.load(path, coor=coor, max_memory=[1 << 30] * 2) as model:
            time.sleep(4)
            return model.generate(torch.arange(3, 12)[None], max_new_tokens=3).shape[-1]

    assert ranks(quiet(rank), 2)[0] == 12


@pytest.mark.parametrize("does_dispatch", [False, True])
def test_a_coordinator_that_is_closed_closes_the_model_before(checkpoints, ranks, does_dispatch):
    """Rank 0 waited for the others, which served the model, until the time-out."""
    plain, path = checkpoints.llama()

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            if does_dispatch:
                places = {"model": 0, "lm_head": 1}
                model = drumline.dispatch(copy.deepcopy(plain), places, coor)
            else:
                model = drumline.load(path, coor=coor, max_memory=[1 << 30] * 2)
            assert model(torch.arange(3, 12)[None]).logits.shape[1] == 9
        with pytest.raises(drumline.DrumlineError, match=r"was closed .* load it again"):
            model(torch.arange(3, 12)[None])
        model.close()
        return True

    assert ranks(quiet(rank), 2)[0]


def test_ranks_that_serve_hear_of_an_error_with_which_the_master_ends_its_load(
    checkpoints, ranks_or_errors, monkeypatch
):
    """They served a model that there was not, and a Coordinator that was closed waited for them."""

    def warn():
        raise UserWarning("an error here")

    monkeypatch.setattr(master_model, "warn_if_off", warn)
    _, path = checkpoints.llama()

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            with contextlib.suppress(UserWarning):
                drumline.load(path, coor=coor, max_memory=[1 << 30] * 2)
            return "goes on"

    first, second = ranks_or_errors(rank, 2)
    assert first == "goes on" and isinstance(second, drumline.WorkerExit) and second.code == 1


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


SPREAD = {"max_memory": [1 << 30] * 3}


@pytest.mark.parametrize(
    ("where", "kind", "nprocs", "options"),
    [
        ("sent", KeyboardInterrupt, 3, SPREAD),
        ("received", KeyboardInterrupt, 3, SPREAD),
        ("sent", RuntimeError, 3, SPREAD),
        ("sent", KeyboardInterrupt, 2, {"tp": 2, "device_map": "auto"}),
        ("sent", SystemExit, 4, {"tp": 2, "device_map": "auto"}),
        ("received", KeyboardInterrupt, 4, {"tp": 2, "device_map": "auto"}),
    ],
)
def test_a_generate_after_an_interruption_gives_its_own_tokens(
    checkpoints, where, kind, nprocs, options
):
    """A reply that nobody took, or a question that was never sent, once left all later ones off."""
    prompts = [torch.arange(start, start + 6)[None] for start in (3, 20)]

    def work(model):
        ring = model._driver.ring
        right = [model.generate(ids, max_new_tokens=5, do_sample=False) for ids in prompts]
        send, receive = ring.send, ring.receive

        def interrupt(*_):
            ring.send, ring.receive = send, receive
            if where == "received":
                receive()
            raise kind

        if where == "sent":
            ring.send = interrupt
        else:
            ring.receive = interrupt
        with pytest.raises(kind):
            model.generate(prompts[0], max_new_tokens=5)
        assert not model._driver.context.came_empty(DynamicCache()), "it is still in that pass"
        after = [model.generate(ids, max_new_tokens=5, do_sample=False) for ids in prompts]
        return [torch.equal(*pair) for pair in zip(right, after, strict=True)]

    def rank():
        torch.set_num_threads(1)
        with drumline.load(path, **options) as model:
            return work(model)

    path = checkpoints.llama()[1]
    results = launcher.launch(rank, nprocs=nprocs, launcher="threads", timeout_s=60)
    assert results[0] == [True, True]


def test_a_message_that_cannot_be_sent_leaves_its_form_usable_and_no_cache_half_changed(
    checkpoints, on_master
):
    """Other ranks never got the program of that form, and went on with what was to be cropped."""
    plain, path = checkpoints.llama()
    ids = torch.arange(3, 12)[None]

    @torch.no_grad()
    def work(model):
        link, cropped = model._driver.ring.next, DynamicCache(config=model.config)

        def fail(message):
            del link.send
            raise RuntimeError("out of memory")

        def fail_once():
            link.send = fail
            with pytest.raises(RuntimeError, match="out of memory"):
                model(ids, use_cache=False)
            return model(ids, use_cache=False).logits.tolist()

        logits = [fail_once()]
        model(ids, past_key_values=cropped)
        cropped.crop(-4)
        logits.append(fail_once())
        with pytest.raises(drumline.DrumlineError, match="from an empty cache"):
            model(ids, past_key_values=cropped)
        return logits

    with torch.no_grad():
        assert on_master(path, 2, work) == [plain(ids).logits.tolist()] * 2


def test_a_weight_is_scaled_once_though_its_message_may_have_been_sent(checkpoints, on_master):
    """It was sent again, as the switch of the attention is, and so the weight was scaled twice."""
    plain, path = checkpoints.llama()
    ids = torch.arange(3, 12)[None]

    @torch.no_grad()
    def work(model):
        ring = model._driver.ring
        send = ring.send

        def send_and_interrupt(message):
            ring.send = send
            send(message)
            raise KeyboardInterrupt

        for interrupt in (send_and_interrupt, send):
            model.model.layers[-1].mlp.down_proj.weight.div_(2)
            ring.send = interrupt
            with contextlib.suppress(KeyboardInterrupt):
                model(ids)
        return model(ids).logits.tolist()

    scaled = copy.deepcopy(plain)
    with torch.no_grad():
        scaled.model.layers[-1].mlp.down_proj.weight.div_(4)
        assert on_master(path, 2, work) == scaled(ids).logits.tolist()


def test_a_reply_that_cannot_be_taken_ends_the_model_for_every_thread(checkpoints, on_master):
    """Later replies would be taken for it, as on a GPU without memory for it."""
    calls = []

    def work(model):
        ring, prompt = model._driver.ring, torch.arange(3, 9)[None]

        def fail():
            raise RuntimeError("out of memory")

        ring.receive = fail
        with pytest.raises(RuntimeError, match="out of memory"):
            model.generate(prompt, max_new_tokens=5)
        with pytest.raises(drumline.DrumlineError, match=r"out of memory.*load the model again"):
            model.generate(prompt, max_new_tokens=5)
        calls.append(True)

    with pytest.raises(
        launcher.LaunchError, match=r"rank 1 lost rank 0(.|\n)*load the model again"
    ):
        on_master(checkpoints.llama()[1], 2, work)
    assert calls


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
    outcomes = ranks_or_errors(rank, 4)
    assert isinstance(outcomes[2], SystemExit) and outcomes[2].code == 5
    for other in (0, 1, 3):
        assert isinstance(outcomes[other], drumline.PeerLost)
        assert "rank 2 (host" in str(outcomes[other]).partition(" is gone")[0]


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

    def bomb(self, *args):
        return 1 // 0 if self.rank == 0 else real(self, *args)

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
def test_rank_that_lost_another_while_it_loaded_is_not_reported(ranks, loss):
    """Which of the others noticed first that a rank was killed was itself named to the master."""

    def rank(info):
        with Coordinator(info) as coor:
            if info.rank == 1:
                with pytest.raises(loss), plan_executor.abort_peers_on_error(coor):
                    raise loss("rank 1: rank 2 is gone")
            return coor.allgather(b"well")

    assert ranks(rank, 3) == [[b"well"] * 3] * 3


def test_what_is_told_of_an_error_can_always_be_sent():
    """Text that is not UTF-8 ended the rank whose layer had raised, in place of its error."""

    class Mute(Exception):
        def __str__(self):
            raise KeyError("within")

    for error in (OSError("\udcff"), ValueError("x" * 10**7), Mute()):
        text = describe_with_traceback(error)
        assert type(error).__name__ in text
        assert len(text.encode()) < 50_000


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


def test_a_cache_is_cropped_on_a_rank_that_has_no_memory_for_the_message(
    checkpoints, on_master, monkeypatch
):
    """That rank went on with all of its tokens."""
    armed, take = [False], Stage._arrived_tensors

    def arrived(self, *arguments):
        if armed[0]:
            raise RuntimeError("out of memory")
        return take(self, *arguments)

    monkeypatch.setattr(Stage, "_arrived_tensors", arrived)
    monkeypatch.setattr(Stage, "_prebuild_call", lambda *arguments: None)
    ids = torch.arange(3, 12)[None]

    def work(model):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            cache.crop(-4)
            armed[0] = hasattr(model, "_driver")
            with pytest.raises(drumline.StageError) if armed[0] else contextlib.nullcontext():
                model(ids, use_cache=False)
            armed[0] = False
            return model(ids, past_key_values=cache).logits.tolist()

    plain, path = checkpoints.llama()
    assert on_master(path, 2, work) == work(plain)


def test_a_change_of_a_cache_that_fails_is_told_to_the_calls_that_use_it_alone(
    checkpoints, on_master, monkeypatch
):
    def fail(*arguments):
        raise ArithmeticError("planted")

    monkeypatch.setattr(owner, "change_layers", fail)
    ids = torch.arange(3, 12)[None]

    def work(model):
        changed, other = DynamicCache(config=model.config), DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, past_key_values=changed)
            changed.crop(-4)
            logits = model(ids, past_key_values=other).logits.tolist()
            changed.crop(-1)
            for wrong in ("crop of it raised ArithmeticError: planted", "failed half-way"):
                with pytest.raises(drumline.DrumlineError, match=wrong):
                    model(ids, past_key_values=changed)
        return logits

    plain, path = checkpoints.llama()
    with torch.no_grad():
        assert on_master(path, 2, work) == plain(ids).logits.tolist()


def test_gradients_are_refused_rather_than_half_right(checkpoints, on_master):
    def work(model):
        logits = model(torch.arange(3, 12)[None]).logits
        with pytest.raises(drumline.DrumlineError, match="gradient"):
            logits.sum().backward()

    on_master(checkpoints.llama()[1], 2, work)


def test_gradients_of_an_input_are_refused_where_all_layers_are_on_other_ranks(
    checkpoints, on_master
):
    """They were those of the other terms of a loss alone."""
    places = {"model.rotary_emb": 0, "model.embed_tokens": 0, "model.norm": 1, "lm_head": 1}
    places |= {f"model.layers.{layer}": 1 for layer in range(6)}

    def work(model):
        model.requires_grad_(False)
        prompt, ids = torch.nn.Parameter(torch.ones(1, 3, 32)), torch.arange(3, 6)[None]
        with pytest.raises(drumline.DrumlineError, match="gradient"):
            (model(inputs_embeds=prompt, labels=ids).loss + prompt.norm()).backward()
        assert not model(ids).logits.requires_grad

    on_master(checkpoints.llama()[1], 2, work, device_map=places)


def test_an_error_from_before_is_none_of_a_model_that_is_closed(
    checkpoints, on_master, monkeypatch
):
    """At a prompt it stays: the other ranks ended with an error of their own."""
    monkeypatch.setattr(sys, "last_value", ValueError("from before"), raising=False)
    assert on_master(checkpoints.llama()[1], 2, lambda model: model.device_map.ranks) == [0, 1]


def test_a_closed_model_says_so(checkpoints, on_master):
    def work(model):
        model.close()
        with pytest.raises(drumline.DrumlineError, match="closed"):
            model.generate(torch.arange(3, 12)[None], max_new_tokens=2)

    on_master(checkpoints.llama()[1], 2, work)


def test_the_error_of_a_model_that_failed_does_not_grow_with_each_call(checkpoints, on_master):
    """Its traceback got the frames of every later call, and all that is in them."""

    def work(model):
        driver = model._driver
        model.close()
        uses = lambda: model(torch.arange(3, 12)[None]), lambda: driver._failing_all_threads(len)
        for use in uses:
            with pytest.raises(drumline.DrumlineError, match="closed"):
                use()
        return driver._failure.__traceback__

    assert on_master(checkpoints.llama()[1], 2, work) is None


def test_an_interrupt_of_another_thread_amid_a_message_is_not_forgotten(checkpoints, on_master):
    plain, path = checkpoints.llama()
    ids = torch.arange(3, 12)[None]

    @torch.no_grad()
    def work(model):
        driver, send = model._driver, model._driver.ring.send
        model(ids)  # asks some layers by themselves; from then on a pass is one message

        def interrupted(message):
            driver.ring.send, driver._is_desynchronised = send, True
            return send(message)

        driver.ring.send = interrupted
        logits = [model(ids).logits.tolist()]
        assert driver._is_desynchronised
        logits.append(model(ids).logits.tolist())
        assert not driver._is_desynchronised
        return logits

    with torch.no_grad():
        assert on_master(path, 2, work) == [plain(ids).logits.tolist()] * 2


def test_a_tensor_that_is_written_into_before_its_layer_runs_is_an_error(checkpoints, on_master):
    """The layer got what was there when the message was sent, and nobody saw."""
    plain, path = checkpoints.llama()
    ids = torch.arange(3, 12)[None]

    def erase(module, args, kwargs):
        kwargs["position_embeddings"][0].zero_()

    @torch.no_grad()
    def work(model):
        layer, cache = model.model.layers[-1], DynamicCache(config=model.config)
        hook = layer.register_forward_pre_hook(erase, with_kwargs=True)
        with pytest.raises(drumline.DrumlineError, match=r"on rank 1 was given .* a clone\(\)"):
            model(ids, past_key_values=cache)
        hook.remove()
        with pytest.raises(drumline.DrumlineError, match="start from an empty cache"):
            model(ids, past_key_values=cache)
        return model(ids).logits.tolist()

    with torch.no_grad():
        assert on_master(path, 2, work) == plain(ids).logits.tolist()
