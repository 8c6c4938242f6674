"""`python -m launcher run`: options, targets and usage errors."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import launcher
from launcher import cli

OPTIONS = {
    "-h", "--help",
    "-n", "--nproc-per-node",
    "--launcher",
    "--nnodes", "--node-rank",
    "--master-addr", "--master-port",
    "--launch-id",
    "--token-file", "--insecure",
    "--log-dir",
    "--timeout",
    "--bind",
    "--encrypt",
    "--patience",
    "--preload",
    "--dry-run",
    "--trace",
    "-m", "--module",
    "--max-restarts",
    "--rdzv-endpoint", "--rdzv-id", "--rdzv-backend", "--standalone",  # torchrun's
}  # fmt: skip
SHOW = "import sys, json, launcher\nprint(json.dumps([__name__, *sys.argv]))\n"


def printed_argv(ended, rank):
    return json.loads(ended.lines(rank)[0])


def test_options_of_run():
    commands = cli.parser()._subparsers._group_actions[0].choices
    names = {name for action in commands["run"]._actions for name in action.option_strings}
    assert names == OPTIONS


def test_options_without_value():
    commands = cli.parser()._subparsers._group_actions[0].choices
    alone = [action for action in commands["run"]._actions if action.nargs == 0]
    assert {name for action in alone for name in action.option_strings} | {"--"} == set(
        cli.run_options.OPTIONS_WITHOUT_VALUE
    )


@pytest.mark.parametrize(
    "arguments",
    [["a", "b c"], ["--help", "-n", "5"], ["ünï", "日本", ""], ["--"], ["--", "-m", "x"]],
)
def test_script_arguments_are_parsed_unchanged(arguments):
    assert cli.parse(["run", "-n", "2", "script.py", *arguments]).arguments == arguments


def test_script_arguments_reach_the_script_unchanged(command):
    script, arguments = command.script(SHOW), ["ünï", "--", "-m", "--help", "b c", ""]
    ended = command.run("run", "-n", "2", script, *arguments)
    assert printed_argv(ended, 1) == ["__main__", script, *arguments]


def test_version_is_that_of_the_installed_distribution(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"drumline {launcher.__version__}\n"
    assert re.fullmatch(r"unknown|[0-9]+\.[0-9]+.*", launcher.__version__)


def test_arguments_of_100_kilobytes(command):
    script = command.script("import sys\nprint(len(sys.argv[1]))")
    assert command.run("run", "-n", "2", script, "x" * 100_000).lines(0) == ["100000"]


def test_a_module_runs_as_python_m_would_run_it(command, tmp_path):
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(SHOW + "print(__package__, __spec__.name)")
    ended = command.run("run", "-n", "2", "-m", "some_package", "x")
    assert printed_argv(ended, 0) == ["__main__", str(package / "__main__.py"), "x"]
    assert ended.lines(0)[1] == "some_package some_package.__main__"


@pytest.mark.parametrize("is_safe", [False, True])
def test_the_console_script_finds_modules_where_it_is_started(command, tmp_path, is_safe):
    """Its sys.path begins with the folder of commands: a module of the user's was not there."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "drumline"
    script.write_text("import sys\nfrom launcher.cli import main\nsys.exit(main(sys.argv[1:]))")
    (tmp_path / "train.py").write_text("print('trained')")
    run = [sys.executable, *["-P"] * is_safe, str(script), "run", "-n", "2", "-m", "train"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run(run, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert ended.stdout.count("trained") == (0 if is_safe else 2), ended


def test_a_script_that_only_one_rank_could_read_is_an_error(command, tmp_path):
    """The other ranks found the pipe empty, and ended well."""
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "/dev/stdin"):
        ended = command.run("run", "-n", "2", name, stdin="print('hello')")
        assert ended.code == 2 and "only one rank could read" in ended.err


def test_a_script_in_shared_memory_is_a_script_like_others(command):
    with tempfile.NamedTemporaryFile("w", suffix=".py", dir="/dev/shm") as script:
        script.write("print('hello')")
        script.flush()
        assert command.run("run", "-n", "2", script.name).lines(1) == ["hello"]


def test_a_script_imports_from_its_own_folder(command, tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "neighbour.py").write_text("NAME = 'found'")
    (tmp_path / "scripts" / "main.py").write_text("import neighbour\nprint(neighbour.NAME)")
    assert command.run("run", "-n", "1", "scripts/main.py").lines(0) == ["found"]


def test_exit_handlers_and_threads_of_a_script_finish(command):
    script = command.script(
        "import atexit, threading, time\n"
        "atexit.register(print, 'handler')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        "print('main')"
    )
    assert command.run("run", "-n", "1", script).lines(0) == ["main", "thread", "handler"]


def test_a_script_may_start_processes_by_spawning(command):
    script = command.script(
        "import multiprocessing\n"
        "def double(x): return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(double, "
        "[4]))"
    )
    assert command.run("run", "-n", "1", script).lines(0) == ["[8]"]


def test_text_given_to_sys_exit_is_printed(command):
    ended = command.run("run", "-n", "1", command.script("import sys; sys.exit('some reason')"))
    assert ended.code == 1 and "[0 err] some reason" in ended.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0"], "less than one"),
        (["-n", "-3"], "not a number of ranks"),
        (["-n", "two"], "not a number of ranks"),
        (["-n", "2", "--nnodes", "0"], "less than one"),
        (["-n", "2", "--nnodes", "2", "--node-rank", "2"], "not among 2 nodes"),
        (["--nnodes", "2", "--launcher", "threads"], "does not support nnodes"),
        (["--nnodes", "2", "--master-addr", "::1"], "needs a token"),
        (
            ["--nnodes", "2", "--launcher", "multiprocessing", "--master-addr", "::1"],
            "needs a token",
        ),
        (["--nnodes", "2", "--node-rank", "1"], "needs --master-addr"),
        (["-n", "2", "--master-port", "70000"], "not in [0, 65535]"),
        (["-n", "2", "--timeout", "0"], "not positive"),
        (["-n", "2", "--launcher", "nobody"], "no launcher is called 'nobody'"),
        (["-n", "2", "--launch-id", ""], "must not be empty"),
    ],
)
def test_invalid_option_values_are_usage_errors(command, usage_error, arguments, message):
    assert message in usage_error("run", *arguments, command.script("print('ran')"))


