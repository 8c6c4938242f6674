"""One rank on this machine: a forked process takes its seat, runs the target, and tells its end."""

from __future__ import annotations

import atexit
import faulthandler
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from launcher import launch_context, target
from launcher.job import Job
from launcher.launch_info import CHOICE, LaunchInfo
from launcher.records import json_values, pipe_records
from launcher.system import linux, stop_signals
from launcher.trace import recorder

DUMP_SIGNAL = signal.SIGRTMAX  # the rank writes its stacks to its report at this one
# A rank that has just been forked would miss these, or die of one.
HELD_BACK = (*stop_signals.STOPPING, DUMP_SIGNAL)
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True)
class Seat:
    """What one rank needs. stdout, stderr, report: write ends of pipes to the launcher.

    cores: to be pinned to, if any.
    """

    info: LaunchInfo
    stdout: int
    stderr: int
    report: int
    cores: tuple[int, ...] = ()


def run(seat: Seat, job: Job, keeper: int, is_fresh: bool) -> None:
    """Become the rank, in a process that keeper has just forked. Never returns.

    is_fresh: the process was started for this launch, so leaving it by SystemExit runs only the
    target's own exit handlers; else those inherited from the program must not run here.
    """
    _take(seat, keeper)
    if not is_fresh:
        _forget_exit_handlers()
    code = _call(seat, job)
    if is_fresh:
        sys.exit(code)
    _leave(code)


def _take(seat: Seat, keeper: int) -> None:
    linux.die_with(keeper)
    linux.name_process(f"rank {seat.info.rank}")
    os.setsid()
    _reset_signals()
    _open_streams(seat)
    faulthandler.enable(file=seat.report)
    faulthandler.register(DUMP_SIGNAL, file=seat.report)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
    os.environ.pop(CHOICE, None)
    os.environ.update(seat.info.to_env())
    if seat.cores:
        os.sched_setaffinity(0, seat.cores)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _open_streams(seat: Seat) -> None:
    """Standard output and error into our pipes, line by line; standard input to rank 0 only."""
    for fd, number in ((seat.stdout, 1), (seat.stderr, 2)):
        os.dup2(fd, number)
        os.close(fd)
    if seat.info.rank != 0:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False))  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _text(1, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2, "backslashreplace")  # type: ignore[misc]
    linux.line_buffer_c_stdout()


def _text(fd: int, errors: str) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(fd, "wb", closefd=False))
    return io.TextIOWrapper(raw, errors=errors, line_buffering=True)


def _call(seat: Seat, job: Job) -> int:
    """The target's exit code, after reporting its result or how it failed."""
    pipe, pid = os.fstat(seat.report), os.getpid()
    try:
        with launch_context.rank_of(None), recorder.whole(seat.info, job.target.name):
            record: dict[str, Any] = {"result": json_values.dumps(target.call(job))}
        code = 0
    except BaseException as error:
        if os.getpid() != pid:
            raise  # a child that the target has forked, and not the rank
        code = exit_code(error)
        record = {"failure": describe(error)} if code else {"result": json_values.dumps(None)}
        _report(seat.report, pipe, record)
        _tell_hook(error, job)
    else:
        if os.getpid() == pid:
            _report(seat.report, pipe, record)
    return code


def _tell_hook(error: BaseException, job: Job) -> None:
    """Call the excepthook that a script has set; the default one's work is done by the launcher."""
    is_default = sys.excepthook is sys.__excepthook__
    if job.target.kind != "function" and not (is_default or isinstance(error, SystemExit)):
        sys.excepthook(type(error), error, _below_launcher(error.__traceback__))


def _report(fd: int, pipe: os.stat_result, record: dict[str, Any]) -> None:
    """Send the record, unless the target has closed our pipe and opened a file in its place."""
    try:
        if os.path.samestat(os.fstat(fd), pipe):
            pipe_records.send(fd, record)
    except OSError:
        pass  # the launcher learns the exit code from the keeper in any case


def exit_code(error: BaseException) -> int:
    """What the process ends with; prints what sys.exit was given instead of a number."""
    if isinstance(error, SystemExit) and not isinstance(error.code, (int, type(None))):
        print(_text_of(error), file=sys.stderr)
    return _code_of(error)


def _code_of(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        is_number = error.code is None or isinstance(error.code, int)
        return int(error.code or 0) & 0xFF if is_number else 1
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def describe(error: BaseException) -> dict[str, Any]:
    return {
        "time_s": time.monotonic(),
        "host": socket.gethostname(),
        "type": type(error).__name__,
        "message": _text_of(error),
        "traceback": own_traceback(error),
        "exit_code": _code_of(error),
    }


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:  # or nobody would hear of the error itself
        return f"<its message cannot be shown: {type(broken).__name__}>"


def own_traceback(error: BaseException) -> str:
    """The traceback from the target's first line on, without the launcher's frames above it."""
    error.__traceback__ = _below_launcher(error.__traceback__)
    return "".join(traceback.format_exception(error))


def _below_launcher(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(HERE + os.sep):
        frames = frames.tb_next
    return frames


def _forget_exit_handlers() -> None:
    """As the standard library's multiprocessing does in a forked child."""
    atexit._clear()
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()
        util._run_after_forkers()
        atexit.register(util._exit_function)


def _leave(code: int) -> None:
    """End as the interpreter would, without unwinding the program that we were forked from."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
