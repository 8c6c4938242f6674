"""Job: validation before anything is started."""

from __future__ import annotations

import pytest

import launcher
from launcher import launch_job, registry


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nprocs": "2"}, "nprocs must be a whole number, not '2'"),
        ({"nprocs": True}, "nprocs must be a whole number, not True"),
        ({"master_port": 1.5}, "master_port must be a whole number"),
        ({"timeout_s": "3"}, "timeout_s must be a number of seconds or None, not '3'"),
        ({"timeout_s": float("inf")}, "over a year"),
        ({"timeout_s": 1e300}, "over a year"),
        ({"timeout_s": float("nan")}, "not positive"),
        ({"preload": "torch"}, "preload must be a sequence of the names of modules, not 'torch'"),
        ({"preload": [1]}, "preload must be"),
        ({"launch_id": 5}, "launch_id must be a string, not 5"),
        ({"launch_id": ""}, "not be empty"),
        ({"launch_id": "\udc80"}, "launch id .* UTF-8"),
        ({"master_addr": "\udc80"}, "master address .* UTF-8"),
        ({"master_addr": ""}, "master address .* must not be empty"),
    ],
)
@pytest.mark.parametrize("name", ["multiprocessing", "threads"])
def test_invalid_values_are_named(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        launcher.launch(print, launcher=name, **wrong)


@pytest.mark.parametrize("seconds", ["inf", "1e300"])
def test_a_timeout_of_over_a_year_is_a_usage_error(command, usage_error, seconds):
    script = command.script("print('ran')")
    assert "over a year" in usage_error("run", "-n", "1", "--timeout", seconds, script)


def test_a_timeout_of_most_of_a_year(command):
    """It was more milliseconds than one wait can take."""
    ended = command.run("run", "-n", "1", "--timeout", "3e7", command.script("print('ran')"))
    assert ended.code == 0 and ended.lines(0) == ["ran"]


ARGUMENTS = {
    "nnodes": ["--nnodes", "2"],
    "bind": ["--bind"],
    "preload": ["--preload", "json"],
    "log_dir": ["--log-dir", "logs"],
    "trace": ["--trace", "trace.json"],
}
UNSUPPORTED = {
    "multiprocessing": [],
    "threads": ["nnodes", "bind", "preload"],
    "torchrun": ["bind", "preload", "share_devices"],
    "mpi": ["preload", "share_devices"],
    "slurm": ["preload", "share_devices"],
    "ray": ["bind", "preload", "share_devices", "log_dir", "trace"],
}


@pytest.mark.parametrize(("name", "options"), UNSUPPORTED.items())
def test_unsupported_options_are_usage_errors(command, usage_error, name, options):
    """Threads over two nodes waited for ever; the others just ignored their options."""
    script = command.script("print('ran')")
    for option in (option for option in options if option in ARGUMENTS):
        for dry in ([], ["--dry-run"]):
            text = usage_error("run", "--launcher", name, *ARGUMENTS[option], *dry, script)
            assert f"the launcher {name!r} does not support {option}=" in text


@pytest.mark.parametrize("name", ["torchrun", "mpi", "slurm", "ray"])
def test_devices_are_shared_only_where_ranks_are_given_them(name):
    """The option was ignored."""
    with pytest.raises(ValueError, match="does not support share_devices=True"):
        launcher.launch("script.py", 2, launcher=name, share_devices=True)


def test_every_launcher_lists_the_options_that_it_supports():
    for name in registry.BUILT_IN:
        assert set(launch_job.OPTIONS) - registry.find(name).SUPPORTS == set(UNSUPPORTED[name])


def test_log_dir_is_not_supported_for_threads_of_a_program(tmp_path):
    with pytest.raises(ValueError, match=r"log_dir=.* is not supported"):
        launcher.launch(print, 2, launcher="threads", log_dir=str(tmp_path / "logs"))