@pytest.mark.parametrize(
    "form", [["no-such-script.py"], ["-m", "no_such_module"], ["-m", "json.no"]]
)
def test_a_missing_target_is_a_usage_error(usage_error, form):
    text = usage_error("run", "-n", "2", *form)
    assert form[-1] in text and "nothing to run" in text


def test_a_deleted_working_directory_is_a_usage_error(command, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    ended = command.run("run", "-n", "2", "script.py", cwd=gone, preexec_fn=gone.rmdir)
    assert ended.code == 2 and "working directory that has been deleted" in ended.err


def test_a_syntax_error_is_shown_with_its_line(command):
    ended = command.run("run", "-n", "2", command.script("x = 1\nprint('a'\n"))
    assert ended.code == 1 and "SyntaxError" in ended.err and "print('a'" in ended.err


def test_dry_run_prints_the_launch_info_of_every_rank(command, capsys):
    script = command.script("open('ran', 'w')")
    assert cli.main(["run", "-n", "3", "--launch-id", "mine", "--dry-run", script, "a b"]) == 0
    first, *infos = capsys.readouterr().out.splitlines()
    assert script in first and "'a b'" in first
    assert [json.loads(info)["rank"] for info in infos] == [0, 1, 2]
    assert {json.loads(info)["launch_id"] for info in infos} == {"mine"}
    assert not (command.folder / "ran").exists()


def test_dry_run_names_what_is_imported_before_ranks_that_are_forked_and_no_others(command, capsys):
    """Those of Ray are not, and it was said of them."""
    script = command.script("import torch")
    for name, is_forked in {"multiprocessing": True, "ray": False}.items():
        assert cli.main(["run", "-n", "2", "--launcher", name, "--dry-run", script]) == 0
        assert ("before they are forked" in capsys.readouterr().out) == is_forked


@pytest.mark.parametrize("name", ["multiprocessing", "threads", "torchrun"])
def test_encrypt_reaches_every_rank(command, name):
    """And the launch secret is in nobody's command line, which all users can read."""
    script = command.script(
        "import os, launcher\n"
        "info = launcher.current()\n"
        "secret = os.pread(int(info.extras['secret_fd']), 32, 0).hex()\n"
        "is_shown = bool(secret in os.popen('cat /proc/[0-9]*/cmdline 2>&1').read())\n"
        "assert len(secret) == 64 and not is_shown\n"
        "print(f'rank {info.rank} encrypts {info.encrypts}', flush=True)\n"
    )
    ended = command.run("run", "-n", "2", "--launcher", name, "--encrypt", script)
    assert ended.code == 0
    assert [f"rank {rank} encrypts True" in ended.out for rank in range(2)] == [True, True]
    if name == "multiprocessing":
        ended = command.run("run", "-n", "2", script)
        assert "encrypts False" in ended.out and "encrypts True" not in ended.out


def test_bind_pins_each_rank_to_its_own_cores(command):
    script = command.script(
        "import os\nprint(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
    )
    count = min(2, len(os.sched_getaffinity(0)))
    ended = command.run("run", "-n", str(count), "--bind", script)
    assert len({ended.lines(rank)[0] for rank in range(count)}) == count
    assert ended.err.count("of NUMA node") == count


def test_omp_num_threads_is_each_ranks_share_of_the_cores(command):
    script = command.script("import os\nprint(os.environ['OMP_NUM_THREADS'])")
    many = 2 * len(os.sched_getaffinity(0))
    assert command.run("run", "-n", str(many), script).lines(0) == ["1"]
    preset = command.run("run", "-n", "1", script, env={"OMP_NUM_THREADS": "7"})
    assert preset.lines(0) == ["7"]


def test_preload_imports_a_module_once_for_all_ranks(command):
    (command.folder / "heavy.py").write_text(
        "import os\nprint('imported', flush=True)\nPID = os.getpid()"
    )
    script = command.script("import os, heavy\nprint(os.getppid() == heavy.PID)")
    ended = command.run("run", "-n", "3", "--preload", "heavy", script)
    assert [ended.lines(rank) for rank in range(3)] == [["True"]] * 3
    assert ended.out.count("imported") == 1


def test_preload_loads_the_public_names_of_a_lazy_package(command):
    package = command.folder / "lazy"
    package.mkdir()
    (package / "inner.py").write_text("import os\nPID = os.getpid()")
    (package / "__init__.py").write_text(
        "__all__ = ['PID', 'missing']\n"
        "def __getattr__(name):\n"
        "    if name != 'PID': raise AttributeError(name)\n"
        "    from lazy.inner import PID\n"
        "    return PID\n"
    )
    script = command.script("import os, sys\nprint(sys.modules['lazy.inner'].PID == os.getppid())")
    ended = command.run("run", "-n", "2", "--preload", "lazy", script)
    assert [ended.lines(rank) for rank in range(2)] == [["True"]] * 2, ended.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()",
            "1 threads",
        ),
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("raise SystemExit(3)", "SystemExit"),
    ],
)
def test_preload_errors_name_the_module(command, text, message):
    (command.folder / "heavy.py").write_text(text)
    ended = command.run("run", "-n", "2", "--preload", "heavy", command.script("print('ran')"))
    assert ended.code == 1 and "heavy" in ended.err and message in ended.err


