"""`python -m communicator check`, as a vendor runs it."""

import os
import sys
from pathlib import Path

import pytest

from communicator import Communicator, cli, conformance
from communicator.backends.tcp import Tcp
from tests.cases import soak

CHECK = ("-m", "communicator", "check")


class Swapped(Tcp):
    """A backend that lies."""

    def allgather(self, out, tensor):
        super().allgather(out, tensor)
        out.copy_(out.flip(0))


def test_the_options_are_these_and_no_more():
    (commands,) = cli.parser()._subparsers._group_actions
    options = [action.dest for action in commands.choices["check"]._actions]
    assert list(commands.choices) == ["check"]
    assert options == ["help", "backend", "nprocs", "launcher", "markdown"]


@pytest.mark.parametrize(
    ("backend", "nprocs", "launcher"),
    [("gloo", "2", "threads"), soak("tcp", "3", "multiprocessing")],
)
def test_a_backend_that_conforms_ends_with_0_and_every_case_is_listed(
    warm, backend, nprocs, launcher
):
    found = warm.run(*CHECK, "--backend", backend, "-n", nprocs, "--launcher", launcher)
    assert found.returncode == 0, found.stderr
    assert "passed  allreduce, reduce, reduce_scatter bfloat16 sum" in found.stdout
    assert f"{backend}, {nprocs} ranks: " in found.stdout and ", 0 FAILED" in found.stdout


def test_a_backend_that_lies_ends_with_1_and_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setitem(
        conformance.check_backend.__globals__,
        "Communicator",
        lambda coor, _: Communicator(coor, Swapped),
    )
    assert cli.main(["check", "-n", "2", "--launcher", "threads"]) == 1
    shown = capsys.readouterr().out
    assert "FAILED  movement float32: rank 0: allgather of (1,)" in shown
    assert "passed  barrier" in shown


def test_a_report_is_a_table_that_a_vendor_can_publish():
    outcomes = [
        conformance.CaseOutcome("movement float32", "passed"),
        conformance.CaseOutcome("allreduce, reduce, reduce_scatter float32 max", "FAILED", "1 + 1"),
        conformance.CaseOutcome("barrier", "passed"),
    ]
    lines = conformance.Report("acme", 2, tuple(outcomes)).table().splitlines()
    assert lines[0].endswith(", acme, 2 ranks: 2 passed, 0 unsupported, 1 FAILED")
    assert "| | moved | sum | prod | max | min | avg |" in lines
    assert "| float32 | passed |  |  | FAILED |  |  |" in lines and lines[-1] == "passed: barrier"


def test_a_backend_that_is_not_there_ends_with_2_and_says_what_is(capsys):
    assert cli.main(["check", "--backend", "rocket", "--launcher", "threads"]) == 2
    (told,) = capsys.readouterr().err.splitlines()  # no traceback
    assert "no rank can use rocket: no backend is called 'rocket'. There are: " in told


def test_a_launcher_that_is_not_there_ends_with_2_and_says_which_are(capsys):
    assert cli.main(["check", "--launcher", "rocket"]) == 2
    assert "choose among multiprocessing, threads, torchrun" in capsys.readouterr().err


def test_mpiexec_starts_the_ranks_of_a_check(warm):
    if not (Path(sys.executable).parent / "mpiexec").exists():
        pytest.skip("no mpiexec beside this Python: runs after `pip install mpich`")
    environ = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    found = warm.run(*CHECK, "--backend", "mpi", "--launcher", "mpi", env=environ)
    assert found.returncode == 0, found.stderr
    assert "mpi, 2 ranks: " in found.stdout


def test_a_number_of_ranks_that_cannot_be_is_wrong_usage(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["check", "-n", "0"])
    assert "invalid num_ranks value: '0'" in capsys.readouterr().err
