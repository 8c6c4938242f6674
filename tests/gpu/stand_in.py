"""A CPU in place of the GPU, so that cases and tables run where there is none: GPU_STAND_IN=cpu.

Kernels are the CPU's, NCCL is shared memory, and a graph is a tape of operators. Times say nothing.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tests.gpu import decode  # noqa: F401 - first: it adds what drumline's modules look for

# isort: split
from communicator.backends.shm import Shm
from communicator.errors import DrumlineError
from drumline.strategies import pipeline_parallel
from tests.programs.operator_tape import OperatorTape

tapes: list[OperatorTape] = []  # of the capture that this process is in


class CpuNccl(Shm):
    """Nccl's interface over shared memory, as far as the cases use it."""

    _failure: DrumlineError | None = None

    def open(self, blocking: bool = False, oneshot: bool = False) -> None:
        super().open()

    def allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: Any) -> None:
        def reduce() -> None:
            Shm.allreduce(self, out, tensor, op)

        tapes[-1].add(lambda: self._replay(reduce)) if tapes else reduce()

    def _replay(self, call: Any) -> None:
        """A replay raises nothing: check() does."""
        try:
            call()
        except DrumlineError as error:
            self._failure = error

    def _own_device(self, device: Any) -> torch.device:
        return torch.device("cpu")

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.tape = OperatorTape()

    def replay(self) -> None:
        self.tape.replay()

    def reset(self) -> None:
        self.tape = OperatorTape()

    def pool(self) -> None:
        return None


class Stream:
    """torch.cuda.Stream, of which annotations are made, too."""

    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


@contextlib.contextmanager
def capture(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
    tapes.append(graph.tape)
    try:
        with graph.tape.recording():
            yield
    finally:
        tapes.pop()


def install() -> type[CpuNccl]:
    """Change torch.cuda and the checks of this process; the class that is Nccl here."""
    no_context = contextlib.nullcontext
    cuda = {
        "CUDAGraph": Graph,
        "graph": capture,
        "Stream": Stream,
        "current_stream": lambda *a: types.SimpleNamespace(cuda_stream=0),
        "device": lambda *a: no_context(),
        "get_device_name": lambda *a: "no GPU: a stand-in",
        "mem_get_info": lambda *a: (1 << 34, 1 << 35),
        "set_device": lambda *a: None,
        "stream": lambda *a: no_context(),
        "synchronize": lambda *a: None,
    }
    for name, value in cuda.items():
        setattr(torch.cuda, name, value)
    pipeline_parallel._check_graphs = lambda chosen: None
    symm_mem.empty = torch.empty
    symm_mem.rendezvous = lambda tensor, group: None
    torch.ops.symm_mem.one_shot_all_reduce_copy_out = lambda buffer, tensor, op, name, out: (
        dist.all_reduce(out.copy_(tensor))
    )
    start = dist.init_process_group
    dist.init_process_group = lambda backend, device_id=None, **rest: start("gloo", **rest)
    return CpuNccl
