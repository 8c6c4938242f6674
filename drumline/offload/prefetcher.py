"""Offloaded weights, on disk or in CPU memory, prefetched layer by layer.

places = {"layers.2": "cpu", "layers.3": "cpu"}  # modules by name, in the order in which they run
prefetcher = make_prefetcher(model, places, torch.device("cuda:0"), on_disk)
with prefetcher.loaded("layers.2"):  # layers.3 is on its way meanwhile
    hidden = model.layers[2](hidden)
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

from coordinator import torch_private
from drumline.checkpoint.model_tensors import named_tensors
from drumline.checkpoint.plan_executor import execute
from drumline.checkpoint.safetensors_index import TensorReader
from drumline.checkpoint.shard_plan import SourceSlice, TensorRequest, plan_loading
from drumline.checkpoint.source import CheckpointFiles
from drumline.core.mesh import Mesh
from drumline.core.packed_tensor import joined

Tensors = dict[str, torch.Tensor]
Allocate = Callable[[torch.Size, torch.dtype], torch.Tensor]


class DiskWeights:
    """The weights of one module in the files of a checkpoint, read again for each use."""

    def __init__(
        self,
        files: CheckpointFiles,
        slices: Mapping[str, Sequence[SourceSlice]],
        like: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
    ):
        self.files, self.dtypes = files, dtypes
        self.shapes = {name: tensor.shape for name, tensor in like.items()}
        requests = {
            name: TensorRequest(
                tuple(self.shapes[name]), dtypes[name].itemsize, tuple(slices[name])
            )
            for name in like
        }
        self.plan = plan_loading(requests, files.index, Mesh({"pp": 1}), [0])

    def fetch(self, allocate: Allocate, device: torch.device) -> Tensors:
        """Read with pread, block by block, into memory that is used again and again."""
        tensors = {name: allocate(shape, self.dtypes[name]) for name, shape in self.shapes.items()}
        with TensorReader(self.files.path) as reader:
            execute(self.plan, self.files.index, reader, None, tensors, self.dtypes)
        return {name: tensor.to(device) for name, tensor in tensors.items()}


class CpuWeights:
    """The weights of one module in the memory of the CPU, for a module that runs elsewhere."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self.tensors = dict(tensors)

    def fetch(self, allocate: Allocate, device: torch.device) -> Tensors:
        return {name: tensor.to(device) for name, tensor in self.tensors.items()}


class WeightPrefetcher:
    """The offloaded modules of a rank, in the order in which they run.

    At most two of them have their weights on `device` at a time: the one that runs, and the next
    one, which a thread fetches meanwhile. After the last comes the first, for the next token.
    """

    def __init__(
        self, model: nn.Module, away: Mapping[str, DiskWeights | CpuWeights], device: torch.device
    ):
        self.away, self.device = dict(away), device
        self.modules = {name: model.get_submodule(name) for name in away}
        # Of its own, for copies beside the layers; one, for the allocator keeps memory for each.
        self.stream = None if device.type == "cpu" else torch.Stream(device)
        names = list(away)
        self.next = dict(zip(names, [*names[1:], *names[:1]], strict=True))
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="drumline-prefetch")
        self.fetches: dict[str, Future[Tensors]] = {}
        self.free_buffers: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = defaultdict(
            list
        )
        self.lock = threading.RLock()  # of several threads, one runs an offloaded module

    @contextlib.contextmanager
    def loaded(self, name: str) -> Iterator[None]:
        """The module has its weights inside the block, and nothing afterwards."""
        with self.lock:
            tensors = (self.fetches.pop(name, None) or self._start(name)).result()
            # The fetch of the next module starts before this one runs, and its buffers are those
            # that the module before this one has let go of.
            after = self.next[name]
            if after != name and after not in self.fetches:
                self.fetches[after] = self._start(after)
            empty = _exchange(self.modules[name], tensors)
            try:
                yield
            finally:
                _exchange(self.modules[name], empty)
                self._recycle(tensors.values())

    def _start(self, name: str) -> Future[Tensors]:
        if name not in self.fetches:
            for unused in list(self.fetches):  # a call out of order: two at a time is enough
                fetch = self.fetches.pop(unused)
                if fetch.exception() is None:  # else it is of no concern to this call
                    self._recycle(fetch.result().values())
        return self.thread.submit(self._fetch, name)

    def _fetch(self, name: str) -> Tensors:
        lent: list[torch.Tensor] = []

        def allocate(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
            lent.append(self._allocate(shape, dtype))
            return lent[-1]

        with self.stream or contextlib.nullcontext():
            tensors = self.away[name].fetch(allocate, self.device)
        if self.device.type != "cpu":  # where they are by now
            self._recycle(lent)
        return tensors

    def _allocate(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        free = self.free_buffers[(shape, dtype)]
        if not free:
            self.free_buffers.clear()  # a module of another kind: free the buffers of the last kind
            return torch.empty(shape, dtype=dtype)
        return free.pop()

    def _recycle(self, tensors: Iterable[torch.Tensor]) -> None:
        """Memory of the CPU is used again; an accelerator's goes back to its allocator."""
        for tensor in tensors:
            if tensor.device.type == "cpu":
                self.free_buffers[(tensor.shape, tensor.dtype)].append(tensor)
            else:
                tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def _exchange(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Replace tensors of a module; return the former ones."""

    def table_and_key(name: str) -> tuple[Tensors, str]:
        owner, _, key = name.rpartition(".")
        parameters, buffers = torch_private.own_tables(module.get_submodule(owner))
        return (parameters if key in parameters else buffers), key

    def present(name: str) -> torch.Tensor:
        table, key = table_and_key(name)
        return table[key]

    before: Tensors = {}
    for name, tensor in joined(tensors, present).items():
        table, key = table_and_key(name)
        before[name] = table[key]
        is_ready = not isinstance(before[name], nn.Parameter) or isinstance(tensor, nn.Parameter)
        table[key] = tensor if is_ready else nn.Parameter(tensor, requires_grad=False)
    return before


def make_prefetcher(
    model: nn.Module,
    places: Mapping[str, str],
    device: torch.device,
    on_disk: Callable[[str, Tensors], DiskWeights],
) -> WeightPrefetcher | None:
    """The prefetcher of a rank for modules at `places` ("cpu" or "disk"); None for no modules.

    on_disk: makes the DiskWeights of a module from its name and tensors.
    """
    away: dict[str, DiskWeights | CpuWeights] = {}
    for name, place in places.items():
        tensors = dict(named_tensors(model.get_submodule(name)))
        away[name] = on_disk(name, tensors) if place == "disk" else CpuWeights(tensors)
    return WeightPrefetcher(model, away, device) if away else None
