"""A rank on this machine: a forked process sets itself up, runs the target, and reports its end."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple

from launcher import detection, target
from launcher.authentication import launch_token
from launcher.job import Job
from launcher.launch_info import CHOICE, LaunchInfo
from launcher.records import json_values, pipe_records
from launcher.runtime import log_setup, mpi_import_check, outliving, rank_environment
from launcher.runtime.rank_state import LAUNCHER_FOLDER
from launcher.system import linux, stop_signals
from launcher.trace import recorder

DUMP_SIGNAL = signal.SIGRTMAX  # at this one, a rank writes its stacks to its report pipe
# Blocked by the fork server before it forks, and unblocked in _setup_child: a rank that has just
# been forked would lose these, or be killed by one before it can report.
BLOCKED_IN_FORK = (*stop_signals.STOP_SIGNALS, DUMP_SIGNAL)


class RankPipes(NamedTuple):
    """The ends of a rank's pipes that one process has."""

    stdout: int
    stderr: int
    report: int


@dataclass(frozen=True)
class RankSetup:
    """One rank before it is forked. pipes: the ends that it writes to.

    torch_port: kept for torch.distributed. cpus: the logical processors to be pinned to, if any.
    """

    info: LaunchInfo
    pipes: RankPipes
    torch_port: int
    cpus: tuple[int, ...] = ()


def run(setup: RankSetup, job: Job, server: int, owns_process: bool) -> None:
    """Become the rank, in a process that the fork server has just forked. Never returns.

    owns_process: the process was started for this launch, so leaving it by SystemExit runs only the
    target's own exit handlers; otherwise those inherited from the program must not run here.
    """
    setup = replace(setup, info=outliving.with_report(setup.info, setup.pipes.report))
    _setup_child(setup, job, server)
    if not owns_process:
        _forget_exit_handlers()
    code = _call(setup, job)
    if owns_process:
        sys.exit(code)
    end_process(code)


def _setup_child(setup: RankSetup, job: Job, server: int) -> None:
    linux.die_with(server)
    linux.set_process_name(f"rank {setup.info.rank}")
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _open_streams(setup)
    faulthandler.enable(file=setup.pipes.report)
    faulthandler.register(DUMP_SIGNAL, file=setup.pipes.report)
    # Only now: handlers and pipes are in place, and what is pending is delivered at once.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_IN_FORK)
    os.environ.pop(CHOICE, None)
    linux.remove_variables(os.environ, launch_token.VARIABLES)  # of other launches
    rank_environment.set_variables(setup.info, setup.torch_port, job.restart_count)
    if setup.cpus:
        os.sched_setaffinity(0, setup.cpus)


def _open_streams(setup: RankSetup) -> None:
    """Standard output and error into our pipes, line by line; standard input to rank 0 only."""
    for number, fd in enumerate((setup.pipes.stdout, setup.pipes.stderr), 1):
        os.dup2(fd, number)
        os.close(fd)
    if setup.info.rank != 0:
        close_stdin()
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False))  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _text(1, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2, "backslashreplace")  # type: ignore[misc]
    linux.line_buffer_c_stdout()


