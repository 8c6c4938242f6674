"""`python -m communicator check`, as a vendor runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

from communicator import cli
from communicator.gloo import Gloo

ROOT = Path(__file__).parents[2]


class Swapped(Gloo):
    """A backend that lies."""

    def _allgather(self, out, tensor):
        super()._allgather(out, tensor)
        out.copy_(out.flip(0))


def check(*arguments):
    command = [sys.executable, "-m", "communicator", "check", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


def test_the_options_are_these_and_no_more():
    (commands,) = cli.parser()._subparsers._group_actions
    options = [action.dest for action in commands.choices["check"]._actions]
    assert list(commands.choices) == ["check"]
    assert options == ["help", "backend", "nprocs", "launcher"]


@pytest.mark.parametrize("launcher", ["threads", "multiprocessing"])
def test_a_backend_that_conforms_ends_with_0_and_every_case_is_listed(launcher):
    found = check("--backend", "gloo", "-n", "3", "--launcher", launcher)
    assert found.returncode == 0, found.stderr
    assert "passed  allreduce, reduce, reduce_scatter bfloat16 sum" in found.stdout
    assert "gloo, 3 ranks: " in found.stdout and ", 0 FAILED" in found.stdout


def test_a_backend_that_lies_ends_with_1_and_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setitem(cli.rank.__globals__, "Communicator", lambda coor, backend: Swapped(coor))
    assert cli.main(["check", "-n", "2", "--launcher", "threads"]) == 1
    shown = capsys.readouterr().out
    assert "FAILED  movement float32: rank 0: allgather of 1" in shown
    assert "passed  barrier" in shown


def test_a_backend_that_is_not_there_ends_with_1_and_says_what_is():
    found = check("--backend", "rocket")
    assert found.returncode == 1
    assert "no backend is called 'rocket'. There are: " in found.stderr


def test_a_number_of_ranks_that_cannot_be_is_wrong_usage(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["check", "-n", "0"])
    assert "invalid count value: '0'" in capsys.readouterr().err
