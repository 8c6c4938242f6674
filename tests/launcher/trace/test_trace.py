"""Recording spans, and merging those of all ranks on one clock."""

import json
import os
import re
import select
import sys
import threading
import time

import pytest

import launcher
from launcher import LaunchInfo, LiveCalls, cli
from launcher.trace import merge_traces, summary
from launcher.trace import recorder as tracing
from tests.programs.chromium import Chromium


def _info(rank, folder):
    return LaunchInfo("t", 2, 2, rank, rank, "127.0.0.1", 1, {"trace": str(folder)})


def _record(folder, rank, offset_ns=None):
    folder.mkdir(exist_ok=True)
    recorder = tracing.recorder(_info(rank, folder))
    if offset_ns is not None:
        recorder.align(offset_ns)
    with recorder.span("barrier", "wait", number=1):
        time.sleep(0.01)
    recorder.close()


def crossing_spans(trace):
    """Pairs of spans in one thread that overlap without nesting, which viewers draw wrongly."""
    pairs = []
    for spans in summary.spans_by_thread(trace).values():
        for i, outer in enumerate(spans):
            end_us = outer.end_us + 1  # of rounding
            inner = [span for span in spans[i + 1 :] if span.event["ts"] + 1 < outer.end_us]
            pairs += [(outer.event, span.event) for span in inner if span.end_us > end_us]
    return pairs


def test_a_launch_that_is_not_traced_has_no_recorder():
    assert tracing.recorder(LaunchInfo("t")) is None


def test_spans_of_all_ranks_are_merged_into_one_file(tmp_path):
    for rank in range(2):
        _record(tmp_path / "parts", rank)
    merge_traces.merge(tmp_path / "parts", tmp_path / "out.json")
    merged = json.loads((tmp_path / "out.json").read_text())
    assert crossing_spans(merged) == []
    spans = [event for event in merged["traceEvents"] if event["ph"] == "X"]
    assert [event["pid"] for event in spans] == [0, 1]
    assert all(event["dur"] >= 10_000 for event in spans)
    assert spans[0]["args"] == {"number": 1} and spans[0]["cname"]


def _starts(folder):
    """When each span of the merged recordings begins, in seconds."""
    merge_traces.merge(folder, folder.parent / "out.json")
    merged = json.loads((folder.parent / "out.json").read_text())
    return [event["ts"] / 1e6 for event in merged["traceEvents"] if "ts" in event]


def test_all_recordings_of_another_host_are_on_the_clock_of_rank_0(tmp_path, monkeypatch):
    """Once only the recordings that said their offset were: not those of its Communicators."""
    for host, offset_ns in (("a", 0), ("b", 5_000_000_000)):
        monkeypatch.setattr(tracing, "clock", lambda host=host: {"clock": host, "day_ns": 0})
        _record(tmp_path / "parts", "ab".index(host), offset_ns)
        _record(tmp_path / "parts", "ab".index(host))
    first, second, third, fourth = _starts(tmp_path / "parts")
    assert second - first < 1 and 4.9 < third - second < 6 and fourth - third < 1


def test_a_host_without_measured_offset_is_aligned_by_the_time_of_day(tmp_path, monkeypatch):
    for rank, day_s in ((0, 1000), (1, 1007)):
        which = {"clock": f"host {rank}", "day_ns": day_s * 10**9}
        monkeypatch.setattr(tracing, "clock", lambda which=which: which)
        _record(tmp_path / "parts", rank)
    first, second = _starts(tmp_path / "parts")
    assert 6.9 < second - first < 8


COMPARED = """
import launcher
from coordinator import Coordinator
with Coordinator(timeout_s=30) as coor:
    launcher.recorder(coor.info).follow(coor, ["agree"], "move")
    part = coor.split([1])
    coor.agree("after this one ends, both go on")
    coor.barrier()
"""


def test_hosts_whose_clocks_are_a_day_apart_are_merged_onto_one(hosts, tmp_path):
    """Clocks count from each host's start. Parts of the ranks may have another master."""
    script, folder = tmp_path / "script.py", tmp_path / "parts"
    script.write_text(COMPARED)
    folder.mkdir()
    later = ["unshare", "--time", "--fork", "--monotonic", "86400", "--boottime", "86400"]
    environ = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29531", "DRUMLINE_TRACE": str(folder)}
    environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    ranks = [
        hosts.start(rank, [*before, sys.executable, str(script)], RANK=str(rank), **environ)
        for rank, before in enumerate(([], later))
    ]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    merge_traces.merge(folder, tmp_path / "out.json")
    merged = json.loads((tmp_path / "out.json").read_text())
    assert crossing_spans(merged) == []
    spans = [event for event in merged["traceEvents"] if event["ph"] == "X"]
    for name in ("agree", "barrier"):
        ends = [event["ts"] + event["dur"] for event in spans if event["name"] == name]
        assert max(ends) - min(ends) < 1e6, name


