"""What a Job refuses, before anything is started."""

from __future__ import annotations

import pytest

import launcher


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nprocs": "2"}, "nprocs must be a whole number, not '2'"),
        ({"nprocs": True}, "nprocs must be a whole number, not True"),
        ({"master_port": 1.5}, "master_port must be a whole number"),
        ({"timeout_s": "3"}, "timeout_s must be a number of seconds or None, not '3'"),
        ({"timeout_s": float("inf")}, "over a year"),
        ({"timeout_s": 1e300}, "over a year"),
        ({"timeout_s": float("nan")}, "no time"),
        ({"preload": "torch"}, "preload must be a sequence of the names of modules, not 'torch'"),
        ({"preload": [1]}, "preload must be"),
        ({"launch_id": 5}, "launch_id must be a string, not 5"),
        ({"launch_id": ""}, "must have a character"),
        ({"launch_id": "\udc80"}, "UTF-8"),
    ],
)
@pytest.mark.parametrize("name", ["multiprocessing", "threads"])
def test_what_makes_no_sense_is_refused_by_its_name(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        launcher.launch(print, launcher=name, **wrong)


@pytest.mark.parametrize("seconds", ["inf", "1e300"])
def test_a_timeout_that_no_clock_can_wait_for_is_refused(command, seconds):
    ended = command.run("run", "-n", "1", "--timeout", seconds, command.script("print('ran')"))
    assert ended.code == 2 and "over a year" in ended.err and ended.out == ""
