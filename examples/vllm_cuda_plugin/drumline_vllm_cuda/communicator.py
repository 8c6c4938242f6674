"""The calls of vLLM's groups of GPUs, over a Communicator on NCCL. Never run on a GPU.

vLLM captures these calls in CUDA graphs and calls them as operators that change no argument, so
that results are new tensors, contiguous, on the current stream.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from communicator import Communicator, CommunicatorError
from communicator import compile as compiled
from drumline.engines.vllm import timeout_s
from drumline.engines.vllm_communicator import VllmCalls
from drumline_vllm_cuda import ENGINE


class VllmCudaCommunicator(VllmCalls, CudaCommunicator):  # type: ignore[misc]  # no types in vLLM
    """One group of GPUs. All that VllmCalls lacks is vLLM's own, over vLLM's own NCCL.

    vLLM asserts that it is a CudaCommunicator where it captures a graph.
    """

    supports_tensor_dict = False  # vLLM asks this of CPUs alone

    def __init__(self, cpu_group: ProcessGroup, device: torch.device, **options: Any) -> None:
        super().__init__(cpu_group, device, **options)
        self.comm = Communicator.over(cpu_group, timeout_s=timeout_s(ENGINE), device=device)
        self._name = compiled.name(self.comm)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        input_ = input_.contiguous()
        return self.comm.allreduce(input_, out=torch.empty_like(input_))

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return super().all_gather(input_, dim).contiguous()

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return super().reduce_scatter(input_, dim).contiguous()

    def destroy(self) -> None:
        try:
            super().destroy()
        except CommunicatorError:  # graphs are alive, which vLLM frees with the process
            self.comm.abort()
        finally:
            CudaCommunicator.destroy(self)
