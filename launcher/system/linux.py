"""What Linux offers and Python does not name: who dies with whom, who descends from whom."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37


def _prctl(option: int, value: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value!r}): {os.strerror(number)}")


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Be sent this signal when the thread that forked us ends.

    Call it first in a child forked from a main thread, or from one that waits for us.
    """
    _prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(number))
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def outlive_parent() -> None:
    """Take die_with back."""
    _prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(0))


def adopt_orphans(wanted: bool) -> bool:
    """Whether descendants without a parent become our children. Returns what it was before."""
    before = ctypes.c_int()
    _prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(wanted))
    return bool(before.value)


def name_process(name: str) -> None:
    """What ps and top show for this process; 15 bytes."""
    _prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()))


def line_buffer_c_stdout() -> None:
    """Let printf of C code reach the pipe at each line, so that a crash does not swallow it."""
    libc = ctypes.CDLL(None)
    line_buffered = 1  # _IOLBF of stdio.h on Linux
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, line_buffered, ctypes.c_size_t(0))


def open_missing_streams() -> None:
    """Where a standard stream is closed, let no pipe of ours take its number."""
    for expected in range(3):
        try:
            os.fstat(expected)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def out_of_memory_kills() -> int:
    """How many processes the kernel has killed since boot because memory ran out."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def wipe_variable(name: str) -> None:
    """Overwrite a variable's value where it lies, which is where /proc/PID/environ reads it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    address = getenv(name.encode())
    if address:
        ctypes.memset(address, ord("-"), len(ctypes.string_at(address)))


def threads_alive() -> int:
    """Operating-system threads of this process, those of libraries too."""
    return len(os.listdir("/proc/self/task"))


def holds_accelerator() -> bool:
    """Whether this process has opened an accelerator's memory: such a process must not fork."""
    links = (_link(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
    return any(link.startswith(("/dev/nvidia-uvm", "/dev/kfd")) for link in links)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on, proc(5)'s third; empty without a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot: with the pid, its identity; or 0."""
    fields = stat(pid)
    return int(fields[19]) if fields else 0


def session(pid: int) -> int:
    fields = stat(pid)
    return int(fields[3]) if fields else 0


def name_of(pid: int) -> str:
    """What name_process has set."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return ""


def descendants(ancestor: int, zombies: bool = False) -> set[int]:
    """Every process below ancestor; if asked for, also those that only wait to be reaped."""
    dead = "X" if zombies else "XZ"
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := stat(int(name))) and fields[0] not in dead:
            children.setdefault(int(fields[1]), []).append(int(name))
    found: set[int] = set()
    waiting = [ancestor]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting.extend(below)
    return found


def send_signal(pid: int, number: int) -> bool:
    """Signal a process, or the group -pid, that may be gone already. Whether it was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
