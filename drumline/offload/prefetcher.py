"""Weights that do not stay where they are used: on disk or in CPU memory, brought layer by layer.

shelf = WeightPrefetcher(model, {"model.layers.3": tensors_of_it}, device)
with prefetcher.loaded("model.layers.3"):   # while the next one is on its way already
    ...
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drumline.checkpoint.model_tensors import named_tensors
from drumline.checkpoint.plan_executor import execute_locally
from drumline.checkpoint.safetensors_index import Index
from drumline.checkpoint.shard_plan import SourceSlice, TensorRequest, plan_loading
from drumline.core.mesh import Mesh

Tensors = dict[str, torch.Tensor]
Room = Callable[[torch.Size, torch.dtype], torch.Tensor]


class DiskWeights:
    """The weights of one module in the files of a checkpoint, read anew each time."""

    def __init__(
        self,
        path: Path,
        index: Index,
        slices: Mapping[str, Sequence[SourceSlice]],
        like: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
    ):
        self.path, self.index, self.dtypes = path, index, dtypes
        self.shapes = {name: tensor.shape for name, tensor in like.items()}
        wanted = {
            name: TensorRequest(
                tuple(self.shapes[name]), dtypes[name].itemsize, tuple(slices[name])
            )
            for name in like
        }
        self.plan = plan_loading(wanted, index, Mesh({"pp": 1}), [0])

    def fetch(self, room: Room, device: torch.device) -> Tensors:
        """Read with pread, block by block, into memory that is used again and again."""
        found = {name: room(shape, self.dtypes[name]) for name, shape in self.shapes.items()}
        execute_locally(self.plan, self.index, self.path, found, self.dtypes)
        return {name: tensor.to(device) for name, tensor in found.items()}


class CpuWeights:
    """The weights of one module in the memory of the CPU, for a module that runs elsewhere."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self.tensors = dict(tensors)

    def fetch(self, room: Room, device: torch.device) -> Tensors:
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
        names = list(away)
        self.next = dict(zip(names, [*names[1:], *names[:1]], strict=True))
        self.coming: dict[str, _Fetch] = {}
        self.spare: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self.turn = threading.RLock()  # of several conversations, one runs an offloaded module

    @contextlib.contextmanager
    def loaded(self, name: str) -> Iterator[None]:
        """The module has its weights inside the block, and nothing afterwards."""
        with self.turn:
            tensors = (self.coming.pop(name, None) or self._start(name)).result()
            after = self.next[name]
            if after != name and after not in self.coming:
                self.coming[after] = self._start(after)
            empty = _exchange(self.modules[name], tensors)
            try:
                yield
            finally:
                _exchange(self.modules[name], empty)
                self._keep(tensors)

    def _start(self, name: str) -> _Fetch:
        if name not in self.coming:
            for unused in list(self.coming):  # a call out of order: two at a time is enough
                self._keep(self.coming.pop(unused).result())
        return _Fetch(lambda: self._fetch(name))

    def _fetch(self, name: str) -> Tensors:
        with _beside(self.device):
            return self.away[name].fetch(self._room, self.device)

    def _room(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        free = self.spare[(shape, dtype)]
        if not free:
            self.spare.clear()  # a module of another kind: what the last kind used goes first
            return torch.empty(shape, dtype=dtype)
        return free.pop()

    def _keep(self, tensors: Tensors) -> None:
        """Memory of the CPU is used again; an accelerator's goes back to its allocator."""
        for tensor in tensors.values():
            if tensor.device.type == "cpu":
                self.spare[(tensor.shape, tensor.dtype)].append(tensor)
            else:
                tensor.record_stream(torch.accelerator.current_stream(tensor.device))


class _Fetch(threading.Thread):
    """Work in a thread of its own; `result` waits for it, and raises what it raised."""

    def __init__(self, work: Callable[[], Tensors]):
        super().__init__(daemon=True)
        self.work = work
        self.found: Tensors = {}
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.found = self.work()
        except Exception as error:
            self.error = error

    def result(self) -> Tensors:
        self.join()
        if self.error is not None:
            raise self.error
        return self.found


def _beside(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Copies to an accelerator go over a stream of their own, beside the work of the layers."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.Stream(device)


def _exchange(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Put these tensors in the place of those that the module has; returns what was there."""
    before: Tensors = {}
    for name, tensor in tensors.items():
        owner, _, key = name.rpartition(".")
        part = module.get_submodule(owner)
        table: dict[str, Any] = part._parameters if key in part._parameters else part._buffers
        before[name] = table[key]
        is_ready = table is part._buffers or isinstance(tensor, nn.Parameter)
        table[key] = tensor if is_ready else nn.Parameter(tensor, requires_grad=False)
    return before


def make_prefetcher(
    model: nn.Module,
    places: Mapping[str, str],
    device: torch.device,
    on_disk: Callable[[str, Tensors], DiskWeights] | None = None,
) -> WeightPrefetcher | None:
    """The shelf of a rank whose modules lie at `places` ("cpu" or "disk"); None for no modules.

    on_disk: makes the reader of a module's tensors, given its name.
    """
    away: dict[str, DiskWeights | CpuWeights] = {}
    for name, place in places.items():
        module = model.get_submodule(name)
        tensors = dict(named_tensors(module))
        if place == "disk":
            assert on_disk is not None
            away[name] = on_disk(name, tensors)
        else:
            away[name] = CpuWeights(tensors)
    return WeightPrefetcher(model, away, device) if away else None
