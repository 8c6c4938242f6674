"""The command line.

python -m launcher run -n 4 train.py --steps 10
python -m launcher run -n 4 -m package.module
python -m launcher doctor
python -m launcher trace out.json --png out.png
python -m launcher trace first.json second.json --into both.json
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from launcher import launch_job
from launcher.cli import dry_run, failure_report
from launcher.errors import LaunchError
from launcher.job import LOOPBACK, Job, Target
from launcher.system import gpus, linux

USAGE_CODE = 2
WITHOUT_VALUE = ("--", "-h", "--help", "-m", "--bind", "--dry-run")


def parser() -> argparse.ArgumentParser:
    """The options are few on purpose, and held by a test."""
    whole = argparse.ArgumentParser(prog="python -m launcher", allow_abbrev=False)
    commands = whole.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="start a script once per rank", allow_abbrev=False)
    run.add_argument("-n", "--nproc-per-node", default="1", metavar="N", help="ranks on this node")
    run.add_argument(
        "--launcher", default="multiprocessing", metavar="NAME", help="who starts the ranks"
    )
    run.add_argument("--nnodes", type=int, default=1, metavar="N", help="number of nodes")
    run.add_argument("--node-rank", type=int, default=0, metavar="N", help="this node among them")
    run.add_argument(
        "--master-addr", default=LOOPBACK, metavar="ADDRESS", help="where rank 0 listens"
    )
    run.add_argument(
        "--master-port", type=int, default=0, metavar="PORT", help="chosen by launch id if 0"
    )
    run.add_argument("--launch-id", metavar="ID", help="drawn at random if not given")
    run.add_argument("--log-dir", metavar="FOLDER", help="one file per rank and stream")
    run.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="end the launch after this time"
    )
    run.add_argument("--bind", action="store_true", help="pin each rank to cores of its own")
    run.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="MODULE",
        help="import once, before the ranks",
    )
    run.add_argument("--trace", metavar="FILE", help="record what every rank did and when")
    run.add_argument("--dry-run", action="store_true", help="show what would be started")
    run.add_argument(
        "-m", dest="module", action="store_true", help="the script is the name of a module"
    )
    run.add_argument("script", help="what each rank runs")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="what it is given")
    _add_others(commands)
    return whole


def _add_others(commands: Any) -> None:
    """The commands that start nothing."""
    doctor = commands.add_parser("doctor", help="say what is wrong here", allow_abbrev=False)
    doctor.add_argument("--json", action="store_true", help="an object per finding, a line each")
    doctor.add_argument("--quick", action="store_true", help="do not try the backends")
    trace = commands.add_parser("trace", help="look at a trace", allow_abbrev=False)
    trace.add_argument(
        "traces", type=Path, metavar="TRACE", nargs="+", help="what `run --trace` has written"
    )
    joined = "write those of several nodes into one"
    trace.add_argument("--into", type=Path, metavar="FILE", help=joined)
    drawn = "draw it, as PNG or as SVG; beside the trace if no FILE is said"
    trace.add_argument("--png", type=Path, metavar="FILE", nargs="?", const=Path(), help=drawn)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, and what follows the script as it is, where argparse would drop a `--`."""
    if arguments[:1] != ["run"]:
        return parser().parse_args(arguments)
    script = _script_at(arguments)
    options = parser().parse_args(arguments[: script + 1])
    options.arguments = list(arguments[script + 1 :])
    return options


def _script_at(arguments: Sequence[str]) -> int:
    """The index of the first word that is neither the command, nor an option, nor its value."""
    index = 1
    while index < len(arguments) and arguments[index].startswith("-"):
        index += 1 if arguments[index] in WITHOUT_VALUE or not _is_name(arguments[index]) else 2
    return index


def _is_name(word: str) -> bool:
    """Whether the value of this option is the next word, as in `-n 2`, and not in `-n2`."""
    return "=" not in word if word.startswith("--") else len(word) == 2


def main(arguments: Sequence[str]) -> int:
    """The exit code: of the first rank to fail, 128 and a signal's number, or 2 for a mistake."""
    linux.open_missing_streams()
    # A shell lets jobs in the background ignore it, but who sends it to a launch means the launch.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = parse(arguments)
    try:
        return COMMANDS[options.command](options)
    except LaunchError as error:
        _complain(failure_report.lines(error))
        return error.exit_code
    except (ValueError, OSError) as error:
        _complain([f"python -m launcher: {error}"])
        return USAGE_CODE


def _run(options: argparse.Namespace) -> int:
    job = _job(options)
    launch_job.check(job, options.launcher, options.trace)
    if options.dry_run:
        _show(dry_run.lines(job, options.launcher))
    else:
        launch_job.start(job, options.launcher, options.trace, **_extra(options))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from launcher import doctor  # a launch has no use for it

    return doctor.main(options.json, options.quick)


def _trace(options: argparse.Namespace) -> int:
    from launcher.trace import merge, plot, summary

    trace, shown = merge.read(options.traces), options.into or options.traces[0]
    if options.into is not None:
        merge.write(trace, options.into)
    if options.png is not None:
        beside = shown.with_suffix(".png")
        plot.draw(trace, beside if options.png == Path() else options.png)
    _show([*summary.lines(trace), f"open {shown} in {summary.VIEWERS}"])
    return 0


COMMANDS = {"run": _run, "doctor": _doctor, "trace": _trace}


def _show(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _complain(lines: Iterable[str]) -> None:
    """To standard error, if anyone is left to read it; the exit code says it too."""
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.buffer.write("".join(f"{line}\n" for line in lines).encode(errors="replace"))
        sys.stderr.flush()


def _extra(options: argparse.Namespace) -> dict[str, bool]:
    """What those launchers may know that start the ranks out of this very process."""
    return {"owns_process": True} if options.launcher in ("multiprocessing", "threads") else {}


def _job(options: argparse.Namespace) -> Job:
    return Job(
        Target("module" if options.module else "script", options.script),
        args=tuple(options.arguments),
        nprocs=_nprocs(options.nproc_per_node),
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        master_port=options.master_port,
        launch_id=_launch_id(options),
        log_dir=options.log_dir,
        timeout_s=options.timeout,
        bind=options.bind,
        preload=tuple(options.preload),
    )


def _launch_id(options: argparse.Namespace) -> str:
    if options.launch_id is None:
        return launch_job.own_launch_id(options.nnodes, options.launcher)
    return str(options.launch_id)


def _nprocs(text: str) -> int:
    """The number of ranks that -n asks for."""
    if text.isascii() and text.isdigit():
        return int(text)
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    if text in ("gpu", "auto"):
        count = len(gpus.visible())
        if count or text == "auto":
            return count or len(os.sched_getaffinity(0))
        raise ValueError(
            "-n gpu: no GPU can be seen here, so there is no rank to start. Give a number."
        )
    raise ValueError(f"-n {text}: this is not a number of ranks, nor one of gpu, cpu, auto")
