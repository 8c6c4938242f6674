"""The benchmarks run, and what they write is read again."""

import ctypes
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import calls, plots, report, scale, speed, steps, table
from benchmarks.__main__ import STEPS, ended, options, run
from benchmarks.table import UNFINISHED, Spread, Table, alternate, spread
from communicator import Communicator
from communicator.backends.plugin import load
from coordinator import Coordinator
from tests.cases import soak

ROOT = Path(__file__).parents[2]


IN_EVERY_RUN = ("collectives", "coordinator-peers", "model")  # beside the two below: seconds each


def trial(folder, *names):
    environ = {**os.environ, "BENCHMARK_RESULTS": str(folder)}
    command = [sys.executable, "-m", "benchmarks", "--quick", *names]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (folder / "README.md").read_text()


@pytest.mark.parametrize("step", [n if n in IN_EVERY_RUN else soak(n) for n in STEPS])
def test_a_trial_of_a_step_ends_well_and_is_on_the_page(tmp_path, step):
    page = trial(tmp_path, step)
    assert f"python -m {STEPS[step][0][0]} " in page and "Not whole" not in page
    lines = "".join(path.read_text() for path in tmp_path.glob("*.jsonl")).splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row.get("right", row.get("equal", "yes")) for row in rows} <= {"yes", ""}


def test_a_trial_of_two_steps_writes_tables_lines_pictures_and_the_page(tmp_path):
    page = trial(tmp_path, "tracing", "scale")
    assert "### tracing" in page and "python -m benchmarks.scale" in page
    rows = [json.loads(line) for line in (tmp_path / "tracing.jsonl").read_text().splitlines()]
    assert len(rows) == 5 and {row["right"] for row in rows} == {"yes"}
    assert "quadratic" in (tmp_path / "scale-page.md").read_text()


def test_a_call_costs_less_than_half_of_one_through_ctypes(tmp_path, monkeypatch):
    """An order of magnitude lies between, in processor time and in turns."""
    monkeypatch.setattr(calls, "CALLS", 1000)
    path = str(calls.compiled(tmp_path))
    counting, tensor = ctypes.CDLL(path), torch.ones(1024)
    with Coordinator() as coor, Communicator(coor, load(path)) as comm:
        ways = {"ours": comm.allreduce, "ctypes": dict(calls.peers(counting))[calls.CTYPES]}
        cases = {name: partial(calls.ns, call, tensor) for name, call in ways.items()}
        times = alternate(cases, 7)
    assert min(times["ours"]) < min(times["ctypes"]) / 2


def test_a_command_that_fails_or_hangs_is_told_of():
    python = [sys.executable, "-c"]
    assert ended([*python, ""], {}) == steps.WELL
    assert ended([*python, "raise SystemExit(3)"], {}) == "ended with 3"
    assert ended([*python, "import time; time.sleep(60)"], {}, 0.2).startswith("hung")


def test_a_step_that_failed_is_told_of_on_the_page_and_by_the_exit_code(tmp_path, monkeypatch):
    took = {"tracing": (2.0, "ended with 1"), "scale": (61.0, steps.WELL)}
    monkeypatch.setattr("benchmarks.__main__.ran", lambda name, *_: took[name])
    assert run(["tracing", "scale"], False, tmp_path) == 1
    page = (tmp_path / "README.md").read_text()
    assert "**Not whole:** `tracing` ended with 1." in page and "| scale | well | 61 |" in page
    assert steps.expected(["scale"], tmp_path) == "this takes about 1 min, as the last time"
    assert run(["tracing", "scale"], False, tmp_path) == 1 and run(["scale"], False, tmp_path) == 0


def test_rows_are_kept_as_they_come_and_a_table_without_its_end_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.table.RESULTS", tmp_path)
    table = Table("one", ("what", "us"), keep=True)
    table.add("call", 1.0)
    assert UNFINISHED in (tmp_path / "one.md").read_text()
    assert len((tmp_path / "one.jsonl").read_text().splitlines()) == 1
    table.end()
    assert UNFINISHED not in (tmp_path / "one.md").read_text()


def test_the_numbers_of_the_readme_are_those_of_the_tables():
    page = (ROOT / "README.md").read_text()
    shown = page.partition(speed.START)[2].partition(speed.END)[0]
    assert shown == speed.lines(ROOT / "benchmarks" / "results"), "python -m benchmarks.report"


