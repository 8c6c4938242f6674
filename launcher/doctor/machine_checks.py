"""Software, memory, limits and leftovers of this machine."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launcher import ports
from launcher.doctor.finding import Finding, installed_version
from launcher.system import free_memory, linux

REQUIRED = ("torch", "msgpack", "filelock")
OPTIONAL = ("transformers", "safetensors", "accelerate")
FOLDERS = ("drumline-launch-*", "drumline-trace-*")  # the next part is the pid of the launcher
SHARED_MIB = 256  # NCCL and torch's data loaders take theirs from /dev/shm
MEMORY_MIB = 1024
OPEN_FILES, PROCESSES = 1024, 512


def software() -> Iterator[Finding]:
    """Versions, and the system calls that launches need."""
    cores = len(os.sched_getaffinity(0))
    yield Finding("software", "python", True, f"{platform.python_version()}, {sys.executable}")
    yield Finding("software", "kernel", True, f"Linux {platform.release()}, {cores} cores usable")
    versions, missing = _versions(REQUIRED)
    remedy = f"pip install {' '.join(missing)}" if missing else ""
    yield Finding("software", "packages", not missing, versions, remedy)
    versions, missing = _versions(OPTIONAL)
    yield Finding("software", "for inference", None if missing else True, versions)
    yield _system_calls()


def _versions(distributions: tuple[str, ...]) -> tuple[str, list[str]]:
    """(The versions as text, the missing distributions)."""
    versions = {name: installed_version(name) for name in distributions}
    text = ", ".join(f"{name} {version or 'is missing'}" for name, version in versions.items())
    return text, [name for name, version in versions.items() if not version]


def _system_calls() -> Finding:
    """The system calls that old kernels lack, and strict containers forbid."""
    remedy = "docker run --security-opt seccomp=unconfined (outside containers: Linux 5.3 or newer)"
    try:
        os.close(os.memfd_create("doctor"))
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding("software", "system calls", False, f"refused: {error.strerror}", remedy)
    return Finding("software", "system calls", True, "memfd_create and pidfd_open work")


def ports_free() -> Iterator[Finding]:
    """True if a launch can listen on a port of loopback."""
    listener = ports.listen(f"doctor-{os.getpid()}")
    with listener:
        span = f"launches take one of {ports.FIRST_PORT} to {ports.END_PORT - 1}, by launch_id"
        yield Finding("network", "port", True, f"{listener.getsockname()[1]} is free; {span}")


def memory() -> Iterator[Finding]:
    """Memory that is available, of which our shared memory is part, and /dev/shm, for others'."""
    free = free_memory.free_memory_nbytes() >> 20
    is_low = free < MEMORY_MIB
    show_largest = (
        "ps -eo rss,pid,args --sort=-rss | head (the largest; in a container: docker run --memory)"
    )
    detail = f"{free} MiB available; our shared memory is part of it"
    yield Finding("memory", "available", not is_low, detail, show_largest if is_low else "")
    space = os.statvfs("/dev/shm")
    free = (space.f_bavail * space.f_frsize) >> 20
    is_low = free < SHARED_MIB
    remount = "mount -o remount,size=1G /dev/shm (in a container: docker run --shm-size=1g)"
    detail = f"{free} MiB free; NCCL and data loaders need {SHARED_MIB}"
    yield Finding("memory", "/dev/shm", not is_low, detail, remount if is_low else "")


def limits() -> Iterator[Finding]:
    """The limits of ulimit that ranks reach."""
    note = "; rank 0 needs one for each rank"
    yield _limit("open files", resource.RLIMIT_NOFILE, "-n", "nofile", OPEN_FILES, note)
    yield _limit("processes", resource.RLIMIT_NPROC, "-u", "nproc", PROCESSES)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked >> 10} KiB"
    yield Finding("limits", "locked memory", None, f"{text}; RDMA needs `ulimit -l unlimited`")


def _limit(name: str, number: int, flag: str, long: str, needed: int, note: str = "") -> Finding:
    soft, hard = resource.getrlimit(number)
    if soft == resource.RLIM_INFINITY:
        return Finding("limits", name, True, "unlimited")
    if soft >= needed:
        return Finding("limits", name, True, f"{soft}{note}")
    reachable = hard == resource.RLIM_INFINITY or hard >= needed
    remedy = f"ulimit {flag} {needed}" if reachable else f"sudo prlimit --pid $$ --{long}={needed}"
    return Finding("limits", name, False, f"{soft}; {needed} needed", remedy)


def leftovers() -> Iterator[Finding]:
    """Folders of launches that have ended, and processes that have outlived their launcher."""
    temporary = Path(tempfile.gettempdir())
    stale = [path for pattern in FOLDERS for path in temporary.glob(pattern) if _is_stale(path)]
    remedy = f"rm -r {shlex.join(map(str, stale))}" if stale else ""
    detail = f"{len(stale)} of dead launches"
    detail += f" (or of another container, if one shares {temporary})" * bool(stale)
    yield Finding("leftovers", "folders", not stale, detail, remedy)
    orphans = [
        pid
        for pid, stat in linux.processes().items()
        if stat.parent == 1 and linux.process_name(pid).startswith("launch-")
        if _is_own(Path("/proc", str(pid))) and not _is_launcher(1)  # as it may be in a container
    ]
    remedy = f"kill {' '.join(map(str, orphans))}" if orphans else ""
    detail = f"{len(orphans)} that have outlived their launcher"
    yield Finding("leftovers", "processes", not orphans, detail, remedy)


def _is_launcher(pid: int) -> bool:
    command = linux.read_proc(f"{pid}/cmdline")
    return any(word in command for word in ("launcher", "drumline"))


def _is_stale(folder: Path) -> bool:
    """True if it is this user's, and the launcher whose pid is in its name has ended."""
    pid = folder.name.split("-")[2]
    return _is_own(folder) and not (pid.isdecimal() and linux.process_stat(int(pid)))


def _is_own(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:  # removed meanwhile
        return False
