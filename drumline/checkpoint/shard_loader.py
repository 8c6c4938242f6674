"""Fills a model that was built on meta with this rank's shards of a checkpoint.

done = load_into(model, "checkpoint", coor, mesh={"dp_shard": 2, "tp": 2}, reader="rank0")
print(done.share, done.nbytes_read, done.nbytes_sent)
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from communicator import Communicator, PeerLost
from coordinator import Coordinator, CoordinatorError, group_by_node
from drumline.checkpoint.hugepages import TensorSpec, allocate_hugepages
from drumline.checkpoint.safetensors_index import (
    Index,
    StoredTensor,
    TensorReader,
    index_from_json,
    index_to_json,
    read_index,
)
from drumline.checkpoint.shard_plan import (
    LoadPlan,
    SourceSlice,
    TensorRequest,
    Transfer,
    plan_loading,
    reader_ranks,
    whole_tensor,
)
from drumline.core.mesh import ALIASES, Mesh, axis_names, read_mesh
from drumline.core.shards import Region, ShardSpec, split_into_blocks
from drumline.errors import CheckpointError, DrumlineError, PlanError, said, story

BLOCK_NBYTES = 8 << 20
"""Bytes read and sent at a time. At most two such blocks exist beside the shards."""

CARRIER_BACKEND = "tcp"
"""What takes blocks from rank to rank: it reaches every host, its tensors are on the CPU, and once
the Coordinator's group is broken nobody waits in it."""

PATIENCE_S = 24 * 3600.0
"""How long a rank waits for its turn while others load: files are large, and a death is noticed."""

WeightSources = Mapping[str, tuple[SourceSlice, ...]]


@dataclass
class LoadStats:
    """What loading took on this rank, in bytes: its share of the model, read, sent, received."""

    share: int
    nbytes_read: int = 0
    nbytes_sent: int = 0
    nbytes_received: int = 0