def test_a_rank_without_the_trace_folder_warns(tmp_path):
    with pytest.warns(RuntimeWarning, match="rank 1: the folder .* is not on this host"):
        assert tracing.recorder(_info(1, tmp_path / "elsewhere")) is None


def test_hosts_without_the_folder_of_the_trace_stay_in_step_with_those_that_have_it(
    hosts, tmp_path
):
    script = tmp_path / "script.py"
    script.write_text("""if True:
        from coordinator import Coordinator
        with Coordinator(timeout_s=20) as coor:
            print(coor.allgather(str(coor.rank).encode()))
    """)
    environ = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29533"}
    environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    started = []
    for rank, folder in enumerate((tmp_path, tmp_path / "elsewhere")):
        own = {"RANK": str(rank), "DRUMLINE_TRACE": str(folder)}
        command = [sys.executable, str(script)]
        started.append(hosts.start(rank, command, **own, **environ))
    assert [rank.communicate(timeout=60)[0] for rank in started] == ["[b'0', b'1']\n"] * 2


@pytest.mark.parametrize(
    ("script", "code", "cause"),
    [
        ("", 1, "The ranks ended well, but the trace could not be written"),
        ("raise SystemExit(3)", 3, "exited with code 3"),
    ],
)
def test_trace_that_cannot_be_written_names_its_file_and_is_no_wrong_usage(
    command, script, code, cause
):
    """The command ended with 2, as if no rank had started, and said `No space left on device`."""
    arguments = ("run", "-n", "2", "--trace", "out.json", command.script(script))
    # A module that Python compiles meanwhile would be cut off in the checkout, too.
    environ = {"TMPDIR": str(command.folder), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = command.run(*arguments, around=["prlimit", "--fsize=500"], env=environ)
    assert ended.code == code and cause in ended.err
    assert "File too large: 'out.json'" in ended.err and "Free some space" in ended.err
    left = {path.name for path in command.folder.iterdir()}
    assert left == {"out.json", arguments[-1].rpartition("/")[2]}


def test_a_full_disk_ends_the_recording_and_no_call(tmp_path):
    """A call that was recorded raised OSError in place of its result, and every later one."""
    recorder = tracing.recorder(_info(1, tmp_path))
    recorder._file.close()
    with open("/dev/full", "w", buffering=1 << 20) as recorder._file:
        called = recorder.recorded(lambda: "result", [], "call", "work", {})
        with pytest.warns(RuntimeWarning, match="^rank 1: .*No space left.*/dev/full") as warned:
            results = [called() for _ in range(3 * tracing.FLUSH_EVENTS)]
        assert {*results} == {"result"} and len(warned) == 1
        assert len(recorder._buffered) <= tracing.FLUSH_EVENTS
        recorder.close()


def test_a_full_disk_at_the_end_of_a_recording_is_a_warning(tmp_path):
    """It was an error of whatever is closed with the recorder, which was left half open."""
    recorder = tracing.recorder(_info(1, tmp_path))
    recorder._file.close()
    with open("/dev/full", "w", buffering=1 << 20) as recorder._file:
        with pytest.warns(RuntimeWarning, match="^rank 1: .*No space left.*/dev/full"):
            recorder.close()
        assert recorder._file.closed


def test_what_is_watched_twice_gets_its_own_methods_back(tmp_path):
    """A target that was offered as a viewer began to look kept the methods of the recorder."""

    class Target:
        def step(self):
            return 1

    target, calls = Target(), LiveCalls()
    calls.follow(target, ["step"], "work")
    calls.watch(_info(0, tmp_path))
    calls._observed[0].watch(calls._counter)
    calls.unwatch()
    assert vars(target) == {} and target.step() == 1


def test_what_is_offered_as_a_viewer_leaves_is_not_watched_any_longer(tmp_path):
    """It was watched for ever: it was let go before it was watched."""
    order, calls = [], LiveCalls()

    class Offered:
        def target(self):
            return self

        def watch(self, recorder):
            leaving.start()
            leaving.join(0.3)
            order.append("watch")

        def unwatch(self):
            order.append("unwatch")

    leaving = threading.Thread(target=calls.unwatch)
    calls.watch(_info(0, tmp_path))
    calls.offer(Offered())
    leaving.join()
    assert order == ["watch", "unwatch"]


def test_a_mistyped_script_leaves_the_trace_of_the_launch_before(tmp_path):
    """It was overwritten before the script was looked for."""
    old = tmp_path / "out.json"
    old.write_text("old")
    with pytest.raises(ValueError, match=r"typo\.py"):
        launcher.launch(tmp_path / "typo.py", trace=old)
    assert old.read_text() == "old"


def test_recordings_of_several_nodes_are_in_the_folder_of_the_trace(tmp_path):
    with merge_traces.recordings_merged_into(tmp_path / "out.json", nnodes=2) as folder:
        assert folder.parent == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_trace_is_written_into_a_pipe_and_does_not_replace_it(tmp_path):
    """As root, `--into /dev/stdout` put a file in its place."""
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    merge_traces.write({"traceEvents": []}, pipe)
    assert pipe.is_fifo() and json.loads(os.read(reader, 1000))["traceEvents"] == []
    os.close(reader)
    with pytest.raises(IsADirectoryError):
        merge_traces.write({"traceEvents": []}, tmp_path)


def test_a_pipe_is_not_opened_before_the_trace_is_written(tmp_path):
    """Its reader took that for the end, and the launch waited for another for ever."""
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    had_writer = select.poll()
    had_writer.register(reader, select.POLLHUP)
    with merge_traces.recordings_merged_into(pipe):
        assert had_writer.poll(0) == []
    assert json.loads(os.read(reader, 1 << 16))["traceEvents"]
    os.close(reader)


def test_the_traces_of_two_nodes_are_joined_into_one(tmp_path, command):
    for rank in range(2):
        _record(tmp_path / f"parts{rank}", rank)
        launch = tracing.event("launch", "start", 0, 10, -1, 0, {})
        merge_traces.merge(tmp_path / f"parts{rank}", tmp_path / f"{rank}.json", [launch])
    files = [str(tmp_path / name) for name in ("0.json", "1.json", "both.json")]
    ended = command.run("trace", *files[:2], "--into", files[2])
    assert ended.code == 0, ended.err
    rows = [line.split()[0] for line in ended.out.splitlines()[1:]]
    assert rows == ["launcher", "launcher", "rank", "rank", "open"]
    assert f"open {files[2]} in" in ended.out
    assert crossing_spans(merge_traces.read([tmp_path / "both.json"])) == []


def test_recorders_of_one_rank_have_files_of_their_own(tmp_path):
    """Named after id(), a later recorder had the name of one that was freed."""
    for _ in range(20):
        _record(tmp_path / "parts", 0)
    assert len(list((tmp_path / "parts").iterdir())) == 20


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path):
    _record(tmp_path / "parts", 0)
    part = next((tmp_path / "parts").iterdir())
    part.write_text(part.read_text() + '{"name": "allred')
    assert merge_traces.merge(tmp_path / "parts", tmp_path / "out.json") == 3  # two names of rows