def test_a_rate_is_shown_as_the_time_of_one_and_rows_that_were_not_measured_are_counted(tmp_path):
    where = {"machine": "this", "commit": "1", "link, delay": "1gbit, 0 ms"}
    rates = {"drumline": 10.0, "llama.cpp RPC": 10.1}
    rows = [{**where, "over": over, "tokens/s": rate} for over, rate in rates.items()]
    (tmp_path / "big.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = speed.lines(tmp_path)
    assert "| 100 ms | llama.cpp RPC | 99 ms | 1.01 |" in shown
    assert f"{len(speed.PICKS) - 1} more were not measured" in shown


def test_below_the_table_stands_the_commit_of_each_row(tmp_path):
    where = {"machine": "this", "link, delay": "1gbit, 0 ms", "clients": 1, "tokens/s": 10.0}
    big = ("1", "over", ("drumline", "llama.cpp RPC"))
    serve = ("2", "server", ("drumline, 2 ranks", "vLLM", "llama.cpp, float32"))
    for name, (commit, column, contestants) in {"big": big, "serve": serve}.items():
        rows = [{**where, "commit": commit, column: contestant} for contestant in contestants]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = speed.lines(tmp_path)
    assert shown.count("| 100 ms |") == 4 and "Commit: 1; of serve: 2." in shown


def test_the_page_of_the_benchmarks_shows_every_table_and_picture_that_is_kept():
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for path in (ROOT / "benchmarks" / "results").iterdir():
        assert (
            path.suffix not in (".md", ".png") or f"### {path.stem}\n" in page or path.name in page
        )


def test_the_document_explains_every_step_and_shows_every_part_of_the_page():
    document = (ROOT / "docs" / "benchmarks.md").read_text()
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for step in STEPS:
        assert f"`{step}`" in document
    for section in report.SECTIONS:
        assert f'--8<-- "benchmarks/README.md:{section.name}"' in document
        assert f"--8<-- [start:{section.name}]" in page


def test_an_unknown_step_is_refused_with_those_there_are():
    command = [sys.executable, "-m", "benchmarks", "speed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "startup" in done.stderr


def test_peers_go_to_the_steps_that_compare_with_them():
    for step in STEPS:
        words = options(step, False, Path("bin"), ["vLLM=vllm serve"])
        assert ("--llama-cpp" in words) == (step in ("big", "big-bfloat16", "serve"))
        assert (words[-3:-1] == ["--peer", "vLLM=vllm serve"]) == (step == "serve")
        assert not {"--llama-cpp", "--peer"} & {*options(step, True, Path("bin"), ["vLLM=vllm"])}


@pytest.mark.parametrize("step", STEPS)
def test_every_step_is_a_module_that_is_there(step):
    module = STEPS[step][0][0]
    assert (ROOT / f"{module.replace('.', '/')}.py").exists()


def test_a_command_above_a_table_names_no_path_of_a_machine(monkeypatch):
    """The commands of the committed tables of big and serve did."""
    monkeypatch.setattr(sys, "argv", ["big.py", "--llama-cpp", "/home/me/llama.cpp/build/bin"])
    assert table.command()[-2:] == ["--llama-cpp", "llama.cpp/build/bin"]
    for path in (ROOT / "benchmarks" / "results").glob("*.jsonl"):
        for row in map(json.loads, path.read_text().splitlines()):
            words = row.get("command", "").split()
            assert not [word for word in words if word.startswith("/")], path


def test_a_spread_is_text_in_the_table_and_numbers_in_the_lines(tmp_path):
    table = Table("one", ("what", "us"))
    table.add("call", spread([1.0, 2.0, 3.0, 4.0, 5.0]))
    row = json.loads(table.save(tmp_path).with_suffix(".jsonl").read_text())
    assert row["us"] == {"median": 3.0, "low": 1.5, "high": 4.5}
    assert "3 (1.5-4.5)" in table.markdown() and plots.number(row["us"]) == 3.0


def test_one_value_has_no_range():
    assert spread([2.0]) == "2" and isinstance(spread([2.0]), Spread)


def test_the_range_of_two_values_is_no_wider_than_they_are():
    assert spread([1.0, 3.0]) == "2 (1-3)"


@pytest.mark.parametrize(
    ("values", "factors"),
    [
        ([5, 5, 5, 5], [5, 0, 0, 0]),
        ([6, 8, 10, 12], [0, 2, 0, 0]),
        ([8, 16, 32, 64], [0, 0, 1, 0]),
        ([64, 256, 1024, 4096], [0, 0, 0, 1]),
    ],
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
    table = Table(
        "startup", ("what", "ranks", "drumline (s)", "drumline, not preloaded (s)", "peer", "(s)")
    )
    for ranks in (2, 4):
        table.add("command to barrier", ranks, spread([1.0, 2.0]), 0.5, "torchrun", 3.0)
    table.save(tmp_path)
    (picture,) = plots.draw(tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_each_line_of_a_picture_has_a_band_for_its_noise():
    figure = pytest.importorskip("matplotlib.figure", reason="runs after `pip install matplotlib`")
    axes = figure.Figure().add_subplot()
    point = plots.Median.of(1.0, 0.5, 2.0)
    assert len(plots.fill(axes, {"drumline": [(2, point)], "peer": [(2, point)]})) == 2
    assert len(axes.collections) == 2


def test_every_line_of_a_picture_has_a_look_of_its_own(monkeypatch):
    pictures = []
    monkeypatch.setattr(plots, "save", lambda path, panels, x, y: pictures.append(panels))
    plots.draw(ROOT / "benchmarks" / "results")
    for panels in pictures:
        names = {name for lines in panels.values() for name in lines}
        looks = {name: str(plots.look(name)) for name in names}
        assert len(set(looks.values())) == len(names), looks
