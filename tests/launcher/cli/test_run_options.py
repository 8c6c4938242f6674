"""The command line's help, its errors, torchrun's spellings, restarts, and completion."""

import argparse
import os
import re
import shutil
import subprocess
import sys

import pytest

import communicator.cli
import drumline.cli
from launcher import cli, errors, launch_job


def _commands():
    for module in (cli, communicator.cli, drumline.cli):
        (commands,) = (action for action in module.parser()._actions if action.choices)
        for name, command in commands.choices.items():
            if command.add_help:  # those of a lower layer are only named
                yield pytest.param(command, id=f"{module.__name__}-{name}")


@pytest.mark.parametrize("command", list(_commands()))
def test_help_names_every_default_and_the_exit_codes(command):
    for action in command._actions:
        has_default = action.option_strings and action.nargs != 0 and not action.required
        if has_default and action.help is not argparse.SUPPRESS:
            assert "default" in action.help, action.option_strings
    assert "exit codes" in command.format_help()


def test_help_names_every_launcher():
    text = cli.parser()._subparsers._group_actions[0].choices["run"].format_help()
    assert "multiprocessing, threads, torchrun, ray, mpi, slurm" in " ".join(text.split())


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("run --nproc-per-nod 2 script.py", "--nproc-per-node"),
        ("run --launchr=mpi script.py", "--launcher"),
        ("run --nprocs 2 script.py", "--nproc-per-node"),
        ("run --noodes 2 script.py", "--nnodes"),
        ("trace --pgn out.json", "--png"),
        ("trcae out.json", "trace"),
        ("--verison", "--version"),
    ],
)
def test_a_typo_is_told_with_the_nearest_name(line, hint, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split(), "drumline")
    error = capsys.readouterr().err
    command = line.split()[0]
    assert ended.value.code == 2 and f"did you mean {hint}?" in error
    assert error.startswith(f"usage: drumline {command if command in cli.COMMANDS else '['}")


def test_an_unknown_option_before_others_is_what_is_refused(capsys):
    """The option after it was taken for its value, and its own value for the script."""
    with pytest.raises(SystemExit):
        cli.main(["run", "--no-python", "-n", "2", "script.py"], "drumline")
    assert capsys.readouterr().err.endswith("unrecognized arguments: --no-python\n")


def test_a_missing_script_is_all_that_is_asked_for(capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", "-n", "2"], "drumline")
    assert capsys.readouterr().err.endswith("the following arguments are required: script\n")


def test_spellings_of_torchrun_mean_the_same():
    line = "run --nproc_per_node=4 --nnodes 2 --node_rank 1 --master_addr n0 --master_port 29500"
    more = "--log_dir logs --max_restarts 3 --rdzv_id x --rdzv_backend=c10d --standalone --module"
    options = cli.parse([*line.split(), *more.split(), "package.train", "--node_rank", "7"])
    assert (options.nproc_per_node, options.nnodes, options.node_rank) == ("4", 2, 1)
    assert (options.master_addr, options.master_port) == ("n0", 29500)
    assert (options.log_dir, options.max_restarts, options.launch_id) == ("logs", 3, "x")
    assert options.module and options.script == "package.train"
    assert options.arguments == ["--node_rank", "7"]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("n0:29500", ("n0", 29500)),
        ("[fd00::1]:29500", ("fd00::1", 29500)),
        ("[fd00::1]", ("fd00::1", 0)),
        ("fd00::1", ("fd00::1", 0)),  # as `drumline join` is advised on the first machine
        ("fe80::1%eth0", ("fe80::1%eth0", 0)),
        ("::1:29500", ("::1", 29500)),  # as torchrun takes it
        ("n0", ("n0", 0)),
    ],
)
def test_a_rendezvous_endpoint_is_the_master_address_and_port(text, place):
    job = cli._job(cli.parse(["run", "--rdzv-endpoint", text, "script.py"]))
    assert (job.master_addr, job.master_port) == place


