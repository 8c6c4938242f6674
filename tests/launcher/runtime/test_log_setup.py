"""One variable sets what our layers log; the root logger is the program's."""

import logging

import pytest

from launcher import cli
from launcher.runtime import log_setup

SCRIPT = """
import logging, sys
log = logging.getLogger("coordinator")
assert logging.getLogger().handlers == []
log.info("an event"); log.warning("a warning")
logging.basicConfig(format="mine: %(message)s")
log.warning("another")
"""


@pytest.mark.parametrize(
    ("level", "shows_info", "launcher"),
    [
        ("info", True, "multiprocessing"),
        ("", False, "multiprocessing"),
        ("ERROR", False, "multiprocessing"),
        ("info", True, "threads"),  # below a reaper, as ranks of backend launchers
    ],
)
def test_a_rank_logs_from_the_level_of_the_variable_on(command, level, shows_info, launcher):
    environ = {"DRUMLINE_LOG_LEVEL": level}
    options = ["-n", "1", "--launcher", launcher]
    ended = command.run("run", *options, command.script(SCRIPT), env=environ)
    assert ended.code == 0, ended.err
    lines = [line for line in ended.err.splitlines() if line.startswith("[0 err] ")]
    assert ("[0 err] coordinator: an event" in lines) == shows_info
    assert ("[0 err] coordinator: a warning" in lines) == (level != "ERROR")
    assert ("[0 err] mine: another" in lines) == (level != "ERROR")
    assert "[0 err] coordinator: another" not in lines  # the program's own handlers print it
    assert ("launcher: launch " in ended.err) == shows_info


def test_a_level_that_does_not_exist_is_a_usage_error(command, usage_error, monkeypatch):
    monkeypatch.setenv("DRUMLINE_LOG_LEVEL", "loud")
    assert "DRUMLINE_LOG_LEVEL=LOUD" in usage_error("run", command.script(""))


def test_configuring_twice_adds_one_handler(monkeypatch):
    for name in log_setup.PACKAGES:
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    log_setup.configure()
    log_setup.configure()
    assert [len(logging.getLogger(name).handlers) for name in log_setup.PACKAGES] == [1] * 4


def test_help_names_the_variable():
    assert log_setup.LOG_LEVEL in cli.run_options.EPILOG
