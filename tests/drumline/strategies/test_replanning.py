"""Models whose ranks are lost, and that go on over the others."""

import contextvars
import json
import os
import signal
import threading
import types
from pathlib import Path

import pytest
import torch

import drumline
import launcher
from coordinator import Coordinator, FailureReason
from drumline.errors import DrumlineError, PeerLost, PlanError
from drumline.pipeline.microbatch_runner import MicrobatchRunner
from drumline.strategies import replanning
from drumline.strategies.pipeline_parallel import _become
from drumline.strategies.replanning import Replanner, memory_of

PROGRAM = Path(__file__).parents[1] / "programs" / "outlive_a_rank.py"
LOSE_AGAIN = PROGRAM.with_name("lose_while_replanning.py")
PROMPT = torch.tensor([[5, 6, 7, 8]])


def reports(processes):
    out, err = processes[0].communicate(timeout=120)
    assert processes[0].returncode == 0, err
    return [json.loads(line) for line in out.splitlines() if line[:1] in '["']


def test_the_ranks_that_are_left_give_the_tokens_of_one_process(checkpoints, start):
    """The call in flight fails, and so does whatever was kept on the rank that was lost."""
    plain, path = checkpoints.llama()
    torch.manual_seed(3)
    options = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": True}
    expected = plain.generate(PROMPT, **options).tolist()
    processes = start(PROGRAM, 3, path, json.dumps(None))
    lost, batch, old_manager, again, old_cache, last = reports(processes)
    assert lost.startswith("PeerLost: rank 0 lost ") and "repeat this one" in lost
    assert again == last == expected
    greedy = plain.generate(PROMPT, max_new_tokens=9, do_sample=False, eos_token_id=-1)
    assert batch == greedy[0, PROMPT.shape[1] :].tolist()
    assert old_manager.startswith("PeerLost") and "make a new manager" in old_manager
    assert old_cache.startswith("DrumlineError") and "empty" in old_cache
    assert processes[1].wait(60) == 0 and processes[2].wait(60) == -signal.SIGKILL


def is_lost_while_replanning(checkpoints, start, moment, number):
    """The tokens are those of one process after a rank was lost, and one more in the next load."""
    plain, path = checkpoints.llama()
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    expected = plain.generate(PROMPT, **options).tolist()
    processes = start(LOSE_AGAIN, 4, path, moment, int(number))
    lost, *later = reports(processes)
    assert lost.startswith("PeerLost: rank 0 lost ") and "repeat this one" in lost
    assert later == [expected, expected]
    ends = [process.wait(60) for process in processes]
    assert ends == [0, 0, -signal.SIGKILL, -signal.SIGKILL]


def test_a_rank_that_is_suspended_before_the_new_plan_is_done_without(checkpoints, start):
    """Nobody looked for it there, so that the call ended with a time-out."""
    is_lost_while_replanning(checkpoints, start, "plan", signal.SIGSTOP)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("moment", ["meet", "plan", "build", "read", "connect"])
def test_a_rank_that_is_lost_while_the_others_load_again_is_done_without(
    checkpoints, start, moment, number
):
    is_lost_while_replanning(checkpoints, start, moment, number)


IDLE = """
import dataclasses, json, os, signal, sys, time
import torch
import drumline, launcher
from drumline.strategies import replanning

prompt = torch.tensor([[5, 6, 7, 8]])
if launcher.current().rank:
    replanning.TIMINGS = dataclasses.replace(replanning.TIMINGS, regroup_s=0.1)
options = {"on_failure": "replan", "max_memory": ["1GB"] * 3}
with drumline.load(sys.argv[1], "balanced", **options) as model:
    os.kill(model._replanner.coor.peers[2].pid, signal.SIGKILL)
    try:
        model(prompt)
    except drumline.PeerLost:
        time.sleep(0.5)
    model(prompt)
    print(json.dumps([str(rank) for rank in model.device_map.ranks]))
"""


def test_the_ranks_that_are_left_wait_until_the_script_calls_again(checkpoints, start):
    """They gave up a minute after the loss, while a notebook had not been touched."""
    processes = start(IDLE, 3, checkpoints.llama()[1])
    assert reports(processes) == [["0", "1"]]
    assert processes[1].wait(60) == 0


