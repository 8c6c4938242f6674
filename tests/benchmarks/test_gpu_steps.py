"""The runner of `make gpu`: what it keeps when steps fail, hang, or need other variables."""

import itertools
import re
import shutil
import subprocess
import sys
import tarfile
import time
from unittest.mock import ANY

import pytest
import torch

from benchmarks import gpu, table
from tests.gpu import steps
from tests.gpu.steps import PARTS, ROOT, Results, Step, run_step, run_steps


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    return Results(tmp_path / "out" / "results.tgz")


def logs(results):
    with tarfile.open(results.archive) as tar:
        return {
            name.removeprefix("gpu/").removesuffix(".log"): tar.extractfile(name).read().decode()
            for name in tar.getnames()
            if name.endswith(".log")
        }


def test_every_part_ends_within_its_time():
    """A step that is run again counts twice."""
    for name, part in PARTS.items():
        assert max(step.limit_s for step in part) + 40 <= 560, name  # for "build" comes first
        assert sum(step.limit_s * (2 if step.retry else 1) for step in part) <= steps.PART_S, name


def test_what_is_most_worth_ends_within_28_minutes_even_if_every_step_takes_all_of_its_time():
    first = ["facts", "tests", "tables", "models"]
    assert list(PARTS)[: len(first)] == first
    assert sum(step.limit_s for name in first for step in PARTS[name]) <= 28 * 60


def test_every_word_that_selects_tests_is_in_the_name_of_one():
    for step in itertools.chain.from_iterable(PARTS.values()):
        for file, words in re.findall(r"(tests/gpu/\S+) -k '(.*)'", step.command):
            names = re.findall(r"def (test_\w+)", (ROOT / file).read_text())
            for word in set(re.findall(r"\w+", words)) - {"and", "or", "not"}:
                assert any(word in name for name in names), (step.name, word)


def test_every_step_is_in_the_archive_before_the_next_begins(results):
    assert run_step(Step("first", "echo 41", 60), results)
    assert run_step(Step("second", f"tar tzf {results.archive} | grep first.log", 60), results)
    assert not run_step(Step("third", "echo 43; exit 3", 60), results)
    assert {name: text.split()[0] for name, text in logs(results).items()} == {
        "first": "41",
        "second": "gpu/first.log",
        "third": "43",
    }
    assert "exit 3" in logs(results)["third"]


@pytest.fixture
def limits_begin_with_output(results, monkeypatch):
    """The time of a step begins with its first line, so that none is over before its shell runs."""
    wait = subprocess.Popen.wait

    def wait_after_output(process, timeout=None):
        while not any(log.stat().st_size for log in results.folder.glob("*.log")):
            time.sleep(0.01)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_after_output)


@pytest.mark.usefixtures("limits_begin_with_output", "interrupts")
def test_a_step_that_hangs_says_where_it_is_and_is_killed_with_its_children(results, tmp_path):
    say = "trap 'echo was here' INT; echo started"  # as pytest and ranks do
    hangs = Step("hangs", f"{say}; (sleep 300; touch {tmp_path}/late) & sleep 300", 0)
    assert not run_step(hangs, results)
    assert logs(results)["hangs"].splitlines() == ["started", "was here", ANY]
    assert "== hangs: exit -9 after" in logs(results)["hangs"]


def test_variables_that_let_a_step_pass_are_kept_for_the_later_ones(results):
    needs = 'test "$PLANTED" = 1'
    assert not run_step(Step("needs", needs, 60, {"PLANTED": "1"}), results)
    assert set(logs(results)) == {"needs", "needs-again"}
    assert run_step(Step("later", needs, 60), Results(results.archive))


def test_variables_that_do_not_help_are_not_kept(results):
    assert not run_step(Step("fails", "false", 60, {"PLANTED": "1"}), results)
    assert run_step(Step("later", 'test -z "$PLANTED"', 60), results)


def test_a_step_that_might_not_end_in_time_is_not_begun_and_is_named(results, monkeypatch):
    steps_ = [Step("first", "true", 60), Step("second", "exit 3", 99), Step("third", "true", 9999)]
    assert run_steps(steps_, results, 300) == (["second"], ["third"])
    assert [results.has_ended(step.name) for step in steps_] == [True, True, False]
    assert run_steps(steps_[2:], results, 300) == ([], [])  # or nothing would ever be
    monkeypatch.setattr(steps, "FRESH_S", 0.0)
    assert not results.has_ended("first")


def test_nothing_runs_without_what_the_first_step_builds(results):
    steps_ = [Step("build", "exit 3", 60), Step("late", "true", 60)]
    assert run_steps(steps_, results, 300) == (["build"], [])
    assert set(logs(results)) == {"build"}


@pytest.mark.parametrize("is_another_machine", [False, True], ids=["same", "another machine"])
def test_the_same_command_goes_on_with_what_has_not_ended(
    results, monkeypatch, capfd, is_another_machine
):
    build, ended, late = (Step(name, "true", 60) for name in ("build", "ended", "late"))
    assert run_step(ended, results) and run_step(build, results)
    capfd.readouterr()
    monkeypatch.setattr(steps, "PARTS", {"a": [build, ended], "b": [late]})
    monkeypatch.setattr(sys, "argv", ["steps", str(results.archive), "--seconds", "300"])
    if is_another_machine:
        monkeypatch.setattr(steps, "PARTS_BROUGHT", results.folder.parent)
        results.archive.rename(results.folder.parent / results.archive.name)
        shutil.rmtree(results.folder)
    assert steps.main() == 0
    output = capfd.readouterr().out
    assert re.findall("== (.*): exit", output) == ["build", "late"]
    sys.argv.insert(2, "a")  # a part by its name needs on a bare machine what is built, too
    assert steps.main() == 0
    assert re.findall("== (.*): exit", capfd.readouterr().out) == ["build", "ended"]


def test_a_table_in_which_something_does_not_hold_fails_its_step(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "GPU", torch.device("cpu"))
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    for verdict, code in {"yes": 0, "NO": 1}.items():
        made = table.Table("gpu-made-up", ("what", "holds"), rows=[("a sum", verdict)])
        monkeypatch.setattr(gpu, "TABLES", {"made-up": lambda made=made: made})
        monkeypatch.setattr(sys, "argv", ["gpu"])
        assert gpu.main() == code
    assert "made-up: something does not hold" in capsys.readouterr().err
