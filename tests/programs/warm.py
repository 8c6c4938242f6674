"""Processes that have torch, transformers and the package imported already: forked, not started.

A fresh interpreter takes seconds of CPU for these imports, and a test of what happens among
processes needs several of them. Run as a program, this file is the parent that forks them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

from launcher import target
from launcher.job import Job, Target
from launcher.system import linux

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
COMMAND = Path(__file__).with_name("warm_command.py")
IMPORTS = (
    "torch",
    "accelerate",
    "transformers.models.llama.modeling_llama",
    "transformers.generation.utils",
    "drumline",
    "drumline.cli.generate",
)
UNDER_TEST = ("launcher", "coordinator", "communicator", "drumline")
REQUEST_BYTES = 1 << 17
HOST = "/proc/self/ns/net"
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000  # of sched.h
WARM = "warm parent"  # the name of the plugin of pytest that is one


class WarmProcess:
    """What tests use of subprocess.Popen, for a process that the warm parent has forked."""

    def __init__(self, pid: int, out: int, err: int, ended: int) -> None:
        self.pid, self.returncode, self._ended = pid, None, ended
        self.stdout, self.stderr = open(out), open(err)  # noqa: SIM115
        self._said = {self.stdout: b"", self.stderr: b""}
        self._open = list(self._said)

    def communicate(self, timeout: float = 1e6) -> tuple[str, ...]:
        """All that it has written, once it has ended."""
        deadline = time.monotonic() + timeout
        while self._open:
            for stream in self._ready(self._open, deadline - time.monotonic()):
                data = os.read(stream.fileno(), 1 << 16)
                self._said[stream] += data
                if not data:
                    self._open.remove(stream)
                    stream.close()
        self.wait(deadline - time.monotonic())
        return tuple(said.decode() for said in self._said.values())

    def wait(self, timeout: float = 1e6) -> int:
        if self.returncode is None:
            self._ready([self._ended], timeout)
            self.returncode = int(os.read(self._ended, 16))
            os.close(self._ended)
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ready(self, streams: list, timeout: float) -> list:
        ready, _, _ = select.select(streams, [], [], max(0.0, timeout))
        if not ready:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return ready


class WarmParent:
    """Starts processes like `python *arguments`; they end when it is closed, or killed.

    forked: from this process, which has called prepare(), rather than as a program.
    """

    def __init__(self, forked: bool = False) -> None:
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._pid = self._forked(theirs) if forked else self._started(theirs)

    def _started(self, theirs: socket.socket) -> int:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        process.returncode = 0  # awaited in close()
        return process.pid

    def _forked(self, theirs: socket.socket) -> int:
        parent, pid = os.getpid(), os.fork()
        if pid:
            return pid
        self._door.close()
        linux.die_with(parent)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        run(serve(theirs))
        sys.exit()

    def start(self, *arguments: object, env: dict[str, str], cwd: object = ".") -> WarmProcess:
        """arguments: of python; a script, or -m and a module, and its own arguments."""
        request = {"argv": [*map(str, arguments)], "env": env, "cwd": os.path.abspath(str(cwd))}
        pipes = [os.pipe() for _ in range(3)]
        theirs = [writing for _, writing in pipes]
        socket.send_fds(self._door, [json.dumps(request).encode()], theirs)
        for writing in theirs:
            os.close(writing)
        return WarmProcess(int(self._door.recv(16)), *(reading for reading, _ in pipes))

    def run(
        self, *arguments: object, env: dict[str, str] | None = None, timeout: float = 100
    ) -> subprocess.CompletedProcess[str]:
        """`python *arguments` in the folder of the source, from its start to its end."""
        environ = {**os.environ, "PYTHONPATH": PYTHONPATH, **(env or {})}
        process = self.start(*arguments, env=environ, cwd=ROOT)
        try:
            out, err = process.communicate(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def commands(self, folder: Path) -> dict[str, str]:
        """With these variables, commands by name are forked from the warm parent.

        folder: where these commands are put. torchrun starts its ranks by PYTHON_EXEC.
        """
        for name in ("python", "drumline", "torchrun"):
            (folder / name).symlink_to(COMMAND)
        self.run("-c", "")  # it may still be importing
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        return {
            "PATH": path,
            "PYTHON_EXEC": str(folder / "python"),
            "WARM_PARENT": _address(self._pid),
            "COLD_PYTHON": sys.executable,
        }

    def close(self) -> None:
        self._door.close()
        os.waitpid(self._pid, 0)
        Path(_address(self._pid)).unlink(missing_ok=True)


def _address(pid: int) -> str:
    """Of a socket that has a path: other hosts, which are network namespaces, see it too."""
    return f"{tempfile.gettempdir()}/warm-parent-{pid}"


def prepare() -> None:
    """Import what tests need, with no thread of OpenBLAS: what has threads must not fork."""
    environ, before, shared = dict(os.environ), {*sys.modules}, []
    atexit.register(keep, shared)  # before the handlers of all others, so it runs after them
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in IMPORTS:
        importlib.import_module(name)
    drumline = sys.modules["drumline"]
    for name in drumline.__all__:  # each imports its module when it is first used
        getattr(drumline, name)
    os.environ.clear()
    os.environ.update(environ)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
    shared += [name for name in {*sys.modules} - before if name.partition(".")[0] not in UNDER_TEST]
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False  # of torch's tables of operators
    libc = ctypes.CDLL(None)
    for end in (libc._exit, libc.fcloseall):  # the last of them comes first
        libc.on_exit(end, None)
    gc.collect()
    gc.freeze()  # what is never collected is never written to, so its pages stay shared


def keep(shared: list[str]) -> None:
    """Have the end of Python free what a process has made, and not the modules that it shares.

    To take torch and transformers apart would write to most pages that processes share, which is
    ten times the work of a process that does little. prepare() leaves out the end of their
    libraries, too; libraries that a process has loaded itself end as ever.
    """
    modules = [sys.modules.pop(name, None) for name in shared]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))


def serve(door: socket.socket) -> list[str]:
    """Fork a process for each request, and say how each ended. Returns its argv in each of them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent, ended = os.getpid(), {}
    commands = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    commands.bind(_address(parent))
    commands.listen()
    woken, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([door, commands, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            tell(ended)
        if door not in ready and commands not in ready:
            continue
        asking = door if door in ready else commands.accept()[0]
        request, fds, _, _ = socket.recv_fds(asking, REQUEST_BYTES, 4)
        if not request:
            sys.exit()  # and those that are left die with it
        out, err, end, *command = fds
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for fd in (*ended.values(), end, woken, waking):
                os.close(fd)
            for listening in (door, commands, asking):
                listening.close()
            return become(parent, json.loads(request), out, err, command)
        ended[pid] = end
        for fd in (out, err, *command):
            os.close(fd)
        asking.send(str(pid).encode())
        if asking is not door:
            asking.close()


def tell(ended: dict[int, int]) -> None:
    """Write the exit status of those that have ended into the pipe of each."""
    while ended:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        os.write(ended[pid], str(os.waitstatus_to_exitcode(status)).encode())
        os.close(ended.pop(pid))


def become(parent: int, request: dict, out: int, err: int, command: list[int]) -> list[str]:
    """In a process just forked: all that Popen and a fresh interpreter would have set up.

    command: a pidfd of the command that asked for this process, if one did: it is on its host.
    """
    linux.die_with(parent)
    for pidfd in command:
        if request["host"] != os.readlink(HOST):
            namespaces = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWNET
            assert ctypes.CDLL(None).setns(pidfd, namespaces) == 0, "the host cannot be entered"
        os.close(pidfd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd, number in ((out, 1), (err, 2)):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # it is TMPDIR's again
    return request["argv"]


def run(argv: list[str]) -> None:
    """Do what python does with these arguments.

    The main module stays, as python's does: torch's threads want the interpreter that would wait
    for their end while it frees a script's process group, and end by themselves once all ends.
    """
    argv = argv[argv[0] == "-u" :]  # as torchrun starts its ranks
    sys.path[0] = os.getcwd()
    if argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        exec(compile(argv[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    elif argv[0] == "-m":
        target.call(Job(Target("module", argv[1]), (*argv[2:],)))
    else:
        target.call(Job(Target("script", argv[0]), (*argv[1:],)))


if __name__ == "__main__":
    prepare()
    run(serve(socket.socket(fileno=int(sys.argv[1]))))
