"""Stack dumps: ranks of this node write their Python stacks to their standard error, or to memory
that the others of the node read."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import linecache
import mmap
import os
import re
import signal
import struct
import time
from collections.abc import Iterable
from traceback import FrameSummary
from typing import NamedTuple

from coordinator.peers import Peer
from launcher import linux

SIGNAL = signal.SIGUSR1
PROBE_SIGNAL = signal.SIGRTMAX - 1  # the launcher's is SIGRTMAX
STDERR = 2
NAME = "drumline-stacks"
NOTE_NBYTES = mmap.PAGESIZE
HEADER_NBYTES = 4 * NOTE_NBYTES  # of the memory, before the dumps: the note, and lines of live_view
NOTE = struct.Struct("=qq")
POLL_S = 0.005
QUIET_S = 0.25  # so long nothing more comes after a dump that does not show its end
ENDS = (b" in <module>\n", b"  ...\n")  # of a dump: the outermost frame, or too many frames
# The stack of the main thread alone, which gets the signal: of threads that run meanwhile,
# faulthandler reads frames that may be gone, which has ended ranks with SIGSEGV.
ALL_THREADS = False
HEAD = "Stack (most recent call first):"  # of a dump
FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')


class CallNote(NamedTuple):
    """The note of a process on its call, beside its stacks.

    peer: rank of the launch of its last message, -1 without one. is_in_allreduce: of a library,
    which the stack does not show, since no Python function of ours is in between.
    """

    peer: int = -1
    is_in_allreduce: int = 0


def listen() -> None:
    """Let SIGUSR1 show this process's stacks, unless the program has a use for it."""
    if signal.getsignal(SIGNAL) is signal.SIG_DFL and not linux.catches_signal(os.getpid(), SIGNAL):
        faulthandler.register(SIGNAL, file=STDERR, all_threads=ALL_THREADS)


def ask(peers: Iterable[Peer]) -> list[Peer]:
    """Have processes of this host show their stacks; those that will."""
    by_pid = {}
    for peer in peers:
        # Without a handler the signal would end it.
        if peer.is_visible and not peer.is_known_dead() and linux.catches_signal(peer.pid, SIGNAL):
            by_pid[peer.pid] = peer
    for pid in by_pid:
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            _signal_main_thread(pid, SIGNAL)
    return list(by_pid.values())


@functools.cache  # of a process, which a child that it forks is not
def stack_memory(pid: int) -> tuple[int, memoryview]:
    """The descriptor of memory to which this process dumps its stacks at PROBE_SIGNAL.

    And the fields of the CallNote in it, which others read with the stacks.
    """
    fd = os.memfd_create(NAME)
    os.ftruncate(fd, HEADER_NBYTES)
    os.lseek(fd, HEADER_NBYTES, os.SEEK_SET)
    is_inherited = stack_memory.cache_info().currsize > 0  # the handler, from who forked this one
    if is_inherited or not linux.catches_signal(pid, PROBE_SIGNAL):
        faulthandler.register(PROBE_SIGNAL, file=fd, all_threads=ALL_THREADS)
    note = memoryview(mmap.mmap(fd, NOTE_NBYTES)).cast("q")
    note[0] = CallNote().peer
    return fd, note


def read(peer: Peer, wait_s: float) -> tuple[CallNote, str]:
    """The note of a process of this host, and a dump of its stacks; "" if it has none."""
    path = f"/proc/{peer.pid}/fd/{peer.stack_fd}"
    try:
        if not peer.is_visible or NAME not in os.readlink(path):
            return CallNote(), ""
        with open(path, "rb", buffering=0) as file:
            note = CallNote(*NOTE.unpack(os.pread(file.fileno(), NOTE.size, 0)))
            return note, _dump(peer.pid, file.fileno(), time.monotonic() + wait_s)
    except OSError:
        return CallNote(), ""


def _dump(pid: int, fd: int, deadline: float) -> str:
    """The text that the process writes at the signal, until it writes no more."""
    begin = os.fstat(fd).st_size
    stat = linux.process_stat(pid)
    if stat is None or stat.is_stopped or not linux.catches_signal(pid, PROBE_SIGNAL):
        return ""
    _signal_main_thread(pid, PROBE_SIGNAL)
    text, grown_at = b"", time.monotonic()
    while (now := time.monotonic()) < deadline and not text.endswith(ENDS):
        time.sleep(POLL_S)
        before, text = text, os.pread(fd, os.fstat(fd).st_size - begin, begin)
        if len(text) > len(before):
            grown_at = now
        elif text and now - grown_at > QUIET_S:
            break
    return text.decode(errors="replace")


def parse(text: str) -> list[FrameSummary]:
    """The stack in the last of several dumps, the innermost frame first."""
    _, _, last = text.rpartition(HEAD)
    return [
        FrameSummary(name, int(line), function, line=linecache.getline(name, int(line)).strip())
        for name, line, function in FRAME.findall(last)
    ]


def _signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the thread whose number is the process's: kill(2) leaves that to the kernel.

    Raises OSError, as os.kill.
    """
    if ctypes.CDLL(None, use_errno=True).tgkill(pid, pid, number):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