class _Moves:
    def send(self, data, dst=0):
        return len(data)


def test_followed_methods_are_recorded_with_number_and_bytes(tmp_path):
    recorder, moves = tracing.recorder(_info(0, tmp_path)), _Moves()
    recorder.follow(moves, ["send"], "move")
    assert [moves.send(b"abc", 2), moves.send(b"", dst=1)] == [3, 0]
    recorder.close()
    lines = [json.loads(line) for line in next(tmp_path.iterdir()).read_text().splitlines()]
    assert [line["args"] for line in lines[1:]] == [
        {"number": 1, "bytes": 3, "dst": 2},
        {"number": 2, "bytes": 0, "dst": 1},
    ]


def _span(start, took, **other):
    return {
        "name": "x",
        "ph": "X",
        "pid": 0,
        "tid": 0,
        "ts": start,
        "dur": took,
        "cat": "work",
        **other,
    }


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([{"name": "x", "ph": "X"}], "KeyError: 'pid'"),
        ([{"name": "x", "ph": "X", "pid": 0}], "without cat, dur, tid, ts"),
        ([_span(1, -1)], "ends before it starts"),
        ([_span("now", 1)], "TypeError"),
        ([_span(10**400, 1)], "out of all time"),
        ([{"ph": "M", "pid": 0, "ts": "now"}], "TypeError"),  # sorted by it, --into named no file
        ([{"ph": "M", "pid": 0, "ts": 10**400}], "out of all time"),
        ([_span(1, float("nan"))], "out of all time"),
        ([_span(1, 1, ph="Q")], "unknown kind"),
        *[([_span(1, 1, **{name: {}})], "of another type") for name in ("name", "cat", "tid")],
        ([_span(1, 1, args=7)], "of another type"),
        ([_span(1, 1, cat="sleep")], "not one of start, wait, move, work"),
        (None, "is not a trace"),
    ],
)
def test_a_file_that_is_no_trace_is_an_error(tmp_path, events, message):
    (tmp_path / "out.json").write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(ValueError, match=r"out\.json is not a trace") as raised:
        merge_traces.read([tmp_path / "out.json"])
    assert message in str(raised.value)


