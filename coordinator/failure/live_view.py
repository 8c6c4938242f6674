"""The page that a rank shows to a viewer of the same user and host, only while it looks.

Each line is JSON in a page of the memory for stacks, which /proc opens to the same user alone. The
rank writes who it is. A viewer writes its request, and sends VIEW_SIGNAL: then a thread of the rank
counts its calls until the request has expired, and leaves nothing behind.
"""

from __future__ import annotations

import _thread
import functools
import json
import os
import signal
import threading
import time
from typing import Any

from coordinator.failure.stack_dump import NOTE_NBYTES, stack_memory
from launcher import LaunchInfo, LiveCalls

VIEW_SIGNAL = signal.SIGRTMAX - 2
INFO_PAGE, REQUEST_PAGE, COUNTS_PAGE = 1, 2, 3  # after the note
MAX_WATCH_S = 60.0  # for which one request holds at most
COUNT_S = 0.25  # between two publications of the counts


@functools.cache  # of a process, which a child that it forks is not
def live_calls(pid: int) -> LiveCalls:
    """The calls of this process that a viewer may see."""
    return LiveCalls()


def listen(info: LaunchInfo) -> None:
    """Show who this process is, and count its calls at VIEW_SIGNAL, unless that has another use.

    Of ranks that are threads of one process the last one shows, and none counts.
    """
    pid = os.getpid()
    write_line(stack_memory(pid)[0], INFO_PAGE, [pid, info.to_bytes().decode()])
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(VIEW_SIGNAL) is signal.SIG_DFL:
        signal.signal(VIEW_SIGNAL, _start)
        signal.siginterrupt(VIEW_SIGNAL, False)  # libraries of the program see no EINTR


def _start(*_: Any) -> None:
    """Count on a thread, started without a lock that what the signal interrupts may hold."""
    _thread.start_new_thread(_serve, (os.getpid(),))


def _serve(pid: int) -> None:
    fd, calls = stack_memory(pid)[0], live_calls(pid)
    if not calls.turn.acquire(blocking=False):
        return  # another thread does already
    try:
        while 0 < (request := _request(fd))[2] - time.monotonic() < MAX_WATCH_S:
            packed_info, folder, _ = request
            calls.watch(LaunchInfo.from_bytes(packed_info), folder)
            write_line(fd, COUNTS_PAGE, [time.monotonic(), calls.counts(), calls.pending()])
            time.sleep(COUNT_S)
    finally:
        calls.unwatch()
        calls.turn.release()


def _request(fd: int) -> tuple[bytes, str, float]:
    """The packed info of this rank, the folder for recordings or "", and when the viewer goes."""
    _, packed_info = read_line(fd, INFO_PAGE) or (0, "")
    folder, until, _ = read_line(fd, REQUEST_PAGE) or ("", 0.0, False)
    return packed_info.encode(), folder, until


def hosts_wanted_s(pid: int) -> float:
    """For how many seconds a viewer wants to see the ranks of other hosts through this process."""
    _, until, is_wanted = read_line(stack_memory(pid)[0], REQUEST_PAGE) or ("", 0.0, False)
    left_s = until - time.monotonic()
    return left_s if is_wanted and left_s < MAX_WATCH_S else 0.0


def write_line(fd: int, page: int, value: Any) -> None:
    """Write one line of JSON to its page; what does not fit is left out."""
    line = json.dumps(value).encode() + b"\n"
    if len(line) <= NOTE_NBYTES:
        os.pwrite(fd, line, page * NOTE_NBYTES)


def read_line(fd: int, page: int) -> Any:
    """The line of a page; None if there is none, or while it is being written."""
    try:
        return json.loads(os.pread(fd, NOTE_NBYTES, page * NOTE_NBYTES).partition(b"\n")[0])
    except ValueError:
        return None
