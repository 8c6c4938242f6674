"""Several ranks on one GPU: processes that NCCL takes for hosts, each running a case of ranks."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from communicator.backends.nccl import nccl_library
from launcher import LaunchInfo

ROOT = Path(__file__).parents[2]
FIRST_WITH_SHARED_GPUS = 23003
RESULT = "RESULT "
STACK_S = 0.5  # more than a rank takes to show its stack
AFTER_FAILURE_S = 25.0  # longer than survivors of a killed rank take to notice

# Another device in its place (stand_in.py), where there is none: GPU_STAND_IN=cpu.
GPU = torch.device(os.environ.get("GPU_STAND_IN", "cuda:0"))
NEEDS_GPU = "needs a machine with an NVIDIA GPU and a CUDA build of torch; run `make gpu` there"
# Longer than any case takes but those that name a limit, and shorter than pytest lets a test take,
# so that the output of ranks that hang is shown.
CASE_S = 60.0 if GPU.type == "cuda" else 240.0
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_GPU)
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler, as torch does"
)
needs_gpu_or_stand_in = pytest.mark.skipif(
    GPU.type == "cuda" and not torch.cuda.is_available(), reason=NEEDS_GPU
)
needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs a machine with two GPUs joined by NVLink or PCIe"
)


def nccl_environment(launch_id: str, rank: int) -> dict[str, str]:
    """What lets this rank share the GPU: NCCL before 2.30 must take it for a host of its own, and
    torch's symmetric memory must be told.

    A step between ranks then goes over loopback and costs a time slice of the GPU, about 2 ms.
    """
    quiet = {
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_NET_PLUGIN": "none",
        "NCCL_RAS_ENABLE": "0",
        "NCCL_MAX_NCHANNELS": "2",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }
    if GPU.type == "cpu":
        return {}
    if nccl_library.find().version >= FIRST_WITH_SHARED_GPUS:
        return quiet | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return quiet | {"NCCL_HOSTID": f"{launch_id}-rank{rank}"}


@dataclass
class Rank:
    process: subprocess.Popen[bytes]
    output: IO[str]  # a file, which unlike a pipe takes whatever NCCL_DEBUG=INFO says

    def end(self) -> tuple[int, str]:
        """Exit code and output; a rank that still runs shows its stack, and is killed."""
        late = self.process.poll() is None
        if late:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(STACK_S)
            self.process.kill()
        code = self.process.wait()
        self.output.seek(0)
        with self.output:
            return code, self.output.read() + ("\nkilled: it did not end in time" if late else "")


def start(case: str, nprocs: int, *arguments: str) -> list[Rank]:
    """The ranks, started; nobody watches them, so a test may kill one."""
    launch_id = uuid.uuid4().hex
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        return [
            _start(rank, launch_id, nprocs, listener, [case, *arguments]) for rank in range(nprocs)
        ]


def _start(
    rank: int, launch_id: str, nprocs: int, listener: socket.socket, command: list[str]
) -> Rank:
    fd, port = listener.fileno(), listener.getsockname()[1]
    extras = {"master_fd": str(fd)} if rank == 0 else {}
    info = LaunchInfo(launch_id, nprocs, nprocs, rank, rank, "127.0.0.1", port, extras)
    output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - Rank.end() closes it
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.ranks", *command],
        env=os.environ | info.to_env() | nccl_environment(launch_id, rank),
        pass_fds=[fd] if rank == 0 else [],
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
    )
    return Rank(process, output)


def finish(started: list[Rank], timeout_s: float = CASE_S) -> list[tuple[int, str]]:
    """Exit code and output of every rank; those that do not end in time are killed, and soon if
    another has failed."""
    deadline = time.monotonic() + timeout_s
    failed = False
    while (left := deadline - time.monotonic()) > 0:
        codes = [rank.process.poll() for rank in started]
        if None not in codes:
            break
        if not failed and any(codes):
            failed, deadline = True, time.monotonic() + min(left, AFTER_FAILURE_S)
        time.sleep(0.02)
    return [rank.end() for rank in started]


def run(case: str, nprocs: int, *arguments: str, timeout_s: float = CASE_S) -> list[Any]:
    """What every rank's case returned; fails with the output of the ranks if one of them failed."""
    ended = finish(start(case, nprocs, *arguments), timeout_s)
    failed = [
        f"rank {rank}, exit {code}:\n{text}" for rank, (code, text) in enumerate(ended) if code
    ]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)
    return [result_of(text) for _, text in ended]


# What one life of a communicator may leave behind: less than any leak that grows with every life.
# A thread or descriptor of NCCL's may be just ending when they are counted.
LEFT_BEHIND = {"device_mib": 0.5, "host_mib": 2.0, "descriptors": 0.5, "threads": 0.5}


def leaks(left: dict[str, float]) -> list[str]:
    """What of it is too much."""
    return [name for name, most in LEFT_BEHIND.items() if left[name] >= most]


def wrong_nodes(nodes: dict[str, int], calls: int) -> str:
    """What is wrong with a graph of so many captured calls: each is one kernel, without copies."""
    if nodes.get("kernel", 0) != calls:
        return f"{nodes.get('kernel', 0)} kernels for {calls} calls: {nodes}"
    return f"something is copied or filled: {nodes}" if {"memcpy", "memset"} & {*nodes} else ""


def result_of(output: str) -> Any:
    """What a rank said after RESULT; libraries may print before and after."""
    said = [line for line in output.splitlines() if line.startswith(RESULT)]
    assert said, f"the rank gave no result:\n{output}"
    return json.loads(said[-1].removeprefix(RESULT))