@pytest.mark.parametrize("text", ["n0:http", "n0:65536", ":29500", "[]:29500", ""])
def test_a_malformed_rendezvous_endpoint_is_wrong_usage(text, capsys):
    with pytest.raises(SystemExit):
        cli.parse(["run", "--rdzv-endpoint", text, "script.py"])
    assert "is not HOST:PORT" in capsys.readouterr().err


FAIL_TWICE = """
import os, sys, launcher
count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(count, launcher.current().launch_id, os.environ["TORCHELASTIC_RUN_ID"], flush=True)
if count < 2 and os.environ["RANK"] == "1":
    sys.exit(3 + count)
"""


def test_a_launch_that_fails_is_restarted_under_a_new_id_and_says_so(command):
    script = command.script(FAIL_TWICE)
    ended = command.run("run", "-n", "2", "--max-restarts", "2", "--launch-id", "x", script)
    assert ended.code == 0, ended.err
    ids = ["x", "x-restart-1", "x-restart-2"]
    assert ended.lines(1) == [f"{count} {name} {name}" for count, name in enumerate(ids)]
    restarts = [line for line in ended.err.splitlines() if line.startswith("restart ")]
    assert [line.partition(" (")[0] for line in restarts] == [
        "restart 1 of 2 after rank 1", "restart 2 of 2 after rank 1",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["torchrun", "mpi"])
def test_ranks_of_a_backend_launcher_know_how_often_they_were_restarted(command, name):
    if name == "mpi" and not shutil.which("mpiexec"):
        pytest.skip("no MPI: `pip install mpich` installs one")
    line = ["run", "--launcher", name, "-n", "2", "--max-restarts", "1"]
    count = "os.environ['TORCHELASTIC_RESTART_COUNT']"
    script = command.script(f"import os, sys\nsys.exit({count} == '0')")
    ended = command.run(*line, script, timeout=100)
    assert ended.code == 0 and ended.err.count("restart 1 of 1 after rank") == 1, ended.err


def test_the_last_restart_s_exit_code_is_that_of_the_command(command):
    ended = command.run("run", "-n", "2", "--max-restarts", "1", command.script(FAIL_TWICE))
    assert ended.code == 4 and ended.err.count("restart ") == 1


def test_a_launch_that_was_stopped_is_not_restarted(monkeypatch, capsys):
    launches = []

    def start(*arguments, **options):
        launches.append(arguments)
        raise errors.interrupted(15)

    monkeypatch.setattr(launch_job, "run_checked", start)
    options = cli.parse(["run", "--max-restarts", "5", "script.py"])
    with pytest.raises(errors.LaunchInterrupted):
        cli._start(cli._job(options), None, options)
    assert len(launches) == 1 and "restart" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["multiprocessing", "torchrun"])
def test_a_meeting_of_nodes_that_fails_is_not_repeated(command, name):
    """Each restart waited as long again for a node that had not come."""
    options = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--timeout", "1"]
    line = ["run", "--launcher", name, *options, "--max-restarts", "2", command.script("")]
    ended = command.run(*line, env={"DRUMLINE_TOKEN": "ab" * 32})
    assert (ended.code, ended.err.count("did not come within 1 s")) == (124, 1), ended.err


def test_max_restarts_is_a_number(capsys):
    with pytest.raises(SystemExit):
        cli.parse(["run", "--max-restarts", "-1", "script.py"])
    assert "'-1' is not a number of restarts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("drumline ser", ["serve"]),
        ("drumline run --max", ["--max-restarts"]),
        ("drumline run --launcher th", ["threads"]),
        ("drumline serve --max-w", ["--max-waiting"]),
    ],
)
def test_a_shell_completes_commands_and_options(line, completions, tmp_path):
    pytest.importorskip("argcomplete", reason="runs after `pip install argcomplete`")
    out = tmp_path / "completions"
    environ = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(out), "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line, "COMP_POINT": str(len(line)),
    }  # fmt: skip
    command = [sys.executable, "-m", "drumline"]
    subprocess.run(command, env=os.environ | environ, timeout=60, check=True, capture_output=True)
    assert re.split(r"\s+", out.read_text().strip()) == completions
