"""The command line.

python -m launcher run -n 4 train.py --steps 10
python -m launcher run -n 4 -m package.module
python -m launcher doctor
python -m launcher trace out.json --png out.png
python -m launcher trace first.json second.json --into both.json
python -m launcher --version
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

import launcher
from launcher import launch_job, registry
from launcher.cli import dry_run, failure_report
from launcher.errors import LaunchError
from launcher.job import LOOPBACK, Job, Target
from launcher.system import gpus, linux

PROG = "python -m launcher"
DESCRIPTION = "Start ranks, check this machine, and read the traces of launches."
USAGE_CODE = 2
OPTIONS_WITHOUT_VALUE = ("--", "-h", "--help", "-m", "--bind", "--dry-run")


class VersionAction(argparse.Action):
    """`--version`: the version of the installed distribution, looked up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"drumline {launcher.__version__}")
        parser.exit()


class CommandParser(argparse.ArgumentParser):
    """A parser of one command: an unknown option is an error with the usage of that command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown


def parser(prog: str = PROG) -> argparse.ArgumentParser:
    """The parser of all commands. A test holds the list of options: they are few on purpose."""
    top = argparse.ArgumentParser(prog=prog, description=DESCRIPTION, allow_abbrev=False)
    top.add_argument("--version", action=VersionAction, nargs=0, help="print the version")
    commands = top.add_subparsers(dest="command", required=True, parser_class=CommandParser)
    run = commands.add_parser("run", help="start a script once per rank", allow_abbrev=False)
    run.add_argument(
        "-n",
        "--nproc-per-node",
        default="1",
        metavar="N",
        help="ranks on this node: a number, cpu, gpu or auto; default: %(default)s",
    )
    run.add_argument(
        "--launcher",
        default="multiprocessing",
        metavar="NAME",
        help=f"{', '.join(registry.BUILT_IN)}, or an installed one; default: %(default)s",
    )
    run.add_argument(
        "--nnodes", type=int, default=1, metavar="N", help="number of nodes; default: %(default)s"
    )
    run.add_argument(
        "--node-rank",
        type=int,
        default=0,
        metavar="N",
        help="the index of this node; default: %(default)s",
    )
    run.add_argument(
        "--master-addr",
        default=LOOPBACK,
        metavar="ADDRESS",
        help="address of rank 0; default: %(default)s",
    )
    run.add_argument(
        "--master-port",
        type=int,
        default=0,
        metavar="PORT",
        help="port of rank 0; default: by launch id",
    )
    run.add_argument("--launch-id", metavar="ID", help="name of the launch; random by default")
    run.add_argument("--log-dir", metavar="FOLDER", help="write a file per rank and stream")
    timeout_help = "end the launch after so many seconds"
    run.add_argument("--timeout", type=float, metavar="SECONDS", help=timeout_help)
    bind_help = "pin each rank to its own cores; OMP_NUM_THREADS is their number in local launches"
    run.add_argument("--bind", action="store_true", help=bind_help)
    preload_help = "import once, before the ranks are forked"
    run.add_argument("--preload", action="append", default=[], metavar="MODULE", help=preload_help)
    run.add_argument("--trace", metavar="FILE", help="record a timeline of every rank")
    run.add_argument("--dry-run", action="store_true", help="show what would be started")
    run.add_argument("-m", dest="module", action="store_true", help="run a module, not a script")
    run.add_argument("script", help="the script, or with -m the module, to run")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    _add_diagnostics(commands)
    return top


def _add_diagnostics(commands: Any) -> None:
    """The commands that start nothing."""
    doctor = commands.add_parser("doctor", help="check this machine", allow_abbrev=False)
    doctor.add_argument("--json", action="store_true", help="print a JSON object per finding")
    doctor.add_argument("--quick", action="store_true", help="skip the conformance test")
    trace = commands.add_parser("trace", help="summarise, join or draw traces", allow_abbrev=False)
    trace.add_argument("traces", type=Path, metavar="TRACE", nargs="+", help="of `run --trace`")
    into_help = "join the traces of several nodes"
    trace.add_argument("--into", type=Path, metavar="FILE", help=into_help)
    png_help = "draw a PNG or SVG; by default next to the trace"
    trace.add_argument("--png", type=Path, metavar="FILE", nargs="?", const=Path(), help=png_help)


def parse(arguments: Sequence[str], prog: str = PROG) -> argparse.Namespace:
    """The options, with the script's arguments unchanged: argparse would drop a `--`."""
    if arguments[:1] != ["run"]:
        return parser(prog).parse_args(arguments)
    script = _script_index(arguments)
    options = parser(prog).parse_args(arguments[: script + 1])
    options.arguments = list(arguments[script + 1 :])
    return options