def load_into(
    model: nn.Module,
    path: str | Path,
    coor: Coordinator,
    *,
    mesh: Any = None,
    reader: str = "each",
    splits: Mapping[str, tuple[ShardSpec, ...]] | None = None,
    only: Mapping[str, Mapping[str, int]] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    sources: Callable[[Index], WeightSources] | None = None,
    device: torch.device | str = "cpu",
) -> LoadStats:
    """Give every parameter and persistent buffer that is on meta its shard. Collective.

    A plain tensor is cut as `splits` says by name, and whole otherwise. A DTensor on meta (from
    parallelize_module, distribute_tensor or fully_shard) becomes a DTensor, and its placements say
    how it is cut, after `splits` have cut. Tensors tied on meta are loaded once and stay tied. The
    dtype is the model's.

    mesh: the ranks as a grid: {"dp_shard": 2, "tp": 2}, or a torch DeviceMesh; one axis over all
        ranks if not given. It must cover the launch, and every axis that cuts must be in it.
    reader: "each" rank reads its own boxes; the first of each "node" reads for it; or "rank0".
        Ranks that do not read need no file.
    only: names to coordinates, such as {"pp": 1}: other ranks leave the tensor on meta.
    shapes: of the whole, for tensors that are on meta in the shape that `splits` leaves.
    sources: what each parameter is made of, given the index of the files; its own name if not.
    device: where plain tensors go, and DTensors of a mesh on no accelerator.

    Needs the share plus a few blocks of 8 MiB. Raises PlanError or CheckpointError on every rank
    before a tensor moves.
    """
    files, _ = share_index(coor, path, lambda: assign_readers(coor, mesh, reader)[1])
    grid, _ = assign_readers(coor, mesh, reader)
    asked = LoadRequest(splits or {}, only or {}, shapes or {}, sources)
    plan = plan_on_all_ranks(coor, lambda: plan_files(model, files, grid, coor.rank, asked))
    return load_planned(model, plan, files, coor, device)


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint as all ranks see it. `readers`: by rank, the rank that reads for it."""

    path: Path
    index: Index
    readers: Sequence[int]


@dataclass(frozen=True)
class LoadRequest:
    """What load_into was asked for, by name of tensor."""

    splits: Mapping[str, tuple[ShardSpec, ...]]
    only: Mapping[str, Mapping[str, int]]
    shapes: Mapping[str, tuple[int, ...]]
    sources: Callable[[Index], WeightSources] | None


def plan_files(
    model: nn.Module, files: CheckpointFiles, grid: Mesh, rank: int, asked: LoadRequest
) -> LoadPlan:
    """What this rank has a part in of loading a model that is on meta."""
    found = asked.sources(files.index) if asked.sources else sources_by_name(model, files.index)
    tensors = distinct_meta_tensors(model).items()
    wanted = {name: _wanted(name, tensor, found, grid, asked) for name, tensor in tensors}
    return plan_loading(wanted, files.index, grid, files.readers, rank)


def load_planned(
    model: nn.Module,
    plan: LoadPlan,
    files: CheckpointFiles,
    coor: Coordinator,
    device: torch.device | str = "cpu",
) -> LoadStats:
    """Give a model that is on meta what a plan that all ranks share says. Collective."""
    tensors = distinct_meta_tensors(model)
    mine = [name for name, one in plan.wanted.items() if one.is_held_by(plan.mesh, coor.rank)]
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    with abort_peers_on_error(coor):
        shards = allocate_hugepages(
            {name: _wish(tensors[name], name, plan, coor, device) for name in mine}
        )
        done = execute(plan, files.index, files.path, coor, shards, dtypes)
        with torch.no_grad():
            new = {id(tensors[name]): wrap_like(tensors[name], shards.pop(name)) for name in mine}
        replace_tensors(model, new)
    return done


def execute(
    plan: LoadPlan,
    index: Index,
    path: str | Path,
    coor: Coordinator,
    shards: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
    on_progress: Callable[[int], None] = lambda nbytes: None,
) -> LoadStats:
    """Fill this rank's shards, by name, as a plan that all ranks share says. Collective.

    dtypes: of all tensors of the model: what travels is the narrower of those and the stored ones.
    landed: called with the bytes of every block that has reached a shard here.
    """
    done = LoadStats(sum(shard.nbytes for shard in shards.values()))
    with contextlib.ExitStack() as stack, abort_peers_on_error(coor):
        files = stack.enter_context(TensorReader(path))
        comm = None
        if any(reader != rank for rank, reader in enumerate(plan.readers)):
            comm = stack.enter_context(Communicator(coor, CARRIER_BACKEND, timeout_s=PATIENCE_S))
        _Stream(index, files, comm, shards, dtypes, done, on_progress).run(plan, coor.rank)
        done.nbytes_read = files.nbytes
    return done


def execute_locally(
    plan: LoadPlan,
    index: Index,
    path: str | Path,
    shards: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Fill these tensors as a plan for one rank says, without any other rank."""
    with TensorReader(path) as files:
        _Stream(index, files, None, shards, dtypes, LoadStats(0), lambda nbytes: None).run(plan, 0)


def assign_readers(coor: Coordinator, mesh: Any, reader: str) -> tuple[Mesh, list[int]]:
    """The mesh that is meant, one axis over all ranks if None, and by rank who reads for it."""
    whole = {"dp_replicate": coor.world_size}
    grid = read_mesh(whole if mesh is None else mesh, coor.world_size)
    return grid, reader_ranks(reader, node_ranks(coor))


def node_ranks(coor: Coordinator) -> list[list[int]]:
    """The ranks of each node, by rank of this coordinator."""
    return [[coor.ranks.index(rank) for rank in node] for node in group_by_node(coor.peers)]