HELD = """
import os, signal, sys, weakref
import torch
import drumline
from drumline.strategies import pipeline_parallel

prompt, weights = torch.tensor([[5, 6, 7, 8]]), []
measure, connect = pipeline_parallel.collect_plan_inputs, pipeline_parallel.connect_stages

def connect_and_note(coor, stage, *rest):
    weights.extend(weakref.ref(p) for p in stage.model.parameters() if not p.is_meta)
    return connect(coor, stage, *rest)

def measure_and_report(*arguments):
    if weights:
        print(sum(weight() is not None for weight in weights), flush=True)
    return measure(*arguments)

pipeline_parallel.connect_stages = connect_and_note
pipeline_parallel.collect_plan_inputs = measure_and_report
options = {"on_failure": "replan", "max_memory": ["1GB"] * 3}
with drumline.load(sys.argv[1], "balanced", **options) as model:
    os.kill(model._replanner.coor.peers[2].pid, signal.SIGKILL)
    try:
        model(prompt)
    except drumline.PeerLost:
        pass
    model(prompt)
"""


def test_no_weight_of_the_model_before_is_held_when_memory_is_measured_again(checkpoints, start):
    """The traceback of the loss held all of them, so that a rank needed memory for two models."""
    processes = start(HELD, 3, checkpoints.llama()[1])
    printed = [process.communicate(timeout=120)[0] for process in processes[:2]]
    assert printed == ["0\n", "0\n"]


def test_ranks_that_cannot_hold_the_model_say_so_in_every_call(checkpoints, start):
    processes = start(PROGRAM, 2, checkpoints.llama()[1], json.dumps(["150KB", "150KB"]))
    lost, batch, old_manager, *later = reports(processes)
    assert lost.startswith("PeerLost") and old_manager.startswith("PeerLost: rank 0 lost rank 1")
    assert all(text.startswith("PlanError: the model needs") for text in (batch, *later))


def replanner_with(coor):
    replanner = object.__new__(Replanner)
    replanner.coor, replanner.script_failure, replanner._end = coor, None, None
    replanner._idle, replanner._num_calls = threading.Condition(), 0
    replanner._outer = contextvars.ContextVar("outer", default=None)
    return replanner


def test_the_socket_of_a_launch_that_releases_all_others_is_closed():
    read, write = os.pipe()
    info = launcher.LaunchInfo("a", 1, 1, 0, 0, "127.0.0.1", 1, extras={"master_fd": str(read)})
    lost = types.SimpleNamespace(reason=FailureReason.EXITED)
    coor = types.SimpleNamespace(
        failures=lambda: [lost], survivors=lambda **_: info, __exit__=lambda *_: None
    )
    replanner_with(coor)._close(lambda: None)
    with pytest.raises(BrokenPipeError):
        os.write(write, b"is anybody there?")
    os.close(write)


def test_ranks_that_never_meet_raise_the_loss_for_which_they_came(monkeypatch):
    """It was a StopIteration."""
    monkeypatch.setattr(replanning, "_met", lambda before: None)
    before, lost = types.SimpleNamespace(ranks=[0, 1]), PeerLost("rank 0 lost rank 1")
    replanner = replanner_with(before)
    with pytest.raises(PeerLost) as raised:
        replanner._regroup(lost)
    assert raised.value is lost and replanner.coor is before


def test_a_call_inside_of_one_of_a_lost_model_fails_at_once_and_one_beside_it_waits(monkeypatch):
    """A logits processor that tried again waited for the call that it was in, for ever."""
    lost = PeerLost("rank 0 lost rank 1")
    model = types.SimpleNamespace(_driver=types.SimpleNamespace(lost=None))
    replanner, order = replanner_with(None), []

    def load_again(model):
        order.append("loaded")
        model._driver.lost = None

    monkeypatch.setattr(replanner, "_load_again", load_again)

    def beside():
        with replanner.call(model, may_wait=True):
            order.append("beside")

    with pytest.raises(PeerLost, match="repeat this one"), replanner.call(model, may_wait=True):
        model._driver.lost = lost
        thread = threading.Thread(target=beside)
        thread.start()
        with pytest.raises(PeerLost, match="repeat this one"):
            MicrobatchRunner().map(lambda _: replanner.call(model, may_wait=True).__enter__(), [0])
        with replanner.call(model, may_wait=True):
            pass
    thread.join(20)
    assert order == ["loaded", "beside"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError, PlanError])
