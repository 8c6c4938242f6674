"""The table of a model that fits on none of the hosts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import big, llama_cpp
from benchmarks.table import Table

SIZES = ["--layers", "2", "--hidden", "64", "--prompt", "8", "--new", "3", "--hosts", "2"]


def test_a_row_compares_the_plan_with_what_was_measured_and_leaves_out_what_was_not():
    table = Table("big", big.COLUMNS)
    ours = {"first_s": 2.0, "token_s": 0.5, "tokens": [1], "peaks": "7, 8", "commands": 2}
    failed = {"peaks": "", "failed": "its process was killed", "commands": 1}
    alone = {**ours, "token_s": 1.0}
    rows = {big.OURS: ours, big.ALONE: alone, big.OFFLOAD: failed}
    big.add(table, rows, alone, "1gbit, 0 ms", {"first_s": 1.0, "token_s": 0.4})
    first, _, third = (dict(zip(big.COLUMNS, row, strict=True)) for row in table.rows)
    assert (first["of the plan (s)"], first["plan / seen"], first["this / peer"]) == (1, 0.5, 2)
    assert (first["tokens/s"], first["of the plan"], first["plan / seen, tokens/s"]) == (
        2,
        2.5,
        1.25,
    )
    assert first["right"] == "yes" and first["commands"] == 2
    assert (third["right"], third["tokens/s"], third["this / peer"]) == (failed["failed"], "", "")


def test_what_llama_bench_prints_of_its_progress_gives_seconds_and_bytes():
    what = ["starting", "warmup prompt run", *(f"prompt run {n}/3" for n in (1, 2, 3))]
    what += ["warmup generation run", *(f"generation run {n}/3" for n in (1, 2, 3))]
    marks = [(f"llama-bench: {text}", 10.0 + n, 1000 * n) for n, text in enumerate(what)]
    tests = [{"n_gen": 0, "avg_ns": 2e9}, {"n_gen": 4, "avg_ns": 8e9}]
    row = llama_cpp.read_marks(marks, 9.0, tests, 4)
    assert row == {
        "load_s": 2,
        "coldest_s": 1,
        "first_s": 2,
        "token_s": 2,
        "nbytes_a_token": 250,  # a thousand for each run of four
    }


class Here:
    """This machine in the place of the hosts."""

    groups = ()

    def enter(self, index):
        pass

    def peaks(self):
        return ""


def raises(folder, options):
    raise MemoryError(f"no room for {folder}")


def is_killed(folder, options):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("work", "why"),
    [(raises, "MemoryError: no room for model"), (is_killed, "its process was killed")],
)
def test_a_row_that_cannot_be_measured_says_why(work, why):
    """It was left empty; of drumline itself, it ended the whole table."""
    row = big.forked(Here(), [(work, "model", {})], None)
    assert row == {"failed": why, "commands": 1, "peaks": ""}
    assert big.planned(row, None, "model", 0, "1gbit") == {}


@pytest.mark.soak
def test_a_trial_measures_every_way_with_the_same_tokens(tmp_path):
    command = [sys.executable, "-m", "benchmarks.big", *SIZES, "--limit", "0", "--save"]
    command += ["--delays", "0", "5"]
    environ = {**os.environ, "BENCHMARK_RESULTS": str(tmp_path)}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "big.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and {row["right"] for row in rows} == {"yes"}
    assert all(rows[n]["plan / seen"] and rows[n]["of the plan"] for n in (0, 5))
