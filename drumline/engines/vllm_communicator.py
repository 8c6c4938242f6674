"""The calls of vLLM's groups of ranks, over a Communicator. Only vLLM imports this.

Its names and arguments are those of vLLM's DeviceCommunicatorBase. Ranks are those of the group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.distributed import ProcessGroup
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from communicator import Communicator
from communicator import compile as compiled
from drumline.engines.vllm import timeout_s


class VllmCalls:
    """The calls that every device has, for a class that sets self.comm, before vLLM's own class."""

    comm: Communicator
    _name: str  # of comm in compiled functions
    rank_in_group: int
    world_size: int
    ranks: list[int]

    supports_tensor_dict = True  # so vLLM gives the tensors between pipeline stages to this class

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        if is_dynamo_compiling():
            return compiled.allreduce(input_.contiguous(), self._name)
        try:
            return self.comm.allreduce(input_)
        except ValueError:  # raised before anything moves: it is not contiguous, or raises again
            return input_.copy_(self.comm.allreduce(input_.contiguous()))

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if is_dynamo_compiling():
            return compiled.allgather(input_, self._name, dim)
        return self.comm.allgather(input_.contiguous(), dim=dim)

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(input_, torch.Tensor):
            return self.comm.allgather(input_.contiguous(), dim=dim, sizes=sizes)
        return [self.comm.allgather(part.contiguous(), dim=dim, sizes=sizes) for part in input_]

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if is_dynamo_compiling():
            return compiled.reduce_scatter(input_, self._name, dim=dim)
        return self.comm.reduce_scatter(input_.contiguous(), dim=dim)

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        return self.comm.reduce_scatter(input_.contiguous(), dim=dim, sizes=sizes)

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        return self.comm.gather(input_.contiguous(), dst, dim=dim)

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        dst = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        self.comm.send(tensor.contiguous(), dst)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        src = (self.rank_in_group - 1) % self.world_size if src is None else src
        return self.comm.recv(torch.empty(size, dtype=dtype, device=self.comm.device), src)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        if tensor.is_contiguous():
            return self.comm.broadcast(tensor, src)
        return tensor.copy_(self.comm.broadcast(tensor.contiguous(), src))

    def send_tensor_dict(self, tensor_dict: dict[str, Any], dst: int) -> None:
        self.comm.send_tensors(tensor_dict, dst)

    def recv_tensor_dict(self, src: int) -> dict[str, Any]:
        return self.comm.recv_tensors(src)

    def batch_isend_irecv(self, p2p_ops: list[Any]) -> None:
        """Make the sends and receives of torch.distributed.P2POp together."""
        with self.comm.group():
            for message in p2p_ops:
                peer = self.ranks.index(message.peer)
                is_send = message.op is torch.distributed.isend
                (self.comm.send if is_send else self.comm.recv)(message.tensor, peer)

    def destroy(self) -> None:
        self.comm.close()


class VllmCommunicator(VllmCalls, CpuCommunicator):  # type: ignore[misc]  # vLLM has no types here
    """One group of CPUs. vLLM's own class exchanges experts, by these calls."""

    def __init__(
        self,
        cpu_group: ProcessGroup,
        device: torch.device | None = None,
        device_group: ProcessGroup | None = None,
        unique_name: str = "",
        use_all2all: bool = False,
    ) -> None:
        # Not CpuCommunicator's, which opens shared memory of its own.
        DeviceCommunicatorBase.__init__(
            self, cpu_group, device, device_group, unique_name, use_all2all=use_all2all
        )
        self.comm = Communicator.over(cpu_group, timeout_s=timeout_s(), device_type="cpu")
        self._name = compiled.name(self.comm)
        if self.use_all2all:
            from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

            self.all2all_manager = AgRsAll2AllManager(cpu_group)