def test_no_rank_runs_before_all_were_forked_safely(command):
    """The check came after the first fork, while rank 0 already ran its script."""
    (command.folder / "heavy.py").write_text(
        "import threading, time\n"
        "from launcher.system import linux\n"
        "count = linux.count_threads\n"
        "linux.count_threads = lambda: time.sleep(0.7) or count()\n"
        "threading.Thread(target=time.sleep, args=(9,)).start()"
    )
    script = command.script("print('ran', flush=True)")
    ended = command.run("run", "-n", "2", "--preload", "heavy", script)
    assert ended.code == 1 and "1 threads" in ended.err and ended.out == ""


def test_ranks_as_threads(command):
    script = command.script("import launcher\nprint('rank', launcher.current().rank, flush=True)\n")
    ended = command.run("run", "-n", "3", "--launcher", "threads", script)
    assert ended.code == 0 and [f"rank {r}" in ended.out for r in range(3)] == [True] * 3


@pytest.mark.parametrize("leaving", ["sys.exit(5)", "raise ValueError('in the child')", "pass"])
def test_a_forked_child_of_a_rank_does_not_report_for_the_rank(command, leaving):
    script = command.script(
        "import os, sys, time\n"
        "child = os.fork()\n"
        f"if child == 0:\n    {leaving}\n"
        "else:\n    os.waitpid(child, 0)\n    time.sleep(0.2)\n    print('the rank continues')"
    )
    ended = command.run("run", "-n", "2", script)
    assert ended.code == 0
    assert "the rank continues" in ended.lines(0) and "the rank continues" in ended.lines(1)


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("raise ValueError('in a thread')", 1, "rank 1 (local rank 1"),
        ("sys.exit(3)", 3, "exited with code 3"),
        ("os.kill(os.getpid(), 11)", 139, ""),
    ],
)
def test_a_failure_in_a_thread_rank_ends_the_launch(command, fault, code, message):
    script = command.script(
        f"import os, sys, time, launcher\nif launcher.current().rank == 1: {fault}\ntime.sleep(60)"
    )
    ended = command.run("run", "-n", "2", "--launcher", "threads", script)
    assert ended.code == code and message in ended.err


