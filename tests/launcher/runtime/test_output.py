"""Output of ranks: whole lines, labelled with the right rank, none lost."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import time

from launcher.runtime.output import Output, StandardStream


def test_10000_lines_per_second_of_8_ranks_arrive_whole_and_in_order(command):
    script = command.script(
        "import sys\n"
        "for i in range(1250):\n"
        "    print(f'{i} ' + 'x' * (i % 300))\n"
        "    print(f'{i}', file=sys.stderr)"
    )
    ended = command.run("run", "-n", "8", script)
    expected = [f"{i} " + "x" * (i % 300) for i in range(1250)]
    assert all(ended.lines(rank) == expected for rank in range(8))
    for rank in range(8):
        errors = [line for line in ended.err.splitlines() if line.startswith(f"[{rank} err] ")]
        assert errors == [f"[{rank} err] {i}" for i in range(1250)]
    assert ended.code == 0


def test_standard_streams_on_one_pipe_do_not_mix_within_a_line(command):
    script = command.script(
        "import sys\nfor i in range(500):\n    print('o' * 5000)\n    print('e' * 5000, "
        "file=sys.stderr)"
    )
    import subprocess

    ended = command.run("run", "-n", "2", script, stderr=subprocess.STDOUT)
    form = re.compile(r"\[[01]\] o{5000}|\[[01] err\] e{5000}")
    lines = ended.out.splitlines()
    assert len(lines) == 2000 and all(form.fullmatch(line) for line in lines)


def test_printf_of_c_code_is_not_lost_at_a_crash(command):
    script = command.script(
        "import ctypes, os, signal\n"
        "ctypes.CDLL(None).printf(b'from C\\n')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert "[0] from C" in command.run("run", "-n", "1", script).out


def test_a_slow_reader_loses_nothing_and_does_not_hide_a_failure(command, tmp_path):
    """The pipe is full from the start, and nobody reads until the launch must be over."""
    script = command.script(
        "import launcher, pathlib, sys, time\n"
        "has_begun = pathlib.Path(sys.argv[1])\n"
        "if launcher.current().rank:\n"
        "    while not has_begun.exists(): time.sleep(0.1)\n"
        "    time.sleep(0.5); raise ValueError('unseen')\n"
        "for i in range(1_000_000):\n"
        "    print('line', i, flush=i == 2_000)\n"
        "    if i == 2_000: has_begun.touch()"
    )
    has_begun = tmp_path / "has_begun"
    process = command.start("run", "-n", "2", script, has_begun)
    deadline = time.monotonic() + 60
    while (not has_begun.exists() or len(command.left()) > 1) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(command.left()) == 1, "only the launcher waits for its reader"
    out, err = process.communicate(timeout=20)
    numbers = [int(line.split()[-1]) for line in out.splitlines()]
    assert numbers == list(range(len(numbers))) and len(numbers) > 1000
    assert "unseen" in err and process.returncode == 1


def test_a_reader_that_is_slower_than_the_timeout_does_not_fail_ranks_that_have_ended(command):
    script = command.script("print('0123456789' * 20_000)")
    process = command.start("run", "-n", "1", "--timeout", "3", script)
    deadline = time.monotonic() + 6
    while len(command.left()) > 1 or time.monotonic() < deadline:
        time.sleep(0.1)
    out, err = process.communicate(timeout=20)
    assert len(out) > 200_000 and process.returncode == 0, err


def test_log_dir_has_a_file_per_rank_and_stream_with_unchanged_bytes(command, tmp_path):
    logs = tmp_path / "new" / "logs"
    script = command.script(
        "import os, sys, time, launcher\nr = launcher.current().rank\n"
        "os.write(1, b'out %d \\xff\\r\\n' % r)\nos.write(2, b'err %d' % r)\n"
        "while r and not os.path.getsize(sys.argv[1] + '/rank-0.err'): time.sleep(0.01)\n"
        "if r: raise ValueError('into the log, too')"
    )
    ended = command.run("run", "-n", "2", "--log-dir", str(logs), script, str(logs))
    assert sorted(p.name for p in logs.iterdir()) == [
        f"rank-{r}.{s}" for r in range(2) for s in ("err", "out")
    ]
    assert (logs / "rank-0.out").read_bytes() == b"out 0 \xff\r\n"
    assert (logs / "rank-0.err").read_bytes() == b"err 0"
    assert "ValueError: into the log, too" in (logs / "rank-1.err").read_text()
    assert ended.code == 1 and "[0 err] err 0" in ended.err


def test_a_restart_leaves_the_logs_of_the_attempt_before(command, tmp_path):
    """The first error could be read nowhere after the second."""
    (logs := tmp_path / "logs").mkdir()
    (logs / "rank-0.out").write_text("of an earlier launch\n")
    script = command.script(
        "import os\ncount = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint('attempt', count)\n"
        "if count == '0': raise ValueError('planned')"
    )
    options = ("--max-restarts", "1", "--log-dir", str(logs))
    ended = command.run("run", "-n", "1", *options, script)
    assert ended.code == 0 and (logs / "rank-0.out").read_text() == "attempt 0\nattempt 1\n"
    assert "ValueError: planned" in (logs / "rank-0.err").read_text()


def test_a_failure_is_told_and_restarted_though_its_log_is_on_a_full_disk(command, tmp_path):
    """The launch ended with the code of a usage error and the name of the log alone."""
    (logs := tmp_path / "logs").mkdir()
    (logs / "rank-0.err").symlink_to("/dev/full")
    options = ("--max-restarts", "1", "--log-dir", str(logs))
    ended = command.run("run", "-n", "1", *options, command.script("raise ValueError('planned')"))
    assert ended.code == 1 and "raised ValueError: planned" in ended.err
    assert ended.err.count(f"{logs}/rank-0.err cannot be written: No space left on device") == 2
    assert "restart 1 of 1" in ended.err


def test_an_unwritable_log_dir_is_a_usage_error(command, usage_error, tmp_path):
    (tmp_path / "file").touch()
    logs = str(tmp_path / "file" / "logs")
    text = usage_error("run", "-n", "2", "--log-dir", logs, command.script("print('ran')"))
    assert "Not a directory" in text and "none was started" in text and "--log-dir" in text


def test_a_full_disk_ends_the_launch(command):
    script = command.script("import time\nprint('x' * 100_000, flush=True)\ntime.sleep(60)")
    with open("/dev/full", "w") as full:
        ended = command.run("run", "-n", "2", script, stdout=full)
    assert ended.code == 1 and "No space left on device" in ended.err


def test_a_stream_that_another_process_has_filled_is_tried_again(monkeypatch, tmp_path):
    """Of one that does not block, as after ssh, it ended the launch."""

    def is_full(*_):
        raise BlockingIOError

    with open(tmp_path / "out", "w") as file:
        stream = StandardStream(file)
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", is_full)
            assert stream.write(b"text", 0) == b"text"
        assert stream.write(b"text", 0) == b""
    assert (tmp_path / "out").read_text() == "text"


def test_a_notice_of_a_text_that_is_not_utf_8_is_printed(capfd):
    """The launcher ended with UnicodeEncodeError, in place of the rank's error."""
    output = Output()
    output.notice("raised ValueError: \udcff")
    output.pump()
    assert capfd.readouterr().err == "[launcher] raised ValueError: ?\n"


