"""This machine, as far as the standard library sees it: software, memory, limits, leftovers."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from launcher import ports
from launcher.doctor.finding import Finding, unless

NEEDED, USED = ("torch", "msgpack", "filelock", "safetensors"), ("transformers", "accelerate")
LEFT_BY_US = ("drumline-launch-*", "drumline-trace-*")  # then the pid of whoever made the folder
SHARED_MIB = 256  # NCCL and torch's data loaders take theirs from /dev/shm
MEMORY_MIB = 1024
OPEN_FILES, PROCESSES = 1024, 512


def software() -> Iterator[Finding]:
    """Versions, and whether the kernel has what starting and watching ranks needs."""
    cores = len(os.sched_getaffinity(0))
    yield Finding("software", "python", True, f"{platform.python_version()}, {sys.executable}")
    yield Finding("software", "kernel", True, f"Linux {platform.release()}, {cores} cores usable")
    found, missing = _versions(NEEDED)
    remedy = unless(bool(missing), f"pip install {' '.join(missing)}")
    yield Finding("software", "packages", not missing, found, remedy)
    yield Finding("software", "for inference", _versions(USED)[1] == [] or None, _versions(USED)[0])
    yield _system_calls()


def _versions(distributions: tuple[str, ...]) -> tuple[str, list[str]]:
    """In words, and which of them are missing."""
    found = {name: _version(name) for name in distributions}
    told = ", ".join(f"{name} {version or 'is missing'}" for name, version in found.items())
    return told, [name for name, version in found.items() if not version]


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _system_calls() -> Finding:
    """What old kernels do not have, and strict containers forbid."""
    remedy = "docker run --security-opt seccomp=unconfined (outside containers: Linux 5.3 or newer)"
    try:
        os.close(os.memfd_create("doctor"))
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding("software", "system calls", False, f"refused: {error.strerror}", remedy)
    return Finding("software", "system calls", True, "memfd_create and pidfd_open work")


def ports_free() -> Iterator[Finding]:
    """Can a launch have a port? It is tried, on loopback."""
    listener = ports.listen(f"doctor-{os.getpid()}")
    with listener:
        span = f"launches take one of {ports.FIRST_PORT} to {ports.END_PORT - 1}, by launch_id"
        yield Finding("network", "port", True, f"{listener.getsockname()[1]} is free; {span}")


def memory() -> Iterator[Finding]:
    """Shared memory: ours counts as memory of the container, others' comes from /dev/shm."""
    free = _available_mib()
    more = (
        "ps -eo rss,pid,args --sort=-rss | head (the largest; in a container: docker run --memory)"
    )
    found = f"{free} MiB can be had; shared memory of ours is part of it"
    yield Finding("memory", "available", free >= MEMORY_MIB, found, unless(free < MEMORY_MIB, more))
    space = os.statvfs("/dev/shm")
    free = (space.f_bavail * space.f_frsize) >> 20
    more = "mount -o remount,size=1G /dev/shm (in a container: docker run --shm-size=1g)"
    found = f"{free} MiB free; NCCL and data loaders want {SHARED_MIB}"
    yield Finding("memory", "/dev/shm", free >= SHARED_MIB, found, unless(free < SHARED_MIB, more))


def _available_mib() -> int:
    """What the machine can still give, or what the container may still take, if that is less."""
    _, _, rest = Path("/proc/meminfo").read_text().partition("MemAvailable:")
    machine = int(rest.split()[0]) >> 10
    group = Path("/sys/fs/cgroup")
    try:
        most, now = [(group / name).read_text() for name in ("memory.max", "memory.current")]
        return min(machine, (int(most) - int(now)) >> 20)
    except (OSError, ValueError):  # not in a container, or one without a limit ("max")
        return machine


def limits() -> Iterator[Finding]:
    """Those of ulimit that ranks run into."""
    more = "; rank 0 needs one for each rank"
    yield _limit("open files", resource.RLIMIT_NOFILE, "-n", "nofile", OPEN_FILES, more)
    yield _limit("processes", resource.RLIMIT_NPROC, "-u", "nproc", PROCESSES)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked >> 10} KiB"
    yield Finding("limits", "locked memory", None, f"{text}; RDMA wants `ulimit -l unlimited`")


def _limit(name: str, number: int, flag: str, long: str, wanted: int, more: str = "") -> Finding:
    soft, hard = resource.getrlimit(number)
    if soft == resource.RLIM_INFINITY:
        return Finding("limits", name, True, "unlimited")
    if soft >= wanted:
        return Finding("limits", name, True, f"{soft}{more}")
    reachable = hard == resource.RLIM_INFINITY or hard >= wanted
    remedy = f"ulimit {flag} {wanted}" if reachable else f"sudo prlimit --pid $$ --{long}={wanted}"
    return Finding("limits", name, False, f"{soft}; {wanted} wanted", remedy)


def left_behind() -> Iterator[Finding]:
    """Folders of launches that are dead, and processes that have outlived theirs."""
    folder = Path(tempfile.gettempdir())
    every = [path for pattern in LEFT_BY_US for path in folder.glob(pattern)]
    stale = [path for path in every if _is_mine(path) and not _maker_lives(path)]
    remedy = unless(bool(stale), f"rm -r {shlex.join(map(str, stale))}")
    yield Finding("leftovers", "folders", not stale, f"{len(stale)} of dead launches", remedy)
    orphans = list(_orphans())
    remedy = unless(bool(orphans), f"kill {' '.join(map(str, orphans))}")
    found = f"{len(orphans)} that have outlived their launcher"
    yield Finding("leftovers", "processes", not orphans, found, remedy)


def _is_mine(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:  # gone meanwhile
        return False


def _maker_lives(path: Path) -> bool:
    """Does the process live whose pid is in the folder's name?"""
    pid = path.name.split("-")[2]
    return pid.isdigit() and Path("/proc", pid).exists()


def _orphans() -> Iterator[int]:
    """Processes of this user that a launcher started, and that have init for a parent now."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "comm").read_text()
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:  # ended meanwhile
            continue
        if name.startswith("launch-") and parent == "1" and _is_mine(folder):
            yield int(folder.name)
