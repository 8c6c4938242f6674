"""Execution of a load plan on one rank: blocks are read, passed on, and written into the shards."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from communicator import Communicator, PeerLost
from coordinator import Coordinator, CoordinatorError
from drumline import timings
from drumline.checkpoint.copy_check import lasting_identity
from drumline.checkpoint.disk_cache.weight_cache import CachedWeights, WeightCache
from drumline.checkpoint.safetensors_index import ComputedTensor, Index, TensorReader
from drumline.checkpoint.shard_plan import LoadPlan, Transfer
from drumline.core.consistency import run_and_share
from drumline.core.shards import Region
from drumline.errors import describe_with_traceback

log = logging.getLogger("drumline")

BLOCK_NBYTES = 2 << 20
"""Bytes read and sent at a time. Beside the shards there is one that is read, one that is sent, and
one in another dtype. Of 8 MiB each, they were out of a processor's cache before they were written,
and a load from another machine took up to an eighth longer."""

CARRIER_BACKEND = "tcp"
"""The backend that carries blocks: it reaches every host, its tensors are on the CPU, and once the
Coordinator's group is broken nobody waits in it."""

OnProgress = Callable[[int], None]
Fetch = Callable[[], torch.Tensor]


@dataclass
class LoadStats:
    """Bytes of a load on this rank: its share of the model, and those read, sent and received, and
    those that had been received in an earlier load and were kept on this machine."""

    share: int
    nbytes_read: int = 0
    nbytes_sent: int = 0
    nbytes_received: int = 0
    nbytes_kept: int = 0


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

    What comes from another node is kept in the WeightCache here, and not sent again.
    """
    stats = LoadStats(sum(shard.nbytes for shard in shards.values()))
    plan, rank = plan.in_blocks(index, BLOCK_NBYTES), 0 if coor is None else coor.rank
    executor = PlanExecutor(plan, rank, index, reader, shards, dtypes, stats, on_progress, filled)
    with contextlib.ExitStack() as stack:
        kept_by_rank: list[list[int]] = []
        if coor is not None and any(source != rank for rank, source in enumerate(plan.readers)):
            carrier = Communicator(coor, CARRIER_BACKEND, timeout_s=timings.TIMINGS.load_s)
            executor.comm = stack.enter_context(carrier)
            if any(is_far := _reads_from_afar(coor, plan)):
                identity = _identity_of_files(coor, plan, reader, index)
                if is_far[rank]:
                    name = f"{coor.peers[plan.readers[rank]].host}:{reader.path}"
                    executor.cache = stack.enter_context(_open_cache(identity, name))
                kept = executor.read_cache()
                kept_by_rank = coor.allgather_object(kept, timeout_s=timings.TIMINGS.load_s)
        executor.run(kept_by_rank)
        stats.nbytes_read = reader.nbytes
    return stats


def _reads_from_afar(coor: Coordinator, plan: LoadPlan) -> list[bool]:
    """By rank, True if a rank of another node reads for it."""
    node_of = {rank: number for number, node in enumerate(coor.nodes) for rank in node}
    return [node_of[rank] != node_of[source] for rank, source in enumerate(plan.readers)]


def _identity_of_files(
    coor: Coordinator, plan: LoadPlan, reader: TensorReader, index: Index
) -> str:
    """That of the files that are read for this rank, as their reader sees them. Collective."""
    reads = plan.readers[coor.rank] == coor.rank
    _, identities = run_and_share(
        coor,
        lambda: lasting_identity(reader.path, index) if reads else "",
        lambda identity: identity,
        timings.TIMINGS.load_s,
    )
    return str(identities[plan.readers[coor.rank]])


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
    next one on both of its ranks. Where there are several, one thread alone reads, the block after
    the one that is sent, and keeps the one before that which is received.

    comm: to the other ranks of the plan. cache: of what comes from another machine.
    """

    plan: LoadPlan
    rank: int
    index: Index
    reader: TensorReader
    shards: Mapping[str, torch.Tensor]
    dtypes: Mapping[str, torch.dtype]
    stats: LoadStats
    on_progress: OnProgress
    filled: Container[str]
    comm: Communicator | None = None
    cache: CachedWeights | None = None

    def __post_init__(self) -> None:
        self.scratch = [torch.empty(BLOCK_NBYTES, dtype=torch.uint8) for _ in range(2)]
        self.thread: Executor | None = None
        self.keeping: Future[None] | None = None

    def read_cache(self) -> list[int]:
        """Fill what earlier loads have kept here; the numbers of these blocks in the plan."""
        numbers = []
        for number, block in enumerate(self.plan.transfers):
            if self.cache is None or self.rank not in block.route[1:]:
                continue
            if not (key := self._key(block)):
                continue
            buffer, target = self._buffer(block, self.scratch[0]), self._target(block)
            if self.cache.read(key, _as_memory(buffer)):
                numbers.append(number)
                self.stats.nbytes_kept += buffer.nbytes
                self._store(buffer, target)
        return numbers

    def run(self, kept_by_rank: Sequence[Sequence[int]] = ()) -> None:
        """Do this rank's part. kept_by_rank: the blocks that each rank has without the others."""
        pending: list[tuple[Transfer, int | None, Fetch]] = []
        with ThreadPoolExecutor(1) as thread:
            self.thread = thread
            for number, (block, src, dst) in enumerate(self.plan.hops(self.rank, kept_by_rank)):
                scratch = self.scratch[number % 2]
                if src is not None:
                    fetch: Fetch = partial(self._receive, block, src, scratch)
                elif self.comm is None:
                    fetch = partial(self._read, block, scratch)
                else:
                    fetch = thread.submit(self._read, block, scratch).result
                pending.append((block, dst, fetch))
                if number:
                    self._pass_on(*pending.pop(0))
            for last in pending:
                self._pass_on(*last)
            self._wait_until_kept()

    def _pass_on(self, block: Transfer, dst: int | None, fetch: Fetch) -> None:
        """Take a block from the file or from another rank, to the shard here and to rank `dst`."""
        buffer, target = fetch(), self._target(block)
        if dst is not None:
            assert self.comm is not None
            self.comm.send(_as_bytes(buffer), dst)
            self.stats.nbytes_sent += buffer.nbytes
        self._store(buffer, target)

    def _store(self, buffer: torch.Tensor, target: torch.Tensor | None) -> None:
        if target is not None:
            if buffer.data_ptr() != target.data_ptr():
                target.copy_(buffer)
            self.on_progress(target.nbytes)

    def _target(self, block: Transfer) -> torch.Tensor | None:
        """The view of the shard here that a block fills; leading dimensions are missing in it."""
        start = dict(block.owners).get(self.rank)
        if start is None:
            return None
        at: list[Any] = list(Region(start, block.size).slices())
        lead = len(at) - len(block.source.size)
        return self.shards[block.name][(*start[:lead], *at[lead:])]

    def _buffer(
        self, block: Transfer, scratch: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Memory for a block as it is sent, or in `dtype`: the shard itself where that will do.

        Otherwise the same every time: an allocator's cache would count against the peak.
        """
        sent, target = self._sent_dtype(block), self._target(block)
        dtype = dtype or sent
        is_ready = target is not None and target.is_contiguous() and target.device.type == "cpu"
        if target is not None and is_ready and target.dtype == dtype == sent:
            return target
        nbytes = block.source.numel * dtype.itemsize
        return scratch[:nbytes].view(dtype).view(block.source.size)

    def _sent_dtype(self, block: Transfer) -> torch.dtype:
        """The narrower of the model's dtype and the stored one, which it is if they are equal."""
        dtypes = (self.index[block.key].torch_dtype, self.dtypes[block.name])
        return min(dtypes, key=lambda dtype: dtype.itemsize)

    def _read(self, block: Transfer, scratch: torch.Tensor) -> torch.Tensor:
        """One block from the file, as it is sent."""
        target = self._target(block)
        if target is not None and block.name in self.filled:
            return target
        stored = self.index[block.key]
        buffer = self._buffer(block, scratch, stored.torch_dtype)
        self.reader.read(stored, block.source, buffer)
        return buffer.to(self._sent_dtype(block))

    def _receive(self, block: Transfer, src: int, scratch: torch.Tensor) -> torch.Tensor:
        """One block from another rank."""
        assert self.comm is not None
        buffer = self._buffer(block, scratch)
        self.comm.recv(_as_bytes(buffer), src)
        self.stats.nbytes_received += buffer.nbytes
        self._wait_until_kept()  # one at a time: its scratch is that of the next block
        if self.cache is not None and self.thread is not None and (key := self._key(block)):
            self.keeping = self.thread.submit(self.cache.write, key, _as_memory(buffer))
        return buffer

    def _wait_until_kept(self) -> None:
        if self.keeping is not None:
            self.keeping.result()

    def _key(self, block: Transfer) -> str:
        """The name of a block in the cache; none for what is computed, as from settings of a model.

        The identity of the files stands for what is in them.
        """
        stored = self.index[block.key]
        if isinstance(stored, ComputedTensor):
            return ""
        place = (stored.file, stored.offset, stored.dtype, stored.shape)
        box = (block.source.start, block.source.size, str(self._sent_dtype(block)))
        return hashlib.sha256(repr((*place, *box)).encode()).hexdigest()


@contextlib.contextmanager
def _open_cache(identity: str, name: str) -> Iterator[CachedWeights | None]:
    """The cache for a checkpoint; None, with a warning, where it cannot be had."""
    with contextlib.ExitStack() as stack:
        cache = None
        try:
            cache = stack.enter_context(WeightCache().open(identity, name))
        except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
            log.warning("weights that are received are not kept: %s", error)
        yield cache


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _as_memory(tensor: torch.Tensor) -> memoryview:
    return memoryview(_as_bytes(tensor).numpy())  # type: ignore[arg-type]