def test_nproc_cpu_and_auto_start_a_rank_per_core(command):
    count = len(os.sched_getaffinity(0))
    script = command.script("import launcher\nprint(launcher.current().world_size)")
    for word in ("cpu", "auto"):
        ended = command.run("run", "-n", word, script, env={"CUDA_VISIBLE_DEVICES": ""})
        assert ended.lines(count - 1) == [str(count)] and ended.lines(count) == []


def test_nproc_gpu_without_a_gpu_is_a_usage_error(command, usage_error, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "no GPU" in usage_error("run", "-n", "gpu", command.script("print('ran')"))


def test_closed_standard_input(command):
    script = command.script("import sys\nprint(repr(sys.stdin.read()))")
    process = command.start("run", "-n", "2", script, stdin=None, preexec_fn=lambda: os.close(0))
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0 and sorted(out.splitlines()) == ["[0] ''", "[1] ''"], err


def test_sys_path_of_a_script_is_that_of_python_itself(command):
    script = command.script("import os, sys\nprint(sys.path[0] == os.path.dirname(__file__))")
    assert command.run("run", "-n", "1", script).lines(0) == ["True"]


def test_pythonsafepath_is_respected(command):
    script = command.script("import os, sys\nprint(os.path.dirname(__file__) in sys.path)")
    safe = command.run("run", "-n", "1", script, env={"PYTHONSAFEPATH": "1"})
    assert safe.lines(0) == ["False"]


def test_too_few_open_files_are_a_usage_error(command, usage_error, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda number: (100, 100))
    assert "ulimit -n" in usage_error("run", "-n", "50", command.script("print('ran')"))


def test_many_more_ranks_than_cores(command):
    script = command.script("import launcher\nprint(launcher.current().world_size)")
    ended = command.run("run", "-n", "32", script)
    assert [ended.lines(rank) for rank in range(32)] == [["32"]] * 32
