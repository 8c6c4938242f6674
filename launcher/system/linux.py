"""Linux calls that Python does not offer (prctl), and everything that is read from /proc."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from io import BufferedReader, FileIO
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37

WAIT_STATUS = 49  # the field of /proc/PID/stat, counted from the state

# Device files of GPUs (CUDA, ROCm, WSL, Intel), TPUs and other accelerators.
ACCELERATORS = (
    "nvidiactl", "kfd", "dxg", "dri/renderD*", "accel*", "vfio/[0-9]*", "davinci*", "neuron*",
)  # fmt: skip


def _prctl(option: int, value: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value!r}): {os.strerror(number)}")


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Receive this signal when the thread that forked this process ends.

    Call it first in a child forked from a main thread, or from one that waits for the child.
    """
    _prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(number))
    if os.getppid() != parent:  # it had died before the call above
        os.kill(os.getpid(), number)


def set_subreaper(enable: bool) -> bool:
    """Adopt descendants whose parent ends, or stop doing so; return the previous setting."""
    before = ctypes.c_int()
    _prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(enable))
    return bool(before.value)


class _Adopting:
    """The number of launches of this process, and the setting before the first of them."""

    def __init__(self) -> None:
        self.lock, self.num_launches, self.before = threading.Lock(), 0, False


_adopting_by_pid: dict[int, _Adopting] = {}  # a forked child has a setting of its own


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Adopt descendants whose parent ends, until the last of these contexts ends, on any thread."""
    launches = _adopting_by_pid.setdefault(os.getpid(), _Adopting())
    with launches.lock:
        if launches.num_launches == 0:
            launches.before = set_subreaper(True)
        launches.num_launches += 1
    try:
        yield
    finally:
        with launches.lock:
            launches.num_launches -= 1
            if launches.num_launches == 0:
                set_subreaper(launches.before)


class Inherited(Protocol):
    def close(self) -> object: ...


File = TypeVar("File", bound=Inherited)
_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def closed_in_children(file: File) -> File:
    """The file, which a forked child closes at once, and leaves that of the parent alone.

    A connection that it kept open would hide from the other end that the parent has died.
    """
    _begin_closing()
    _inherited.add(file)
    return file


def left_to_children(*files: Inherited) -> None:
    """Let forked children keep these files, which others use from now on."""
    for file in files:
        _inherited.discard(file)


def _close_inherited() -> None:
    for file in tuple(_inherited):
        with contextlib.suppress(OSError):
            file.close()


@functools.cache  # a process without such files forks as before
def _begin_closing() -> None:
    os.register_at_fork(after_in_child=_close_inherited)


def set_process_name(name: str) -> None:
    """Set the name that ps and top show for this process; 15 bytes."""
    _prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()))


def line_buffer_c_stdout() -> None:
    """Let printf of C code reach the pipe at each line, so that a crash does not swallow it."""
    libc = ctypes.CDLL(None)
    line_buffered = 1  # _IOLBF of stdio.h on Linux
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, line_buffered, ctypes.c_size_t(0))


def open_missing_streams() -> None:
    """Open /dev/null for closed standard streams, so that no pipe of ours takes their numbers."""
    for expected in range(3):
        try:
            os.fstat(expected)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def remove_variables(environ: MutableMapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Remove variables from environ; what they were. From that of this process, they go from the
    memory where /proc/PID/environ reads them, too."""
    removed = {name: environ[name] for name in names if name in environ}
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    for name in removed:
        if environ is os.environ and (address := getenv(name.encode())):
            ctypes.memset(address, ord("-"), len(ctypes.string_at(address)))
        del environ[name]
    return removed


def send_signal(pid: int, number: int) -> bool:
    """Signal a process, or the group -pid; False if there is none. Another user's lives on."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # as after sudo
        pass
    return True


def exists(pid: int) -> bool:
    """True if there is such a process, dead or alive, of any user."""
    return send_signal(pid, 0)


def shell_exit_code(status: int) -> int:
    """The exit code that a shell shows: 128 and the number where a signal (-number) killed it."""
    return status if status >= 0 else 128 - status


def open_now(path: str | os.PathLike[str]) -> BufferedReader:
    """A file to read; of a pipe to which nobody writes it has nothing, where open() would wait."""
    file = FileIO(os.fspath(path), opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
    os.set_blocking(file.fileno(), True)
    return BufferedReader(file)


def read(path: Path) -> str:
    """The text of a file; empty if it is not there, or no longer."""
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError):  # ValueError: a NUL in its name
        return ""


def read_proc(path: str) -> str:
    """The text of /proc/`path`; empty if it is not there, or no longer."""
    return read(Path("/proc", path))


def read_proc_link(path: str) -> str:
    """The target of the link /proc/`path`; empty if it is not there, or no longer."""
    try:
        return os.readlink(f"/proc/{path}")
    except OSError:
        return ""


def file_system(device: int, mounts: str = "") -> tuple[str, str]:
    """The kind and the source of the file system of this number; ("", "") if no mount shows it.

    mounts: the text of mountinfo, see proc_pid_mountinfo(5); that of this process if not given.
    """
    device_number = f"{os.major(device)}:{os.minor(device)}"
    for line in (mounts or read_proc("self/mountinfo")).splitlines():
        mount, _, description = line.partition(" - ")
        if mount.split()[2:3] == [device_number]:
            kind, source = (*description.split(), "", "")[:2]
            return kind, source
    return "", ""


def link_of_fd(fd: str | int) -> str:
    """The file behind a descriptor of this process; empty if it is closed."""
    return read_proc_link(f"self/fd/{fd}")


def open_fds() -> list[str]:
    """The numbers of this process's open descriptors, that of this look among them."""
    return os.listdir("/proc/self/fd")


