"""Timings that depend on each other."""

import ast
import dataclasses

import pytest

from communicator.timings import CommunicatorTimings
from coordinator.timings import CoordinatorTimings
from drumline.timings import ModelTimings
from launcher.timings import TIMINGS, Timings, patience_s, time_scale
from tests.programs.syntax_trees import nodes, trees

SHOW = """
from coordinator.timings import DEFAULT
from launcher.timings import TIMINGS
print(TIMINGS.stop_grace_s, DEFAULT.heartbeat_s)
"""


def test_timings_that_contain_others_are_longer():
    times = TIMINGS
    assert times.reap_lag_s < times.failure_grace_s < times.stop_grace_s
    assert times.reap_poll_s < times.orphan_grace_s < times.unkillable_s
    assert times.backend_grace_s + times.unkillable_s < times.reaper_exit_s
    assert times.stop_grace_s < times.longest_poll_s < times.longest_timeout_s


@pytest.mark.parametrize(
    "kind",
    [Timings, CoordinatorTimings, CommunicatorTimings, ModelTimings],
    ids=lambda k: k.__name__,
)
def test_a_time_that_can_be_set_is_waited_for_somewhere(kind):
    """Three times of a store that nobody asked any longer were left in the table."""
    read = {
        node.attr
        for tree in trees().values()
        for node in nodes(tree)
        if isinstance(node, ast.Attribute)
    }
    assert [field.name for field in dataclasses.fields(kind) if field.name not in read] == []


def test_scaled_multiplies_every_time():
    assert Timings(stop_grace_s=8).scaled(0.25).stop_grace_s == 2
    assert Timings().scaled(0.5).reap_lag_s == TIMINGS.reap_lag_s / 2


@pytest.mark.parametrize("name", ["multiprocessing", "threads"])
def test_one_variable_scales_the_timings_of_every_process_of_a_launch(command, name):
    options = ["--launcher", name, "-n", "1", command.script(SHOW)]
    ended = command.run("run", *options, env={"DRUMLINE_TIME_SCALE": "0.5"})
    assert ended.lines(0) == ["5.0 0.25"], ended


@pytest.mark.parametrize("text", ["0", "-1", "2", "nan", "fast"])
def test_a_scale_that_is_no_factor_is_refused(monkeypatch, text):
    monkeypatch.setenv("DRUMLINE_TIME_SCALE", text)
    with pytest.raises(ValueError, match=f"DRUMLINE_TIME_SCALE={text} is not a factor"):
        time_scale()


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "long"])
def test_a_patience_that_is_no_number_of_seconds_is_refused(monkeypatch, text):
    monkeypatch.setenv("DRUMLINE_PATIENCE", text)
    with pytest.raises(ValueError, match=f"DRUMLINE_PATIENCE={text} is not a number of seconds"):
        patience_s()


SHOW_PATIENCE = "import launcher\nprint(launcher.patience_s())\n"


def test_one_option_sets_the_patience_of_every_process_of_a_launch(command):
    ended = command.run("run", "--patience", "60", "-n", "1", command.script(SHOW_PATIENCE))
    assert ended.lines(0) == ["60.0"], ended


def test_a_rank_that_patience_bears_is_not_taken_for_one_that_has_closed_its_group():
    timings = CoordinatorTimings().with_patience(60)
    assert timings.new_group_s > timings.silent_s >= 60
