"""The table of a model that fits on none of the hosts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import big
from benchmarks.table import Table

SIZES = ["--layers", "2", "--hidden", "64", "--prompt", "8", "--new", "3", "--hosts", "2"]


def test_a_row_compares_the_plan_with_what_was_measured_and_leaves_out_what_was_not():
    table = Table("big", big.COLUMNS)
    ours = {"first_s": 2.0, "token_s": 0.5, "tokens": [1], "peak_mb": 7.0}
    failed = {"peak_mb": "", "failed": "its process was killed"}
    rows = {big.OURS: ours, big.ALONE: {**ours, "token_s": 1.0}, big.OFFLOAD: failed}
    big.add(table, rows, "1gbit", {"first_s": 1.0, "token_s": 0.5})
    first, _, third = (dict(zip(big.COLUMNS, row, strict=True)) for row in table.rows)
    assert (first["plan / first token"], first["plan / token"], first["ratio"]) == (0.5, 1, 2)
    assert first["right"] == "yes" and first["tokens/s"] == 2
    assert (third["right"], third["tokens/s"], third["ratio"]) == (failed["failed"], "", "")


class Here:
    """This machine in the place of the hosts."""

    groups = ()

    def enter(self, index):
        pass

    def peak_mb(self):
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
    assert row == {"failed": why, "peak_mb": ""}
    assert big.planned(row, None, "model", 0, "1gbit") == {}


@pytest.mark.soak
def test_a_trial_measures_every_way_with_the_same_tokens(tmp_path):
    command = [sys.executable, "-m", "benchmarks.big", "--limit", "0", *SIZES, "--save"]
    environ = {**os.environ, "BENCHMARK_RESULTS": str(tmp_path)}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "big.jsonl").read_text().splitlines()]
    assert len(rows) == 5 and {row["right"] for row in rows} == {"yes"}
    assert rows[0]["plan / token"] and rows[0]["plan / first token"]