def close_stdin() -> None:
    """Give standard input an immediate end: it belongs to rank 0."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if null != 0:
        os.close(null)


def _text(fd: int, errors: str) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(fd, "wb", closefd=False))
    return io.TextIOWrapper(raw, errors=errors, line_buffering=True)


def _call(setup: RankSetup, job: Job) -> int:
    """Run the target and report its result or failure; return its exit code."""
    fd = setup.pipes.report
    pipe = os.fstat(fd)
    with detection.acting_as(None):
        return run_target(job, setup.info, lambda record: _report(fd, pipe, record))


def run_target(job: Job, info: LaunchInfo, report: Callable[[dict[str, Any]], object]) -> int:
    """Run the target, report {"result": ...} or {"failure": ...}, and return the exit code.

    A child that the target has forked returns here too, and reports nothing: let it leave.
    """
    log_setup.configure()
    mpi_import_check.install(f"rank {info.rank}", info.world_size)
    rank_pid, code = os.getpid(), 0
    if job.target.kind != "function":
        sys.excepthook = _default_excepthook(rank_pid)
    try:
        with recorder.recording_span(info, job.target.name):
            record = {"result": target.call(job)}
        json_values.dumps(record["result"])  # a result that cannot be sent is this rank's failure
    except BaseException as error:
        code, is_rank = exit_code(error), os.getpid() == rank_pid
        if is_rank:
            report({"failure": describe(error, info)} if code else {"result": None})
            sys.last_value = error if code else None  # for exit handlers
        _call_excepthook(error, job, is_rank)
    else:
        if os.getpid() == rank_pid:
            report(record)
    return code


def _default_excepthook(rank_pid: int) -> Callable[..., None]:
    """An excepthook that prints no error of the rank, which the launcher does; only its children's.

    Set before the script runs, because torch.distributed wraps the one that it finds.
    """

    def excepthook(*error: Any) -> None:
        if os.getpid() != rank_pid:
            sys.__excepthook__(*error)

    return excepthook


def _call_excepthook(error: BaseException, job: Job, is_rank: bool) -> None:
    """Call the excepthook of a script, or of a child that the target has forked."""
    if not isinstance(error, SystemExit) and not (is_rank and job.target.kind == "function"):
        error.__traceback__ = _below_launcher(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)


def _report(fd: int, pipe: os.stat_result, record: dict[str, Any]) -> None:
    """Send the record, unless the target has closed our pipe and opened a file in its place."""
    try:
        if os.path.samestat(os.fstat(fd), pipe):
            pipe_records.send(fd, record)
    except OSError:
        pass  # the launcher learns the exit code from the fork server in any case


def exit_code(error: BaseException) -> int:
    """The exit code of a process that error ends; prints the text that sys.exit got instead."""
    if isinstance(error, SystemExit) and not isinstance(error.code, (int, type(None))):
        with contextlib.suppress(
            Exception
        ):  # nobody reads it, it is closed, or of the target's own
            print(_text_of(error), file=sys.stderr)
    return _code_of(error)


def _code_of(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        is_number = error.code is None or isinstance(error.code, int)
        return int(error.code or 0) & 0xFF if is_number else 1
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def describe(error: BaseException, info: LaunchInfo) -> dict[str, Any]:
    """The fields of a Failure that the failing rank itself knows; time_s: of its own clock."""
    return {
        "rank": info.rank,
        "local_rank": info.local_rank,
        "pid": os.getpid(),
        "time_s": time.monotonic(),
        "host": socket.gethostname(),
        "type": type(error).__name__,
        "message": _text_of(error),
        "traceback": own_traceback(error),
        "exit_code": _code_of(error),
        "blames": _blamed(error),
    }


def _blamed(error: BaseException) -> list[int]:
    """The ranks whose failure the error reports, or the one before it; -1: of an unknown one."""
    failures = getattr(error, "failures", None)
    failures = failures if isinstance(failures, (list, tuple)) else [None]  # a count of its own
    if hasattr(error, "peer") and len(failures) == 0:
        return [-1]
    reports = [*failures, error, error.__cause__ or error.__context__]
    ranks = [getattr(getattr(report, "peer", None), "rank", None) for report in reports]
    return [rank for rank in ranks if type(rank) is int]


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:  # which must not hide the error itself
        return f"<no message: its __str__ raised {type(broken).__name__}>"


def own_traceback(error: BaseException) -> str:
    """The traceback from the target's first line on, without the launcher's frames above it."""
    error.__traceback__ = _below_launcher(error.__traceback__)
    return "".join(traceback.format_exception(error))


def _below_launcher(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(
        LAUNCHER_FOLDER + os.sep
    ):
        frames = frames.tb_next
    return frames


def _forget_exit_handlers() -> None:
    """Drop the exit handlers of the program, as multiprocessing does in a forked child."""
    atexit._clear()
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        finalizer.atexit = False
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    vars(sys).pop("last_value", None)  # by which handlers know that an error ends the process
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()
        util._run_after_forkers()
        atexit.register(util._exit_function)


def end_process(code: int) -> None:
    """Run exit handlers as the interpreter would, and exit without unwinding or freeing."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