def open_memory(pid: int, name: str) -> tuple[int, FileIO] | None:
    """A process's first descriptor of memory of this name, and that memory, for both to write.

    None if it has none, or belongs to another user.
    """
    try:
        for fd in sorted(map(int, os.listdir(f"/proc/{pid}/fd"))):
            if read_proc_link(f"{pid}/fd/{fd}").startswith(f"/memfd:{name}"):
                return fd, FileIO(f"/proc/{pid}/fd/{fd}", "r+")
    except OSError:
        pass
    return None


def free_pages(fd: int, begin: int, end: int) -> None:
    """Give the memory of whole pages between two offsets back; they read as zeros afterwards."""
    keep_size, punch_hole = 1, 2  # linux/falloc.h
    page = mmap.PAGESIZE
    begin, end = -(-begin // page) * page, end // page * page
    if begin < end:
        offsets = ctypes.c_longlong(begin), ctypes.c_longlong(end - begin)
        ctypes.CDLL(None).fallocate(fd, keep_size | punch_hole, *offsets)


def count_threads() -> int:
    """The operating-system threads of this process, those of libraries included."""
    return len(os.listdir("/proc/self/task"))


def wait_for_ending_threads(limit_s: float = 1.0) -> None:
    """Wait until every other thread of this process sleeps or has ended.

    A thread runs on for a moment after it was joined, and may hold locks of libraries meanwhile.
    """
    deadline = time.monotonic() + limit_s
    while _has_running_threads() and time.monotonic() < deadline:
        time.sleep(0.001)


def _has_running_threads() -> bool:
    others = set(os.listdir("/proc/self/task")) - {str(threading.get_native_id())}
    states = (read_proc(f"self/task/{thread}/stat").rpartition(")")[2][:2] for thread in others)
    return any(state not in ("", " S") for state in states)


def holds_accelerator() -> bool:
    """True if this process has opened an accelerator's memory: such a process must not fork."""
    links = map(link_of_fd, open_fds())
    return any(link.startswith(("/dev/nvidia-uvm", "/dev/kfd")) for link in links)


def has_accelerator() -> bool:
    """True if this node has the device file of a GPU or of another accelerator, of any vendor."""
    return any(any(Path("/dev").glob(pattern)) for pattern in ACCELERATORS)


def kernel_number(text: str) -> int:
    """A number as the kernel writes one; 0 for what is none, or has over 64 bits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else 0


def number_after(key: str, text: str) -> int:
    """The number in the line of text that begins with this word; 0 if there is none."""
    lines = [line.split() for line in text.splitlines()]
    return next((kernel_number(words[1]) for words in lines if words[:1] == [key] and words[1:]), 0)


def ephemeral_ports() -> range:
    """The ports that the kernel may give to outgoing connections."""
    limits = map(kernel_number, read_proc("sys/net/ipv4/ip_local_port_range").split())
    first, last = (*limits, 0, -1)[:2]
    return range(first, last + 1)


def clock_id() -> str:
    """The identity of this host's monotonic clock: the boot and the time namespace; or empty."""
    boot, namespace = boot_id(), read_proc_link("self/ns/time")
    return f"{boot} {namespace}" if boot and namespace else ""


def boot_id() -> str:
    """An id of this machine since its boot, the same in all of its containers; or empty."""
    return read_proc("sys/kernel/random/boot_id").strip()


class ProcessStat(NamedTuple):
    """Fields of proc_pid_stat(5). start_time: clock ticks since boot; with the pid, an identity.

    wait_status: of a zombie, as waitpid gives it; None where the kernel does not tell.
    """

    state: str
    parent: int
    session: int
    start_time: int
    wait_status: int | None

    @property
    def is_stopped(self) -> bool:
        """True if it is suspended by a signal (T) or a tracer (t)."""
        return self.state in ("T", "t")

    @property
    def is_alive(self) -> bool:
        return self.state not in ("Z", "X")


def process_stat(pid: int) -> ProcessStat | None:
    """The process's entry in /proc; None if there is none."""
    fields = read_proc(f"{pid}/stat").rpartition(")")[2].split()  # a name may hold spaces and ")"
    if len(fields) < 20:
        return None
    status = kernel_number(fields[WAIT_STATUS]) if len(fields) > WAIT_STATUS else None
    parent, session, start_time = (kernel_number(fields[place]) for place in (1, 3, 19))
    return ProcessStat(fields[0], parent, session, start_time, status)


def catches_signal(pid: int, number: int) -> bool:
    """True if the process has a handler for the signal (proc_pid_status(5), SigCgt)."""
    lines = (line.partition(":") for line in read_proc(f"{pid}/status").splitlines())
    caught = next((value.strip() for name, _, value in lines if name == "SigCgt"), "")
    is_mask = re.fullmatch("[0-9a-f]{1,32}", caught)
    return bool(is_mask and int(caught, 16) >> (number - 1) & 1)


def process_name(pid: int) -> str:
    """The name given by set_process_name; empty if there is no such process."""
    return read_proc(f"{pid}/comm").rstrip("\n")


def processes() -> dict[int, ProcessStat]:
    """Every process of this machine, by pid."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {pid: stat for pid in pids if (stat := process_stat(pid)) is not None}


def descendants(ancestor: int, zombies: bool = False) -> set[int]:
    """Every process below ancestor. zombies: also those that only wait to be reaped."""
    children: dict[int, list[int]] = {}
    for pid, stat in processes().items():
        if stat.state not in ("X" if zombies else "XZ"):
            children.setdefault(stat.parent, []).append(pid)
    below: set[int] = set()
    waiting = [ancestor]
    while waiting:
        next_level = children.get(waiting.pop(), [])
        below.update(next_level)
        waiting.extend(next_level)
    return below