def share_index(
    coor: Coordinator,
    path: str | Path,
    readers: Callable[[], Sequence[int]],
    along: Callable[[], bytes] = bytes,
) -> tuple[CheckpointFiles, bytes]:
    """What rank 0 finds in the files, and what it makes with `along`, which has no newline in it.

    Collective, and the only exchange that this takes. Raises CheckpointError if a rank that reads
    finds other files, and on every rank what either function or the files raise on any.
    """

    def look() -> tuple[Sequence[int], Index | None]:
        found = readers()
        return found, read_index(path) if found[coor.rank] == coor.rank else None

    def tell(looked: tuple[Sequence[int], Index | None]) -> bytes:
        found, index = looked
        data = b"" if index is None else index_to_json(index)
        if coor.rank:
            return _digest(data) if data else b""
        blind = any(reader != rank for rank, reader in enumerate(found))
        return b"\n".join([_digest(data), along(), data if blind else b""])

    (found, index), told = _told(coor, look, tell)
    first, extra, data = told[0].split(b"\n", 2)
    if not data and b"" in told[1:]:
        raise DrumlineError(
            f"rank {coor.rank}: rank {told.index(b'')} counts on what rank 0 reads, and rank 0 has "
            "every rank read for itself; give every rank the same model, mesh and reader."
        )
    differ = [rank for rank, digest in enumerate(told[1:], 1) if digest not in (b"", first)]
    if differ:
        raise CheckpointError(
            f"rank {coor.rank}: ranks {differ} find other files in {path} than rank 0, so the "
            "parts would not make one model; give every rank the same checkpoint, or read on one: "
            'reader="rank0".'
        )
    return CheckpointFiles(
        Path(path), index_from_json(data) if index is None else index, found
    ), extra


@contextlib.contextmanager
def abort_peers_on_error(coor: Coordinator) -> Iterator[None]:
    """What is raised in this block, on this rank alone, ends the waiting of all others, and says so
    to them: their Coordinators cannot be used any more. Who lost another is not at fault."""
    try:
        yield
    except (PeerLost, CoordinatorError):
        raise
    except BaseException as error:
        coor.report_failure(coor.rank, f"cannot load: {story(error)}")
        raise


def together(coor: Coordinator, work: Callable[[], Any]) -> Any:
    """Do local work on every rank; all go on, or all raise what the first that failed raised."""
    return _told(coor, work, lambda result: b"")[0]


def _told(
    coor: Coordinator, work: Callable[[], Any], tell: Callable[[Any], bytes]
) -> tuple[Any, list[bytes]]:
    """Like `together`: the result of the work, and what every rank tells of its own."""
    try:
        result = work()
        message = b"+" + tell(result)
    except Exception as error:
        coor.allgather(b"-" + _story(coor, error).encode())
        raise
    told = coor.allgather(message)
    for text in told:
        if text.startswith(b"-"):
            raise CheckpointError(f"rank {coor.rank}: {text[1:].decode()}")
    return result, [text[1:] for text in told]


def _story(coor: Coordinator, error: Exception) -> str:
    """Who cannot load and why; with the traceback, if the message is not one of ours."""
    why = said(error) if isinstance(error, DrumlineError) else story(error)
    return f"{coor.peers[coor.rank]} cannot load: {why}"


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def plan_on_all_ranks(
    coor: Coordinator, work: Callable[[], Any], plan_of: Callable[[Any], LoadPlan] = lambda it: it
) -> Any:
    """What work gives, and the plan in it is the same on every rank. Collective.

    Ranks with other models or meshes would wait for each other for ever.
    """
    result, told = _told(coor, work, lambda it: _digest(plan_of(it).written().encode()))
    differ = [rank for rank, digest in enumerate(told) if digest != told[coor.rank]]
    if differ:
        raise DrumlineError(
            f"rank {coor.rank}: ranks {differ} plan to load other parts than this one, so they "
            "would wait for each other; give every rank the same model, mesh and reader."
        )
    return result


def distinct_meta_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers on meta, by their first name; ties appear once."""
    found = {}
    seen: set[int] = set()
    for name, tensor in named_tensors(model):
        if tensor.is_meta and id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers under every name they have."""
    found: list[tuple[str, torch.Tensor]] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        passing = module._non_persistent_buffers_set
        tables = {**module._parameters, **module._buffers}
        for name, tensor in tables.items():
            if tensor is not None and name not in passing:
                found.append((f"{prefix}.{name}" if prefix else name, tensor))
    return found


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """By the first name of a tensor, all its names."""
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, tensor in named_tensors(model):
        found.setdefault(first.setdefault(id(tensor), name), []).append(name)
    return found