def test_a_folder_in_place_of_a_trace_is_named_as_it_was_given(tmp_path):
    """It was PosixPath('...')."""
    with pytest.raises(IsADirectoryError, match=f": '{tmp_path}'"):
        merge_traces.read([tmp_path])


def test_a_file_that_nests_without_end_is_no_trace(tmp_path):
    """It was a RecursionError."""
    (tmp_path / "out.json").write_text('{"traceEvents": ' + "[" * 200_000)
    with pytest.raises(ValueError, match=r"out\.json is not a trace"):
        merge_traces.read([tmp_path / "out.json"])


def test_a_pipe_to_which_nobody_writes_is_no_trace(tmp_path):
    """It was waited for."""
    os.mkfifo(tmp_path / "out.json")
    with pytest.raises(ValueError, match=r"out\.json is not a trace"):
        merge_traces.read([tmp_path / "out.json"])


def test_crossing_spans_are_found():
    assert crossing_spans({"traceEvents": [_span(0, 50), _span(30, 40)]})


def test_a_trace_is_drawn_as_a_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="runs after `pip install matplotlib`")
    for rank in range(2):
        _record(tmp_path / "parts", rank)
    merge_traces.merge(tmp_path / "parts", tmp_path / "out.json")
    for arguments, picture in ([], "out.png"), ([str(tmp_path / "mine.png")], "mine.png"):
        assert cli.main(["trace", str(tmp_path / "out.json"), "--png", *arguments]) == 0
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(Chromium.PROGRAM is None, reason="runs after `apt install chromium`")
def test_a_trace_is_a_page_that_a_browser_opens_from_the_file(tmp_path):
    for rank in range(2):
        _record(tmp_path / "parts", rank)
    event = {**_span(0, 50), "pid": -1, "name": "</script><b>odd"}
    merge_traces.merge(tmp_path / "parts", tmp_path / "out.json", [event])
    assert cli.main(["trace", str(tmp_path / "out.json"), "--html"]) == 0
    page = tmp_path / "out.html"
    assert not re.search(r"(src|href)=|https?:", page.read_text())
    with Chromium(str(tmp_path / "profile")) as browser:
        browser.open(page.as_uri())
        browser.wait_for("document.readyState === 'complete' && !!document.querySelector('canvas')")
        names = browser.evaluate("rows.map(row => row.name).join()")
        assert names == "launcher,rank 0,rank 1"
        assert browser.evaluate("rows[0].spans[0].name") == event["name"]
        point = """(() => {
          const row = rows[1], span = row.spans.find(span => span.name === "barrier");
          const box = canvas.getBoundingClientRect();
          show(span.ts, span.ts + span.dur);
          canvas.dispatchEvent(new MouseEvent("mousemove", {
            clientX: box.left + (NAME + canvas.clientWidth) / 2,
            clientY: box.top + row.top + span.lane * LANE + 4}));
          return detail.textContent;
        })()"""
        assert "rank 0: barrier (wait)" in browser.evaluate(point)
        drawn = "pen.getImageData(NAME + 50, (rows[1].top + 4) * devicePixelRatio, 1, 1).data[3]"
        assert browser.evaluate(drawn) == 255