def test_closed_standard_output(command, tmp_path):
    script = command.script(f"print('unseen')\nopen({str(tmp_path / 'ran')!r}, 'w')")

    def close_stdout():
        os.close(1)

    ended = command.run("run", "-n", "2", script, stdout=None, preexec_fn=close_stdout)
    assert ended.code == 0 and (tmp_path / "ran").exists() and "unseen" not in ended.err


def test_standard_input_goes_to_rank_0(command):
    script = command.script("import sys\nprint(sys.stdin.read().split())")
    ended = command.run("run", "-n", "2", script, stdin="for the first\n")
    assert ended.lines(0) == ["['for', 'the', 'first']"] and ended.lines(1) == ["[]"]


def test_a_prompt_is_shown_on_a_terminal_before_its_line_ends(command):
    script = command.script(
        "import launcher\nif launcher.current().rank == 0: print('hello', input('name? '))"
    )
    terminal, slave = pty.openpty()
    process = command.start("run", "-n", "2", script, stdin=slave, stdout=slave, stderr=slave)
    shown = b""
    while b"name? " not in shown:
        shown += os.read(terminal, 1000)
    os.write(terminal, b"Ada\n")
    while b"hello Ada" not in shown:
        shown += os.read(terminal, 1000)
    process.wait(timeout=30)
    assert process.returncode == 0 and b"\x1b[36m[0]\x1b[0m name? " in shown
    os.close(terminal)
    os.close(slave)


def test_a_line_that_grows_without_pause_is_shown_on_a_terminal(command):
    script = command.script(
        "import launcher, time\nwhile launcher.current().rank == 0:\n"
        "    print('word', end=' ', flush=True)\n    time.sleep(0.01)"
    )
    terminal, slave = pty.openpty()
    process = command.start("run", "-n", "2", script, stdin=slave, stdout=slave, stderr=slave)
    assert select.select([terminal], [], [], 30)[0] and b"word" in os.read(terminal, 1000)
    process.terminate()
    process.wait(timeout=30)
    os.close(terminal)
    os.close(slave)


def test_closing_the_terminal_ends_the_launch(command):
    script = command.script(
        "import time\nwhile True:\n    print('.', flush=True)\n    time.sleep(0.05)"
    )
    terminal, slave = pty.openpty()
    process = command.start("run", "-n", "2", script, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    os.read(terminal, 100)
    os.close(terminal)
    assert process.wait(timeout=30) in (128 + signal.SIGPIPE, 128 + signal.SIGHUP)
