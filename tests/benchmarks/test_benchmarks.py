"""The benchmarks run, and what they write is read again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import plots, report, scale
from benchmarks.__main__ import STEPS
from benchmarks.table import Spread, Table, spread

ROOT = Path(__file__).parents[2]


def test_a_trial_of_some_steps_writes_tables_lines_pictures_and_the_page(tmp_path):
    environ = {**os.environ, "BENCHMARK_RESULTS": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks", "--quick", "tracing", "scale"]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "README.md").read_text()
    assert "### tracing" in page and "python -m benchmarks.scale" in page
    rows = [json.loads(line) for line in (tmp_path / "tracing.jsonl").read_text().splitlines()]
    assert len(rows) == 5 and {row["right"] for row in rows} == {"yes"}
    assert "quadratic" in (tmp_path / "scale-page.md").read_text()


def test_an_unknown_step_is_refused_with_those_there_are():
    command = [sys.executable, "-m", "benchmarks", "speed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "startup" in done.stderr


@pytest.mark.parametrize("step", STEPS)
def test_every_step_is_a_module_that_is_there(step):
    module = STEPS[step][0][0]
    assert (ROOT / f"{module.replace('.', '/')}.py").exists()


def test_a_spread_is_text_in_the_table_and_numbers_in_the_lines(tmp_path):
    table = Table("one", ("what", "us"))
    table.add("call", spread([1.0, 2.0, 3.0, 4.0, 5.0]))
    row = json.loads(table.save(tmp_path).with_suffix(".jsonl").read_text())
    assert row["us"] == {"median": 3.0, "low": 1.5, "high": 4.5}
    assert "3 (1.5-4.5)" in table.markdown() and plots.number(row["us"]) == 3.0


def test_one_value_has_no_range():
    assert spread([2.0]) == "2" and isinstance(spread([2.0]), Spread)


@pytest.mark.parametrize(
    ("values", "factors"),
    [([5, 5, 5, 5], [5, 0, 0]), ([8, 16, 32, 64], [0, 1, 0]), ([64, 256, 1024, 4096], [0, 0, 1])],
)
def test_growth_is_fitted_with_as_few_terms_as_will_do(values, factors):
    found, error = scale.fit([8, 16, 32, 64], values)
    assert found == pytest.approx(factors) and error < 1e-6


def test_a_long_table_is_folded_and_a_short_one_is_not(tmp_path):
    for name, count in (("short", 3), ("long", 40)):
        table = Table(name, ("what", "us"))
        for number in range(count):
            table.add(f"row {number}", 1.0)
        text = report.embedded(table.save(tmp_path))
        assert ("<details" in text) == (name == "long")
        assert f"| row {count - 1} |" in " ".join(text.split())


def test_pictures_are_drawn_of_the_tables_that_are_there(tmp_path):
    pytest.importorskip("matplotlib", reason="runs after `pip install matplotlib`")
    table = Table("startup", ("what", "ranks", "ours (s)", "ours, preloaded (s)", "peer", "(s)"))
    for ranks in (2, 4):
        table.add("command to barrier", ranks, spread([1.0, 2.0]), 0.5, "torchrun", 3.0)
    table.save(tmp_path)
    (picture,) = plots.draw(tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.with_suffix(".svg").read_text().count("<svg") == 1