def sources_by_name(model: nn.Module, index: Index) -> WeightSources:
    """Each tensor under the name it has in the model; for tied ones, any of their names."""
    tensors = dict(named_tensors(model))
    found = {}
    known = set()
    for name, names in tied_names(model).items():
        known.update(names)
        key = next((other for other in names if other in index), name)
        found[name] = whole_tensor(key, tensors[name].shape)
    surplus = sorted(set(index) - known)
    if surplus:
        raise CheckpointError(
            f"{len(surplus)} tensors of the checkpoint are not in the model "
            f"({', '.join(surplus[:5])}), so this is another model; load its own checkpoint."
        )
    return found


def _wanted(
    name: str, tensor: torch.Tensor, sources: WeightSources, mesh: Mesh, asked: LoadRequest
) -> TensorRequest:
    cuts = asked.splits.get(name, ())
    if is_dtensor(tensor):
        cuts = (*cuts, *_dtensor_splits(name, tensor, mesh))
    if name not in sources:
        raise CheckpointError(
            f"{name} is made of nothing that the checkpoint holds, so it would stay empty; "
            "load the checkpoint that belongs to the model."
        )
    shape = asked.shapes.get(name, tuple(tensor.shape))
    only = dict(asked.only.get(name, {}))
    return TensorRequest(shape, tensor.element_size(), sources[name], tuple(cuts), only)


def is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def _dtensor_splits(name: str, tensor: Any, mesh: Mesh) -> tuple[ShardSpec, ...]:
    """The cuts that a DTensor's placements describe, along the axes of our mesh."""
    device_mesh = tensor.device_mesh
    if device_mesh.mesh_dim_names is None and device_mesh.ndim == len(mesh.axes):
        names = list(mesh.axes)
    else:
        names = [ALIASES.get(axis, axis) for axis in axis_names(device_mesh)]
    cuts: list[ShardSpec] = []
    for axis, size, placement in reversed(
        list(zip(names, device_mesh.shape, tensor.placements, strict=True))
    ):
        if mesh.axis_size(axis) != size:
            raise PlanError(
                f"{name} lies on a mesh with {size} ranks along {axis!r}, and the mesh given has "
                f"{dict(mesh.axes)}; give load_into the mesh on which the model was built."
            )
        if placement.is_partial():
            raise PlanError(f"{name} is partial along {axis!r}, and no checkpoint holds a part.")
        if placement.is_replicate():
            continue
        if axis in mesh.descending_axes:
            raise PlanError(
                f"{name} is cut along {axis!r}, along which the ranks {mesh.ranks} do not ascend, "
                "and torch counts those of a process group in ascending order, so their parts "
                "would be exchanged; give a DeviceMesh whose ranks ascend along every axis."
            )
        factor = getattr(placement, "split_factor", 1)
        inner = math.prod(mesh.axis_size(cut.axis) for cut in cuts if cut.dim == placement.dim)
        if factor > 1 and factor == inner:  # what FSDP2 does to what another axis has cut
            cuts.append(ShardSpec(axis, placement.dim))
        else:
            cuts.insert(0, ShardSpec(axis, placement.dim, factor))
    return tuple(cuts)


def _wish(
    tensor: Any, name: str, plan: LoadPlan, coor: Coordinator, device: torch.device | str
) -> TensorSpec:
    """What this rank's shard needs, where it will be used."""
    shape = plan.shape_of(name, coor.rank)
    if is_dtensor(tensor):
        if tuple(tensor._local_tensor.shape) != shape:
            raise PlanError(
                f"rank {coor.rank}: {name} has a shard of shape "
                f"{tuple(tensor._local_tensor.shape)}, and its placements give {shape}; "
                "use sizes that the mesh divides."
            )
        if tensor.device_mesh.device_type != "cpu":
            device = f"{tensor.device_mesh.device_type}:{coor.local_rank}"
    return shape, tensor.dtype, device


