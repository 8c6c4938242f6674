"""`drumline join`, as people type it: two machines' commands, on terminals of their own."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import launcher
from drumline.cli import join
from launcher import ports
from launcher.authentication.launch_token import LaunchToken
from launcher.external.node_follower import Invitation

# The command of one machine, of which torchrun is not started, with every time a tenth.
MACHINE = """
import json, sys
from launcher import timings
timings.TIMINGS = timings.TIMINGS.scaled(0.1)
from drumline.cli import main
from launcher.external import backend_launcher

def watch(folder, command, environ, *_):
    ours = {name: text for name, text in environ.items() if name.startswith("DRUMLINE")}
    print("\\nSTARTS " + json.dumps([command, ours]), flush=True)
    return 0

backend_launcher._watch = watch
sys.exit(main(sys.argv[1:]))
"""
ROOT = Path(__file__).parents[3]
TOKEN = re.compile(r"(?:[0-9A-Z]{4}-){6}[0-9A-Z]{4}")
LIMIT_S = 60


class Machine:
    """A command on a terminal, and what that shows. reply: typed once it asks for the token."""

    def __init__(self, folder, *words, reply="", **environ):
        folder.mkdir(exist_ok=True)
        terminal, theirs = pty.openpty()
        self.shown, self._terminal = "", terminal
        self.process = subprocess.Popen(
            [sys.executable, "-c", MACHINE, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
            start_new_session=True,
        )
        os.close(theirs)
        self._thread = threading.Thread(target=self._show, args=(reply,))
        self._thread.start()

    def _show(self, reply):
        try:
            while data := os.read(self._terminal, 1 << 16):
                self.shown += data.decode(errors="replace")
                if reply and "token of the launch" in self.shown:
                    os.write(self._terminal, f"{reply}\n".encode())
                    reply = ""
        except OSError:  # the other end is closed
            pass

    def await_text(self, pattern):
        deadline = time.monotonic() + LIMIT_S
        while (match := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < deadline, self.shown
            time.sleep(0.02)
        return match[0]

    def end(self):
        """The exit code, once the command has ended."""
        code = self.process.wait(LIMIT_S)
        self._thread.join(LIMIT_S)
        os.close(self._terminal)
        return code

    def readable_by_ps(self):
        """What process lists show of it: arguments, and to the same user the environment."""
        folder = Path("/proc", str(self.process.pid))
        return b"\0".join((folder / name).read_bytes() for name in ("cmdline", "environ")).decode()


@pytest.fixture
def first(tmp_path):
    """The command on the first machine, which has a script."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "who.py").write_text("print('ran')")
    with ports.reserve(ports.candidates(str(tmp_path))) as holder:
        words = ["run", "--launcher", "torchrun", "--nnodes", "2", "-n", "2"]
        words += ["--master-addr", "127.0.0.1", "--master-port", f"{holder.getsockname()[1]}"]
        machine = Machine(tmp_path / "one", *words, "who.py", "--steps", "10 of them")
        machine.address = f"127.0.0.1:{words[-1]}"
        machine.token = machine.await_text(TOKEN)
        yield machine
        machine.process.kill()


def test_the_line_and_the_token_of_the_first_machine_are_all_that_the_second_needs(first, tmp_path):
    assert f"\n    drumline join {first.address}\r\n" in first.shown
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "who.py").write_text("print('ran')")
    typed = first.token.lower().replace("-", " ")
    second = Machine(tmp_path / "two", "join", first.address, "-n", "1", reply=typed)
    assert [first.end(), second.end()] == [0, 0]
    assert "[launcher] node 1 of 2 runs what host" in second.shown
    assert f"--master-port {first.address[10:]} who.py --steps '10 of them'" in second.shown
    for machine, count in ((first, 2), (second, 1)):
        starts = machine.shown.partition("STARTS ")[2]
        assert f'"--nproc-per-node", "{count}"' in starts and '"10 of them"' in starts
        assert "DRUMLINE_TOKEN" not in starts and machine.shown.count(first.token) == (count == 2)
    secrets = {
        re.search('"DRUMLINE_SECRET": "([0-9a-f]{64})"', m.shown)[1] for m in (first, second)
    }
    assert len(secrets) == 1


