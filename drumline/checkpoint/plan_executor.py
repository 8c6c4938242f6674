"""Execution of a load plan on one rank: blocks are read, passed on, and written into the shards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from communicator import Communicator, PeerLost
from coordinator import Coordinator, CoordinatorError
from drumline import timings
from drumline.checkpoint.safetensors_index import Index, StoredTensor, TensorReader
from drumline.checkpoint.shard_plan import LoadPlan, Transfer
from drumline.core.shards import Region, split_into_blocks
from drumline.errors import describe_with_traceback

BLOCK_NBYTES = 8 << 20
"""Bytes read and sent at a time. At most two such blocks exist beside the shards."""

CARRIER_BACKEND = "tcp"
"""The backend that carries blocks: it reaches every host, its tensors are on the CPU, and once the
Coordinator's group is broken nobody waits in it."""

OnProgress = Callable[[int], None]


@dataclass
class LoadStats:
    """Bytes of a load on this rank: its share of the model, and those read, sent and received."""

    share: int
    nbytes_read: int = 0
    nbytes_sent: int = 0
    nbytes_received: int = 0


def execute(
    plan: LoadPlan,
    index: Index,
    reader: TensorReader,
    coor: Coordinator | None,
    shards: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
    on_progress: OnProgress = lambda nbytes: None,
    filled: Container[str] = (),
) -> LoadStats:
    """Fill this rank's shards, by name, by a plan that all ranks share. Collective.

    coor: None for a plan for one rank.
    dtypes: of all tensors of the model: the narrower of those and the stored ones is sent.
    on_progress: called with the bytes of every block that has reached a shard here.
    filled: the shards that hold their values already.
    """
    stats = LoadStats(sum(shard.nbytes for shard in shards.values()))
    with contextlib.ExitStack() as stack:
        comm = None
        if coor is not None and any(source != rank for rank, source in enumerate(plan.readers)):
            carrier = Communicator(coor, CARRIER_BACKEND, timeout_s=timings.TIMINGS.load_s)
            comm = stack.enter_context(carrier)
        executor = PlanExecutor(index, reader, comm, shards, dtypes, stats, on_progress, filled)
        executor.run(plan, coor.rank if coor is not None else 0)
        stats.nbytes_read = reader.nbytes
    return stats


@contextlib.contextmanager
def abort_peers_on_error(coor: Coordinator) -> Iterator[None]:
    """Report an error of this block, which only this rank has, so that all others stop waiting.

    The Coordinators of the others cannot be used after it. The loss of a peer is not reported: the
    rank that notices it is not at fault.
    """
    try:
        yield
    except (PeerLost, CoordinatorError):
        raise
    except BaseException as error:
        coor.report_failure(coor.rank, f"cannot load: {describe_with_traceback(error)}")
        raise


@dataclass
class PlanExecutor:
    """Executes a plan on one rank, block by block; every rank takes its blocks in one order.

    That order rules out deadlock: of all sends and receives not done, the first in the plan is the
    next one on both of its ranks.
    """

    index: Index
    reader: TensorReader
    comm: Communicator | None
    shards: Mapping[str, torch.Tensor]
    dtypes: Mapping[str, torch.dtype]
    stats: LoadStats
    on_progress: OnProgress
    filled: Container[str]

    def __post_init__(self) -> None:
        self.scratch = torch.empty(BLOCK_NBYTES, dtype=torch.uint8)

    def run(self, plan: LoadPlan, rank: int) -> None:
        for transfer, src, dst in plan.hops(rank):
            self._transfer(transfer, rank, src, dst)

    def _transfer(self, transfer: Transfer, rank: int, src: int | None, dst: int | None) -> None:
        """Take a transfer from the file or from rank `src`, to the shard here and to rank `dst`."""
        stored = self.index[transfer.key]
        dtypes = (stored.torch_dtype, self.dtypes[transfer.name])
        sent_dtype = min(dtypes, key=lambda dtype: dtype.itemsize)  # of equal sizes, the stored one
        shard_start = next((start for owner, start in transfer.owners if owner == rank), None)
        is_filled = transfer.name in self.filled
        limit = max(1, BLOCK_NBYTES // stored.torch_dtype.itemsize)
        for block in split_into_blocks(transfer.source.size, limit):
            target = None
            if shard_start is not None:
                target = self._target(transfer.name, block, shard_start)
            source = block.moved((0,) * len(block.start), transfer.source.start)
            if target is not None and is_filled:
                buffer = target
            else:
                buffer = self._fetch(stored, source, sent_dtype, target, src)
            if dst is not None:
                assert self.comm is not None
                self.comm.send(_as_bytes(buffer), dst)
                self.stats.nbytes_sent += buffer.nbytes
            if target is not None:
                if buffer is not target:
                    target.copy_(buffer)
                self.on_progress(target.nbytes)

    def _target(self, name: str, block: Region, shard_start: tuple[int, ...]) -> torch.Tensor:
        """The view of the shard that a block fills; leading dimensions are missing in the file."""
        lead = len(shard_start) - len(block.start)
        inner = block.moved((0,) * len(block.start), shard_start[lead:])
        at: tuple[Any, ...] = (*shard_start[:lead], *inner.slices())
        return self.shards[name][at]

    def _fetch(
        self,
        stored: StoredTensor,
        source: Region,
        sent_dtype: torch.dtype,
        target: torch.Tensor | None,
        src: int | None,
    ) -> torch.Tensor:
        """One block in `sent_dtype`: in the target itself where it can be written there."""
        dtype = stored.torch_dtype if src is None else sent_dtype
        is_ready = target is not None and target.is_contiguous() and target.device.type == "cpu"
        if target is not None and is_ready and dtype == sent_dtype == target.dtype:
            buffer = target
        else:  # the same memory every time: an allocator's cache would count against the peak
            nbytes = source.numel * dtype.itemsize
            buffer = self.scratch[:nbytes].view(dtype).view(source.size)
        if src is None:
            self.reader.read(stored, source, buffer)
            return buffer.to(sent_dtype)
        assert self.comm is not None
        self.stats.nbytes_received += buffer.nbytes
        self.comm.recv(_as_bytes(buffer), src)
        return buffer


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