def _script_index(arguments: Sequence[str]) -> int:
    """The index of the first word that is neither the command, nor an option, nor its value."""
    index = 1
    while index < len(arguments) and arguments[index].startswith("-"):
        index += 1 if _stands_alone(arguments[index]) else 2
    return index


def _stands_alone(word: str) -> bool:
    """True if no value of this option follows as another word, as in `-n2` but not in `-n 2`."""
    has_value = "=" in word if word.startswith("--") else len(word) > 2
    return word in OPTIONS_WITHOUT_VALUE or has_value


def main(arguments: Sequence[str], prog: str = PROG) -> int:
    """The exit code: of the first failed rank, 128 + a signal's number, or 2 for a usage error.

    prog: the command that the user typed, for usages and errors.
    """
    linux.open_missing_streams()
    # Shells start background jobs with SIGINT ignored; sent to a launch, it is meant for it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = parse(arguments, prog)
    try:
        return COMMANDS[options.command](options)
    except LaunchError as error:
        _print_error(failure_report.lines(error))
        return error.exit_code
    except (ValueError, OSError) as error:
        _print_error([f"{prog}: {error}"])
        return USAGE_CODE


def _run(options: argparse.Namespace) -> int:
    job = _job(options)
    launch_job.check(job, options.launcher, options.trace)
    if options.dry_run:
        _print(dry_run.lines(job, options.launcher))
    else:
        in_process = options.launcher in ("multiprocessing", "threads")
        start_options = {"owns_process": True} if in_process else {}
        launch_job.start(job, options.launcher, options.trace, **start_options)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from launcher import doctor  # not needed by a launch

    return doctor.main(options.json, options.quick)


def _trace(options: argparse.Namespace) -> int:
    from launcher.trace import merge_traces, plot, summary

    trace, file = merge_traces.read(options.traces), options.into or options.traces[0]
    if options.into is not None:
        merge_traces.write(trace, options.into)
    if options.png is not None:
        plot.draw(trace, options.png if options.png != Path() else file.with_suffix(".png"))
    _print([*summary.lines(trace), f"open {file} in {summary.VIEWERS}"])
    return 0


COMMANDS = {"run": _run, "doctor": _doctor, "trace": _trace}


def _print(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _print_error(lines: Iterable[str]) -> None:
    """Print to standard error if it is open; the exit code reports the error in any case."""
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.buffer.write("".join(f"{line}\n" for line in lines).encode(errors="replace"))
        sys.stderr.flush()


def _job(options: argparse.Namespace) -> Job:
    return Job(
        Target("module" if options.module else "script", options.script),
        args=tuple(options.arguments),
        nprocs=_nprocs(options.nproc_per_node),
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        master_port=options.master_port,
        launch_id=(
            launch_job.launch_id_for(options.nnodes, options.launcher)
            if options.launch_id is None
            else options.launch_id
        ),
        log_dir=options.log_dir,
        timeout_s=options.timeout,
        bind=options.bind,
        preload=tuple(options.preload),
    )


def _nprocs(text: str) -> int:
    """The number of ranks for the value of -n."""
    if text.isascii() and text.isdigit():
        return int(text)
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    if text in ("gpu", "auto"):
        count = len(gpus.visible())
        if count or text == "auto":
            return count or len(os.sched_getaffinity(0))
        raise ValueError(
            "-n gpu: no GPU is visible here, so there is no rank to start. Give a number."
        )
    raise ValueError(f"-n {text}: not a number of ranks, nor one of gpu, cpu, auto")