def wrap_like(old: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """The shard as what it replaces: parameter or buffer, DTensor or plain."""
    new = _dtensor(shard, old) if is_dtensor(old) else shard
    if isinstance(old, nn.Parameter):
        return nn.Parameter(new, requires_grad=old.requires_grad)
    return new


def replace_tensors(model: nn.Module, new: Mapping[int, torch.Tensor]) -> None:
    """Replace tensors, by their identity, wherever the model has them: ties stay ties."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if id(tensor) in new:
                    table[name] = new[id(tensor)]  # type: ignore[assignment]


def _dtensor(shard: torch.Tensor, like: Any) -> torch.Tensor:
    """What DTensor.from_local makes, which works out anew what is known of the one on meta."""
    from torch.distributed.tensor import DTensor

    return DTensor(shard, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]


class _Stream:
    """Carries out a plan on one rank, block by block; every rank takes its blocks in one order.

    That order is why nobody waits for ever: of all sends and receives not done, the first in the
    plan is next on both of its ranks.
    """

    def __init__(
        self,
        index: Index,
        files: TensorReader,
        comm: Communicator | None,
        shards: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
        done: LoadStats,
        on_progress: Callable[[int], None],
    ):
        self.index, self.files, self.comm = index, files, comm
        self.shards, self.dtypes, self.done, self.on_progress = shards, dtypes, done, on_progress
        self.room = torch.empty(BLOCK_NBYTES, dtype=torch.uint8)

    def run(self, plan: LoadPlan, rank: int) -> None:
        for transfer, before, after in plan.hops(rank):
            self._transfer(transfer, rank, before, after)

    def _transfer(
        self, transfer: Transfer, rank: int, before: int | None, after: int | None
    ) -> None:
        stored = self.index[transfer.key]
        wire = _wire(stored.torch_dtype, self.dtypes[transfer.name])
        at = next((at for owner, at in transfer.owners if owner == rank), None)
        for block in split_into_blocks(
            transfer.source.size, max(1, BLOCK_NBYTES // stored.torch_dtype.itemsize)
        ):
            zeros = (0,) * len(block.start)
            buffer = target = None
            if at is not None:
                lead = len(at) - len(block.start)
                place: tuple[Any, ...] = (*at[:lead], *block.moved(zeros, at[lead:]).slices())
                target = self.shards[transfer.name][place]
                buffer = target if _can_receive(target, wire) else None
            source = block.moved(zeros, transfer.source.start)
            buffer = self._fetch(stored, source, wire, buffer, before)
            self._pass_on(buffer, after)
            if target is not None:
                if buffer is not target:
                    target.copy_(buffer)
                self.on_progress(target.nbytes)

    def _fetch(
        self,
        stored: StoredTensor,
        source: Region,
        wire: torch.dtype,
        buffer: torch.Tensor | None,
        before: int | None,
    ) -> torch.Tensor:
        """One block from the file or from a rank, in `buffer` if there is one."""
        if buffer is None or (before is None and wire != stored.torch_dtype):
            buffer = self._scratch(source, stored.torch_dtype if before is None else wire)
        if before is None:
            self.files.read(stored, source, buffer)
            return buffer.to(wire)
        assert self.comm is not None
        self.done.nbytes_received += buffer.nbytes
        self.comm.recv(_raw(buffer), before)
        return buffer

    def _scratch(self, box: Region, dtype: torch.dtype) -> torch.Tensor:
        """The same memory every time: what an allocator keeps would count against the peak."""
        return self.room[: box.numel * dtype.itemsize].view(dtype).view(box.size)

    def _pass_on(self, buffer: torch.Tensor, after: int | None) -> None:
        if after is not None:
            assert self.comm is not None
            self.comm.send(_raw(buffer), after)
            self.done.nbytes_sent += buffer.nbytes


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, whatever its dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def _can_receive(target: torch.Tensor, wire: torch.dtype) -> bool:
    """Can bytes of this dtype be written straight into the shard?"""
    return target.is_contiguous() and target.dtype == wire and target.device.type == "cpu"


def _wire(stored: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    """What travels when both differ: the narrower one."""
    return wanted if wanted.itemsize < stored.itemsize else stored