def test_without_matplotlib_the_summary_is_printed_and_the_extra_named(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _record(tmp_path / "parts", 0)
    merge_traces.merge(tmp_path / "parts", tmp_path / "out.json")
    assert cli.main(["trace", str(tmp_path / "out.json"), "--png"]) == 0
    out, err = capsys.readouterr()
    assert "rank 0" in out and "pip install 'drumline[plot]'" in err
    assert not (tmp_path / "out.png").exists()


def test_a_traced_launch_shows_every_rank_and_what_it_ran(tmp_path, command):
    out = tmp_path / "out.json"
    ended = command.run("run", "-n", "2", "--trace", str(out), command.script("print('hello')"))
    assert ended.code == 0, ended.err
    merged = json.loads(out.read_text())
    assert crossing_spans(merged) == []
    spans = {(event["pid"], event["name"]): event for event in merged["traceEvents"]}
    ran = next(name for _, name in spans if name.endswith(".py"))
    assert {(-1, "launch"), (0, ran), (1, ran), (0, "starting"), (1, "starting")} <= spans.keys()
    whole, starting, running = spans[-1, "launch"], spans[1, "starting"], spans[1, ran]
    assert whole["ts"] == starting["ts"] < running["ts"]
    assert starting["dur"] + running["dur"] < whole["dur"]


def test_a_failed_launch_is_traced(tmp_path, command):
    out = tmp_path / "out.json"
    script = command.script("import os; os.abort()")
    assert command.run("run", "-n", "2", "--trace", str(out), script).code == 134
    assert crossing_spans(merge_traces.read([out])) == []


def test_an_unwritable_trace_file_is_a_usage_error(command, usage_error, tmp_path):
    nowhere, script = str(tmp_path / "no" / "out.json"), command.script("print('ran')")
    assert "out.json" in usage_error("run", "-n", "1", "--trace", nowhere, script)


def test_the_calls_of_coordinator_and_communicator_are_traced(tmp_path, command, warm):
    out = tmp_path / "out.json"
    script = command.script(
        "import torch\n"
        "from communicator import Communicator\n"
        "from coordinator import Coordinator\n"
        "with Coordinator() as coor, Communicator(coor) as comm:\n"
        "    coor.barrier()\n"
        "    comm.allreduce(torch.ones(5))\n"
    )
    ended = warm.run("-m", "launcher", "run", "-n", "2", "--trace", out, script)
    assert ended.returncode == 0, ended.stderr
    spans = [e for e in json.loads(out.read_text())["traceEvents"] if e["ph"] == "X"]
    for rank in range(2):
        seen = {event["name"]: event for event in spans if event["pid"] == rank}
        assert seen["barrier"]["cat"] == "wait"
        noted = seen["allreduce"]["args"]
        assert (noted["number"], noted["bytes"]) == (1, 20)


def test_the_summary_has_a_line_for_each_rank(tmp_path, command):
    work, wait = _span(0, 2e6, cat="work"), _span(1e6, 5e5, cat="wait", name="barrier")
    (tmp_path / "out.json").write_text(json.dumps({"traceEvents": [work, wait]}))
    ended = command.run("trace", str(tmp_path / "out.json"))
    assert ended.code == 0, ended.err
    row = next(line for line in ended.out.splitlines() if "rank 0" in line)
    assert " ".join(row.split()) == "rank 0 2 0.000 0.500 0.000 1.500 barrier, 0.500 s"


def test_the_trace_command_refuses_a_file_that_is_no_trace(tmp_path, usage_error):
    for text in ("[]", "print('hello')"):
        (tmp_path / "out.json").write_text(text)
        assert "out.json is not a trace" in usage_error("trace", str(tmp_path / "out.json"))


def test_spans_within_a_wait_count_as_waiting_once():
    def event(kind, start, took):
        return {"ph": "X", "name": kind, "cat": kind, "ts": start, "dur": took, "pid": 0, "tid": 0}

    spans = [
        event("work", 0, 100),
        event("wait", 10, 50),
        event("move", 20, 30),
        event("move", 70, 5),
    ]
    (nested,) = summary.spans_by_thread({"traceEvents": spans}).values()
    assert [(span.kind, span.own_us) for span in nested] == [
        ("work", 45),
        ("wait", 20),
        ("wait", 30),
        ("move", 5),
    ]


def test_threads_of_a_rank_have_numbers_of_their_own(tmp_path):
    (tmp_path / "parts").mkdir()
    recorder = tracing.recorder(_info(0, tmp_path / "parts"))

    def waits():
        with recorder.span("wait", "wait"):
            pass

    waits()
    other = threading.Thread(target=waits)
    other.start()
    other.join()
    recorder.close()
    merge_traces.merge(tmp_path / "parts", tmp_path / "out.json")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert [event["tid"] for event in events if event["ph"] == "X"] == [0, 1]