def test_a_load_that_was_interrupted_is_an_error_of_each_later_call(monkeypatch, kind):
    def load_pipeline(*arguments):
        raise kind("planted")

    monkeypatch.setattr(replanning, "load_pipeline", load_pipeline)
    monkeypatch.setattr(Replanner, "_options_now", lambda self: None)
    coor = types.SimpleNamespace(__exit__=lambda *_: None)
    replanner = replanner_with(coor)
    replanner._path = None
    with pytest.raises(kind):
        replanner.load()
    for _ in range(2):
        with pytest.raises(PlanError if kind is PlanError else DrumlineError, match="planted"):
            replanner._load_again(None)
    assert replanner._end.__traceback__ is None


def test_what_the_script_has_set_holds_for_the_model_that_is_loaded_anew(monkeypatch):
    replanner, model, settings = replanner_with(None), torch.nn.Module(), {"micro_batches": False}
    model._leave = types.SimpleNamespace(detach=lambda: None)
    model._driver = types.SimpleNamespace(lost=PeerLost("rank 0 lost rank 1"))
    monkeypatch.setattr(replanner, "load", lambda model, lost: _become(model, torch.nn.Module()))
    settings |= {"prefill_chunk": 0, "generation_config": object()}
    vars(model).update(settings)
    replanner._load_again(model)
    assert vars(model) == vars(torch.nn.Module()) | settings


CUT_OFF = """
import sys
import drumline

def lose():
    raise drumline.PeerLost("rank 0 lost its connection to rank 1")

options = {"on_failure": "replan", "max_memory": ["1GB"] * 2}
with drumline.load(sys.argv[1], "balanced", **options) as model:
    try:
        model._driver._failing_all_threads(lose)
    except drumline.PeerLost:
        pass
"""


def test_a_rank_that_is_cut_off_and_alive_ends_with_the_script(checkpoints, start):
    """It waited to hear who goes on, and rank 0 for it, until the end of the launch."""
    processes = start(CUT_OFF, 2, checkpoints.llama()[1])
    assert [process.wait(30) for process in processes] == [0, 0]


FAILING = """
import sys, drumline, launcher

def fail(path):
    with drumline.load(path, on_failure="replan"):
        raise RuntimeError("of the script")

try:
    launcher.launch(fail, 3, args=sys.argv[1:])
except launcher.LaunchError as error:
    print(error.failures[0].rank, error.failures[0].type)
"""


def test_an_error_of_the_script_is_told_before_the_end_of_the_other_ranks(checkpoints, warm):
    """They waited for rank 0 to end, which waited for them, and were then blamed."""
    done = warm.run("-c", FAILING, checkpoints.llama()[1])
    assert done.stdout == "0 RuntimeError\n", done.stderr


@pytest.mark.parametrize(
    "options",
    [{"device_map": {"": 0}}, {"device_map": "fastest"}, {"tp": 1}, {"on_failure": "retry"}],
)
def test_options_that_do_not_go_with_it_are_refused(checkpoints, options):
    with pytest.raises(PlanError, match="on_failure"):
        drumline.load(checkpoints.llama()[1], **{"on_failure": "replan", **options})


def test_a_coordinator_of_the_user_is_refused(checkpoints):
    with Coordinator() as coor, pytest.raises(PlanError, match="leave coor= out"):
        drumline.load(checkpoints.llama()[1], coor=coor, on_failure="replan")


def test_memory_belongs_to_the_rank_that_it_was_given_for():
    assert memory_of(None, [0, 2]) is None
    assert memory_of([1, 2, 3], [0, 2]) == [1, 3]
    sizes = {"cpu": 1, 1: 2, 2: 3, (1, "cpu"): 4, (3, "disk"): 5}
    assert memory_of(sizes, [0, 2, 3]) == {"cpu": 1, 1: 3, (2, "disk"): 5}