def test_a_token_that_a_machine_has_by_a_variable_is_in_no_process_list(first, tmp_path):
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "who.py").write_text("")
    token = {"DRUMLINE_TOKEN": str(LaunchToken.draw())}
    waiting = Machine(tmp_path / "two", "join", "127.0.0.1:1", **token)  # nobody is there
    waiting.await_text("waiting for the first node at 127.0.0.1:1")
    assert token["DRUMLINE_TOKEN"] not in waiting.readable_by_ps()
    assert first.token not in first.readable_by_ps()
    waiting.process.kill()
    waiting.end()
    second = Machine(tmp_path / "two", "join", first.address, DRUMLINE_TOKEN=first.token)
    assert [first.end(), second.end()] == [0, 0]


def test_a_machine_with_a_wrong_token_or_without_the_script_is_told_and_the_first_waits(
    first, tmp_path
):
    other = str(LaunchToken.draw())
    wrong = Machine(tmp_path / "two", "join", first.address, reply=other)
    assert wrong.end() == 1
    assert f"the token is not that of the first node at {first.address}" in wrong.shown
    mistyped = Machine(tmp_path / "two", "join", first.address, reply="AAAA-BBBB")
    assert mistyped.end() == 2 and "8 characters are not a token" in mistyped.shown
    elsewhere = Machine(tmp_path / "two", "join", first.address, reply=first.token)
    assert elsewhere.end() == 2
    assert "the first machine runs who.py" in elsewhere.shown and "Copy it here" in elsewhere.shown
    (tmp_path / "two" / "who.py").write_text("")
    second = Machine(tmp_path / "two", "join", first.address, reply=first.token)
    assert [first.end(), second.end()] == [0, 0]
    for shown in (wrong.shown, mistyped.shown, elsewhere.shown):
        assert other not in shown and first.token not in shown


@pytest.mark.parametrize(
    ("number", "problem"),
    [("2", "--node-rank 2 is not in [1, 1]"), ("0", "--node-rank 0 is host")],
)
def test_a_machine_with_a_number_that_no_place_has_is_told(first, tmp_path, number, problem):
    """It heard that all were there, while the first waited for one; and 0 was any."""
    words = ["join", first.address, "--node-rank", number]
    third = Machine(tmp_path / "two", *words, reply=first.token)
    assert third.end() == 1 and problem in third.shown
    assert "Type `drumline join` again, without --node-rank" in third.shown


def test_insecure_machines_meet_without_a_token(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "who.py").write_text("")
    with ports.reserve(ports.candidates(str(tmp_path))) as holder:
        place = ["--master-addr", "127.0.0.1", "--master-port", f"{holder.getsockname()[1]}"]
        run = ["run", "--launcher", "torchrun", "--nnodes", "2", *place, "--insecure", "who.py"]
        first = Machine(tmp_path / "one", *run)
        second = Machine(tmp_path / "one", *run[:-1], "--node-rank", "1", "who.py")
        assert [first.end(), second.end()] == [0, 0]
    assert not TOKEN.search(first.shown)
    for shown in (first.shown, second.shown):
        assert shown.count("whoever reaches the port of this launch becomes a rank of it") == 1


def test_ctrl_c_at_the_prompt_is_no_traceback(tmp_path):
    words = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "who.py"]
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "who.py").write_text("")
    second = Machine(tmp_path / "two", "run", "--launcher", "torchrun", *words)
    second.await_text("token of the launch")
    second.process.send_signal(signal.SIGINT)
    assert second.end() == 130 and second.shown.endswith("drumline: interrupted\r\n")


@pytest.mark.parametrize(
    ("command", "message"), [((), "runs a program of its own"), (("plan",), "runs plan, which")]
)
def test_a_machine_whose_first_one_runs_no_command_is_told(monkeypatch, capsys, command, message):
    """A program that calls launch() has none, which was an IndexError."""
    place = Invitation(1, 2, "host", command)
    monkeypatch.setattr(launcher, "ask_to_join", lambda *_: place)
    monkeypatch.setattr(join, "token_to_join", lambda options: None)
    assert join.main(["join", "127.0.0.1:1"]) == 2
    assert message in capsys.readouterr().err


def test_the_options_of_join_are_few():
    (commands,) = (action for action in join.parser()._actions if action.choices)
    actions = commands.choices["join"]._actions
    options = [name for action in actions for name in action.option_strings]
    assert options == ["-h", "--help", "-n", "--ranks", "--node-rank", "--token-file"]
