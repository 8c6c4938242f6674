"""Recording spans, and merging those of all ranks on one clock."""

import json
import time

import pytest

from launcher import LaunchInfo, tracing, tracing_picture


def _info(rank, folder):
    return LaunchInfo("t", 2, 2, rank, rank, "127.0.0.1", 1, {"trace": str(folder)})


def _record(folder, rank, offset_ns=0):
    recorder = tracing.recorder(_info(rank, folder))
    recorder.align(offset_ns)
    with recorder.span("barrier", "wait", number=1):
        time.sleep(0.01)
    recorder.close()


def test_a_launch_that_is_not_traced_has_no_recorder():
    assert tracing.recorder(LaunchInfo("t")) is None


def test_the_spans_of_all_ranks_come_into_one_file_that_viewers_open(tmp_path):
    for rank in range(2):
        _record(tmp_path / "parts", rank)
    tracing.merge(tmp_path / "parts", tmp_path / "out.json")
    merged = json.loads((tmp_path / "out.json").read_text())
    assert tracing.problems(merged) == []
    spans = [event for event in merged["traceEvents"] if event["ph"] == "X"]
    assert [event["pid"] for event in spans] == [0, 1]
    assert all(event["dur"] >= 10_000 for event in spans)
    assert spans[0]["args"] == {"number": 1} and spans[0]["cname"]


def test_another_host_is_shown_on_the_clock_of_rank_0(tmp_path):
    _record(tmp_path / "parts", 0)
    _record(tmp_path / "parts", 1, offset_ns=5_000_000_000)
    tracing.merge(tmp_path / "parts", tmp_path / "out.json")
    spans = [e for e in json.loads((tmp_path / "out.json").read_text())["traceEvents"] if "ts" in e]
    assert 4.9e6 < spans[1]["ts"] - spans[0]["ts"] < 6e6


def test_a_line_cut_off_by_a_death_loses_only_itself(tmp_path):
    _record(tmp_path / "parts", 0)
    part = next((tmp_path / "parts").iterdir())
    part.write_text(part.read_text() + '{"name": "allred')
    assert tracing.merge(tmp_path / "parts", tmp_path / "out.json") == 2


class _Moves:
    def send(self, data):
        return len(data)


def test_followed_methods_still_work_and_are_noted_with_number_and_bytes(tmp_path):
    recorder, moves = tracing.recorder(_info(0, tmp_path)), _Moves()
    recorder.follow(moves, ["send"], "move")
    assert [moves.send(b"abc"), moves.send(b"")] == [3, 0]
    recorder.close()
    lines = [json.loads(line) for line in next(tmp_path.iterdir()).read_text().splitlines()]
    assert [line["args"] for line in lines] == [
        {"number": 1, "bytes": 3},
        {"number": 2, "bytes": 0},
    ]


def test_a_trace_that_viewers_would_refuse_is_told_apart():
    assert tracing.problems([]) and tracing.problems({"traceEvents": [{"name": "x", "ph": "X"}]})
    backwards = {"name": "x", "ph": "X", "pid": 0, "tid": 0, "ts": 1, "dur": -1}
    assert tracing.problems({"traceEvents": [backwards]}) == ["event 0 ends before it starts"]


def test_a_trace_is_drawn_as_a_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="runs after `pip install matplotlib`")
    for rank in range(2):
        _record(tmp_path / "parts", rank)
    tracing.merge(tmp_path / "parts", tmp_path / "out.json")
    tracing_picture.draw(tmp_path / "out.json", tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_traced_launch_shows_every_rank_and_what_it_ran(tmp_path, command):
    out = tmp_path / "out.json"
    ended = command.run("run", "-n", "2", "--trace", str(out), command.script("print('hello')"))
    assert ended.code == 0, ended.err
    merged = json.loads(out.read_text())
    assert tracing.problems(merged) == []
    spans = {event["pid"]: event for event in merged["traceEvents"] if event["ph"] == "X"}
    assert set(spans) == {-1, 0, 1}
    assert spans[-1]["dur"] > spans[1]["dur"]


def test_a_launch_that_fails_is_traced_all_the_same(tmp_path, command):
    out = tmp_path / "out.json"
    script = command.script("import os; os.abort()")
    assert command.run("run", "-n", "2", "--trace", str(out), script).code == 134
    assert tracing.problems(json.loads(out.read_text())) == []


def test_a_trace_that_cannot_be_written_starts_nothing(command, tmp_path):
    nowhere = str(tmp_path / "no" / "out.json")
    ended = command.run("run", "-n", "1", "--trace", nowhere, command.script("print('ran')"))
    assert ended.code == 2 and "out.json" in ended.err and "ran" not in ended.out


def test_the_calls_of_coordinator_and_communicator_are_traced(tmp_path, command):
    out = tmp_path / "out.json"
    script = command.script(
        "import torch\n"
        "from communicator import Communicator\n"
        "from coordinator import Coordinator\n"
        "with Coordinator() as coor, Communicator(coor) as comm:\n"
        "    coor.barrier()\n"
        "    comm.allreduce(torch.ones(5))\n"
    )
    ended = command.run("run", "-n", "2", "--preload", "torch", "--trace", str(out), script)
    assert ended.code == 0, ended.err
    spans = [e for e in json.loads(out.read_text())["traceEvents"] if e["ph"] == "X"]
    for rank in range(2):
        seen = {event["name"]: event for event in spans if event["pid"] == rank}
        assert seen["barrier"]["cat"] == "wait"
        assert seen["allreduce"]["args"] == {"number": 1, "bytes": 20}
