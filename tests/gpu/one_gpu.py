"""Several ranks on one GPU: processes that NCCL takes for hosts, each running a case of ranks."""

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from communicator import nccl_library
from launcher import LaunchInfo

ROOT = Path(__file__).parents[2]
FIRST_WITH_SHARED_GPUS = 23003
RESULT = "RESULT "

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a machine with an NVIDIA GPU and a CUDA build of torch; run `make gpu` there",
)
needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs a machine with two GPUs joined by NVLink or PCIe"
)


def nccl_environment(launch_id: str, rank: int) -> dict[str, str]:
    """What lets this rank share the GPU: NCCL before 2.30 must take it for a host of its own.

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
        "CUDA_MODULE_LOADING": "EAGER",
    }
    if nccl_library.find().version >= FIRST_WITH_SHARED_GPUS:
        return quiet | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return quiet | {"NCCL_HOSTID": f"{launch_id}-rank{rank}"}


def start(case: str, nprocs: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """The ranks, started; nobody watches them, so a test may kill one."""
    launch_id = uuid.uuid4().hex
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        port, started = listener.getsockname()[1], []
        for rank in range(nprocs):
            extras = {"master_fd": str(listener.fileno())} if rank == 0 else {}
            info = LaunchInfo(launch_id, nprocs, nprocs, rank, rank, "127.0.0.1", port, extras)
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.gpu.ranks", case, *arguments],
                    env=os.environ | info.to_env() | nccl_environment(launch_id, rank),
                    pass_fds=[listener.fileno()] if rank == 0 else [],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    cwd=ROOT,
                )
            )
    return started


def finish(started: list[subprocess.Popen[str]], timeout_s: float) -> list[tuple[int, str]]:
    """Exit code and output of every rank; those that do not end in time are killed."""
    deadline = time.monotonic() + timeout_s
    ended = []
    for process in started:
        try:
            output, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0] + f"\nkilled after {timeout_s:g} s"
        ended.append((process.returncode, output))
    return ended


def run(case: str, nprocs: int, *arguments: str, timeout_s: float = 100.0) -> list[Any]:
    """What every rank's case returned; fails with the output of the ranks if one of them failed."""
    ended = finish(start(case, nprocs, *arguments), timeout_s)
    failed = [
        f"rank {rank}, exit {code}:\n{text}" for rank, (code, text) in enumerate(ended) if code
    ]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)
    return [result_of(text) for _, text in ended]


def result_of(output: str) -> Any:
    """What a rank said after RESULT; libraries may print before and after."""
    said = [line for line in output.splitlines() if line.startswith(RESULT)]
    assert said, f"the rank gave no result:\n{output}"
    return json.loads(said[-1].removeprefix(RESULT))
