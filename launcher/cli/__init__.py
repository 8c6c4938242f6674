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
import logging
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher import launch_job, target
from launcher.cli import run_options
from launcher.cli.command_parser import CommandParser, VersionAction, complete, completing_command
from launcher.cli.run_options import (
    PATIENCE_OPTION,
    TOKEN_OPTIONS,
    endpoint_of,
    token_to_join,
    with_token,
)
from launcher.errors import LaunchError, LaunchInterrupted
from launcher.job import LOOPBACK, Job, Target, new_launch_id
from launcher.runtime import rank_process
from launcher.runtime.log_setup import configure as configure_logging
from launcher.runtime.rank_environment import forget_torchrun, set_patience
from launcher.system import gpus, linux

PROG = "python -m launcher"
DESCRIPTION = "Start ranks, check this machine, and read the traces of launches."
USAGE_CODE = 2
DOCTOR_EPILOG = "exit codes: 0 nothing is wrong; 1 a check failed; 2 wrong usage"
TRACE_EPILOG = "exit codes: 0 done, with or without the picture; 2 wrong usage, or no trace"

log = logging.getLogger("launcher")


def parser(prog: str = PROG) -> CommandParser:
    """The parser of all commands. A test holds the list of options: they are few on purpose."""
    top = CommandParser(prog=prog, description=DESCRIPTION)
    top.add_argument("--version", action=VersionAction, nargs=0, help="print the version")
    commands = top.add_subparsers(dest="command", required=True, parser_class=CommandParser)
    run = commands.add_parser("run", help="start a script once per rank")
    run_options.add_options(run)
    doctor = commands.add_parser("doctor", help="check this machine", epilog=DOCTOR_EPILOG)
    doctor.add_argument("--json", action="store_true", help="print a JSON object per finding")
    doctor.add_argument("--quick", action="store_true", help="skip the conformance test")
    trace_help = "summarise, join or draw traces"
    trace = commands.add_parser("trace", help=trace_help, epilog=TRACE_EPILOG)
    trace.add_argument("traces", type=Path, metavar="TRACE", nargs="+", help="of `run --trace`")
    into_help = "join the traces of several nodes; default: only read them"
    trace.add_argument("--into", type=Path, metavar="FILE", help=into_help)
    png_help = "draw a PNG or SVG, without FILE next to the trace; default: no picture"
    trace.add_argument("--png", type=Path, metavar="FILE", nargs="?", const=Path(), help=png_help)
    html_help = "write a page for a browser, without FILE next to the trace; default: no page"
    trace.add_argument("--html", type=Path, metavar="FILE", nargs="?", const=Path(), help=html_help)
    return top


def parse(arguments: Sequence[str], prog: str = PROG) -> argparse.Namespace:
    """The options, with the script's arguments unchanged."""
    if list(arguments[:1]) != ["run"]:
        return parser(prog).parse_args(arguments)
    words, script_arguments = run_options.split(arguments)
    run = CommandParser(prog=f"{prog} run")
    run_options.add_options(run)
    options = run.parse_args(words[1:])
    options.command, options.arguments = "run", script_arguments
    options.command_line = tuple(arguments)
    return options


def main(arguments: Sequence[str], prog: str = PROG) -> int:
    """The exit code: of the first failed rank, 128 + a signal's number, or 2 for a usage error.

    prog: the command that the user typed, for usages and errors.
    """
    linux.open_missing_streams()
    # Shells start background jobs with SIGINT ignored; sent to a launch, it is meant for it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if completing_command() is not None:
        complete(parser(prog))
    return run_command(parse(arguments, prog), prog)


def run_command(options: argparse.Namespace, prog: str = PROG) -> int:
    """Run the command of the options, as main() does."""
    try:
        configure_logging()
        return COMMANDS[options.command](options)
    except LaunchError as error:
        _print_error(_failure_lines(error))
        return error.exit_code
    except (ValueError, OSError) as error:
        _print_error([f"{prog}: {error}"])
        return USAGE_CODE
    except KeyboardInterrupt:  # before there was a launch, which has its own word for it
        _print_error([f"{prog}: interrupted"])
        return linux.shell_exit_code(-signal.SIGINT)


