"""What a Job refuses, before anything is started."""

from __future__ import annotations

import pytest

import launcher
from launcher import cli, launch_job, registry


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


def test_a_timeout_of_most_of_a_year_is_one(command):
    """It was more milliseconds than one wait can take."""
    ended = command.run("run", "-n", "1", "--timeout", "3e7", command.script("print('ran')"))
    assert ended.code == 0 and ended.lines(0) == ["ran"]


ASKED = {
    "nnodes": ["--nnodes", "2"],
    "bind": ["--bind"],
    "preload": ["--preload", "json"],
    "log_dir": ["--log-dir", "logs"],
    "trace": ["--trace", "trace.json"],
}
IGNORED = {
    "multiprocessing": ["nnodes"],
    "threads": ["nnodes", "bind", "preload"],
    "torchrun": ["bind", "preload"],
    "mpi": ["preload"],
    "slurm": ["preload"],
    "ray": ["bind", "preload", "log_dir", "trace"],
}


@pytest.mark.parametrize(("name", "options"), IGNORED.items())
def test_an_option_that_a_launcher_would_ignore_is_refused_by_its_name(
    command, capsys, name, options
):
    """Threads over two nodes waited for ever; the others just did without."""
    script = command.script("print('ran')")
    for option in options:
        for dry in ([], ["--dry-run"]):
            arguments = ["run", "--launcher", name, *ASKED[option], *dry, script]
            assert cli.main(arguments) == cli.USAGE_CODE
            told = capsys.readouterr().err
            assert ASKED[option][0] in told and f"the launcher {name!r} does not honour" in told


def test_every_launcher_says_what_it_honours_and_the_rest_is_refused():
    for name in registry.BUILT_IN:
        assert set(launch_job.OPTIONS) - registry.find(name).HONOURS == set(IGNORED[name])


def test_threads_of_a_program_write_no_logs(tmp_path):
    with pytest.raises(ValueError, match=r"log_dir=.* cannot be honoured"):
        launcher.launch(print, 2, launcher="threads", log_dir=str(tmp_path / "logs"))
