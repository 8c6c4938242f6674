"""Ranks as processes, forked from the test: each gets a LaunchInfo, and may be killed."""

import contextlib
import faulthandler
import json
import os
import select
import signal
import socket
import threading
import time
import traceback
import uuid
from dataclasses import dataclass, field

import pytest

from coordinator import Coordinator
from launcher import LaunchInfo
from launcher.system import linux

LIMIT_S = 40.0
DUMP_S = 30.0  # of what hangs. A rank that runs must not be looked at: that may end it by SIGSEGV


@dataclass
class Outcome:
    """How a rank ended: what it returned, or the error it raised, and when (time.time())."""

    value: object = None
    error: str = ""
    text: str = ""
    at: float = 0.0
    status: int = 0


@dataclass
class Ranks:
    """Forked processes that run fn(info) each."""

    pids: list[int] = field(default_factory=list)
    pipes: list[int] = field(default_factory=list)

    def outcomes(self, limit_s=LIMIT_S, stragglers=()):
        """Every rank's Outcome. Stragglers are killed once all others have ended."""
        results = [Outcome() for _ in self.pids]
        texts = [b"" for _ in self.pids]
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in stragglers}
        deadline = time.monotonic() + limit_s
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], deadline - time.monotonic())
            assert ready, f"ranks {sorted(waiting.values())} hang"
            for pipe in ready:
                data = os.read(pipe, 1 << 16)
                texts[waiting[pipe]] += data
                if not data:
                    del waiting[pipe]
        self.kill()
        for rank, pid in enumerate(self.pids):
            if texts[rank]:
                results[rank] = Outcome(**json.loads(texts[rank]))
            results[rank].status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.pids.clear()
        return results

    def kill(self):
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self):
        self.kill()
        for pid in self.pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for pipe in self.pipes:
            os.close(pipe)


def secret():
    fd = os.memfd_create("launch-secret")
    os.write(fd, os.urandom(32))
    return fd


def infos(nprocs, nodes, listener, secret_fd):
    places = [(local, size) for size in nodes or [nprocs] for local in range(size)]
    launch_id, port = uuid.uuid4().hex, listener.getsockname()[1]
    addr = listener.getsockname()[0]
    for rank, (local, size) in enumerate(places):
        extras = {"secret_fd": str(secret_fd)}
        if rank == 0:
            extras["master_fd"] = str(listener.fileno())
        yield LaunchInfo(launch_id, nprocs, size, rank, local, addr, port, extras)


def _child(fn, info, pipe):
    signal.alarm(int(LIMIT_S))
    faulthandler.dump_traceback_later(DUMP_S)
    threading.excepthook = threading.__excepthook__  # and not pytest's, which nobody reads here
    outcome = {}
    try:
        outcome["value"] = fn(info)
    except BaseException as error:
        outcome["error"], outcome["text"] = type(error).__name__, str(error)
        if os.environ.get("SHOW"):
            traceback.print_exc()
    outcome["at"] = time.time()
    os.write(pipe, json.dumps(outcome).encode())


def start(fn, nprocs, nodes=None):
    """Fork ranks that run fn(info)."""
    linux.wait_for_ending_threads()
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    secret_fd = secret()
    ranks = Ranks()
    for info in infos(nprocs, nodes, listener, secret_fd):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _child(fn, info, writing)
            finally:
                os._exit(0)
        os.close(writing)
        ranks.pids.append(pid)
        ranks.pipes.append(reading)
    listener.close()
    os.close(secret_fd)
    return ranks


@pytest.fixture
def fork():
    """Call fork(fn, n, nodes): n processes that run fn(info); see Ranks. Values must be JSON."""
    started = []

    def run(fn, nprocs, nodes=None):
        started.append(start(fn, nprocs, nodes))
        return started[-1]

    yield run
    for ranks in started:
        ranks.close()


@pytest.fixture
def coordinated(fork):
    """Call coordinated(fn, n, nodes): fn(coor) on each rank; their Outcomes."""

    def run(fn, nprocs, nodes=None, timeout_s=20, **options):
        def body(info):
            with Coordinator(info, timeout_s=timeout_s) as coor:
                return fn(coor)

        return fork(body, nprocs, nodes).outcomes(**options)

    return run