def _run(options: argparse.Namespace) -> int:
    set_patience(options.patience)
    job = _job(options)
    if options.module:
        target.import_from_working_directory()
    backend = launch_job.checked_launcher(job, options.launcher, options.trace)
    if options.dry_run:
        from launcher.cli import dry_run  # not needed by a launch

        _print(dry_run.lines(job, options.launcher))
        return 0
    if job.nnodes > 1 and launch_job.needs_token(backend):
        target.check(job.target)
        job = with_token(job, options)
    code = 0
    try:
        _start(job, backend, options)
    except LaunchError as error:
        _print_error(_failure_lines(error))
        code = error.exit_code
    # Not as the interpreter ends: that takes longer than ending the ranks, and ranks that are
    # threads may still be in the code of a library.
    rank_process.end_process(code)
    return code


def _start(job: Job, backend: Any, options: argparse.Namespace) -> None:
    """Run the job, and again after a failure, up to --max-restarts times, under a new launch id.

    Not after a failed meeting of the nodes: that has waited already.

    The id is the first one with the number of the restart, so that each of several nodes, which
    restarts by itself, finds the others again.
    """
    in_process = options.launcher in ("multiprocessing", "threads")
    start_options = {"owns_process": True} if in_process else {}
    for count in range(options.max_restarts + 1):
        launch_id = f"{job.launch_id}-restart-{count}" if count else job.launch_id
        attempt = replace(job, launch_id=launch_id, restart_count=count)
        log.info("launch %s: %d ranks of %s", launch_id, job.nprocs, options.launcher)
        try:
            launch_job.run_checked(attempt, backend, options.trace, **start_options)
            return
        except LaunchError as error:
            is_final = isinstance(error, LaunchInterrupted) or not error.has_begun
            if count == options.max_restarts or is_final:
                raise
            cause = error.failures[0].summary() if error.failures else str(error).split("\n")[0]
            restart = f"restart {count + 1} of {options.max_restarts} after {cause}"
            _print_error([*_failure_lines(error), restart])


def _doctor(options: argparse.Namespace) -> int:
    from launcher import doctor  # not needed by a launch

    return doctor.main(options.json, options.quick)


def _trace(options: argparse.Namespace) -> int:
    from launcher.trace import merge_traces, page, plot, summary

    trace, file = merge_traces.read(options.traces), options.into or options.traces[0]
    if options.into is not None:
        merge_traces.write(trace, options.into)
    _print([*summary.lines(trace), f"open {file} in {summary.VIEWERS}"])
    if options.html is not None:
        page.write_page(
            trace, options.html if options.html != Path() else file.with_suffix(".html")
        )
    if options.png is not None:
        picture = options.png if options.png != Path() else file.with_suffix(".png")
        try:
            plot.draw(trace, picture)
        except ImportError as error:
            _print_error([f"{picture} was not drawn: {error}. pip install 'drumline[plot]'"])
    return 0


COMMANDS = {"run": _run, "doctor": _doctor, "trace": _trace}


def _failure_lines(error: LaunchError) -> Iterable[str]:
    from launcher.cli import failure_report  # not needed by a launch that ends well

    return failure_report.lines(error)


def _print(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _print_error(lines: Iterable[str]) -> None:
    """Print to standard error if it is open; the exit code reports the error in any case."""
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.buffer.write("".join(f"{line}\n" for line in lines).encode(errors="replace"))
        sys.stderr.flush()


def _job(options: argparse.Namespace) -> Job:
    address, port = options.rdzv_endpoint or (options.master_addr, options.master_port)
    return Job(
        Target("module" if options.module else "script", options.script),
        args=tuple(options.arguments),
        nprocs=_nprocs(options.nproc_per_node),
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        master_addr=LOOPBACK if address is None else address,
        master_port=port,
        launch_id=new_launch_id() if options.launch_id is None else options.launch_id,
        log_dir=options.log_dir,
        timeout_s=options.timeout,
        bind=options.bind,
        encrypt=options.encrypt,
        preload=None if options.preload is None else tuple(filter(None, options.preload)),
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
