"""The boxes of all ranks tile the tensor, and are what torch itself would cut."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from drumline.checkpoint.model_tensors import dtensor_splits
from drumline.core.mesh import Mesh, read_mesh
from drumline.core.shards import ShardSpec, local_shape, owned_regions, split_into_blocks
from drumline.errors import PlanError

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
sizes = st.lists(st.integers(1, 3), min_size=1, max_size=3)
shapes = st.lists(st.integers(1, 11), min_size=1, max_size=3)


@st.composite
def cuts(draw):
    """A mesh, a shape, and splits of it: uneven, strided, several axes on one dimension."""
    mesh = Mesh(dict(zip(draw(st.permutations(AXES)), draw(sizes), strict=False)))
    shape = tuple(draw(shapes))
    axes = draw(st.lists(st.sampled_from(sorted(mesh.axes)), unique=True))
    dims, factors = st.integers(-len(shape), len(shape) - 1), st.integers(1, 3)
    splits = tuple(ShardSpec(axis, draw(dims), draw(factors)) for axis in axes)
    return mesh, shape, splits


def shard(whole, splits, mesh, rank):
    """The shard that the boxes of a rank make."""
    out = torch.full(local_shape(whole.shape, splits, mesh, rank), -1)
    for own in owned_regions(whole.shape, splits, mesh, rank):
        place = tuple(slice(a, a + n) for a, n in zip(own.at, own.region.size, strict=True))
        out[place] = whole[own.region.slices()]
    return out


@settings(max_examples=150, deadline=None)
@given(cuts())
def test_owned_regions_tile_the_tensor_once_for_each_replica(case):
    mesh, shape, splits = case
    count = torch.zeros(shape, dtype=torch.int)
    for rank in mesh.ranks:
        for own in owned_regions(shape, splits, mesh, rank):
            count[own.region.slices()] += 1
    cut = {split.axis for split in splits}
    replicas = torch.tensor([n for axis, n in mesh.axes.items() if axis not in cut]).prod()
    assert torch.equal(count, torch.full_like(count, int(replicas)))


@settings(max_examples=150, deadline=None)
@given(cuts())
def test_every_element_of_a_shard_is_filled(case):
    mesh, shape, splits = case
    whole = torch.arange(torch.tensor(shape).prod()).reshape(shape)
    for rank in mesh.ranks:
        assert (shard(whole, splits, mesh, rank) >= 0).all()


@settings(max_examples=100, deadline=None)
@given(shapes, st.integers(1, 5), st.integers(0, 4), st.data())
def test_one_split_is_a_chunk_of_torch(shape, count, index, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    whole = torch.arange(torch.tensor(shape).prod()).reshape(shape)
    chunks = list(whole.chunk(count, dim))
    empty = whole.narrow(dim, 0, 0)
    expected = [*chunks, *[empty] * count][:count][index % count]
    mesh = Mesh({"tp": count})
    assert torch.equal(shard(whole, (ShardSpec("tp", dim),), mesh, index % count), expected)


PLACEMENTS = [
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Replicate()),
    (Replicate(), Shard(1)),
    (_StridedShard(0, split_factor=2), Shard(0)),
    (_StridedShard(1, split_factor=2), Shard(0)),
    (Replicate(), _StridedShard(0, split_factor=2)),
]


@pytest.fixture
def as_rank():
    """Become one rank of several, without the others, and without a message."""

    def become(rank, world_size=4):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    yield become
    dist.destroy_process_group()


def test_owned_regions_are_the_local_shards_of_dtensor(as_rank):
    mesh = Mesh({"dp_shard": 2, "tp": 2})
    for rank in range(4):
        as_rank(rank)
        theirs = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp_shard", "tp"))
        for placements, shape in itertools.product(PLACEMENTS, [(8, 12), (9, 5), (7, 3), (1, 2)]):
            whole = torch.arange(shape[0] * shape[1]).reshape(shape)
            expected = distribute_tensor(whole, theirs, placements, src_data_rank=None)
            splits = tuple(
                ShardSpec(axis, p.dim, getattr(p, "split_factor", 1))
                for axis, p in zip(mesh.axes, placements, strict=True)
                if not p.is_replicate()
            )
            found = shard(whole, splits, mesh, rank)
            assert torch.equal(found, expected.to_local()), (placements, shape, rank)


def fsdp_over_tp(sizes, outputs):
    """A layer on meta, cut by tensor parallelism and then by FSDP2."""
    names = ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    with torch.device("meta"):
        layer = nn.Linear(3, outputs)
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    return mesh, fully_shard(layer, mesh=mesh["dp_replicate", "dp_shard"])


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 2, 2), (1, 4, 2), (2, 3, 2), (1, 2, 3)], ids=str)
def test_the_shards_of_fsdp_over_tensor_parallel_are_parts_of_parts(as_rank, sizes):
    """Nine rows over two by four ranks were refused: no equal pieces make the parts of both."""
    world_size = math.prod(sizes)
    whole = torch.arange(9)
    for rank in range(world_size):
        as_rank(rank, world_size)
        theirs, layer = fsdp_over_tp(sizes, 9)
        mesh = read_mesh(theirs, world_size)
        at = mesh.coordinate(rank)
        found = shard(whole, dtensor_splits("bias", layer.bias, mesh), mesh, rank)
        rows = chunks(whole, sizes[2])[at["tp"]]
        assert torch.equal(found, chunks(rows, sizes[1])[at["dp_shard"]])
        assert found.shape == layer.bias._local_tensor.shape


def test_a_device_mesh_whose_ranks_descend_is_refused(as_rank):
    """torch sorts the ranks of a group: every logit was wrong, and nothing said so."""
    as_rank(0, 4)
    theirs = DeviceMesh("cpu", [[2, 0], [3, 1]], mesh_dim_names=("tp", "dp_shard"))
    with torch.device("meta"):
        layer = fully_shard(nn.Linear(3, 4), mesh=theirs["dp_shard"])
    with pytest.raises(PlanError, match=r"weight is split along 'dp_shard'.*do not ascend"):
        dtensor_splits("weight", layer.weight, read_mesh(theirs, 4))


def chunks(whole, count):
    """As many as are asked for: torch.chunk leaves out what would be empty."""
    found = list(whole.chunk(count))
    return found + [whole[:0]] * (count - len(found))


@settings(max_examples=100, deadline=None)
@given(shapes, st.integers(1, 40))
def test_blocks_tile_a_box_and_none_is_larger_than_the_limit(shape, limit):
    count = torch.zeros(shape, dtype=torch.int)
    for block in split_into_blocks(shape, limit):
        part = count[block.slices()]
        part += 1
        assert block.numel <= limit
        assert part.is_contiguous()
    assert (count == 1).all()


def test_a_split_along_an_axis_that_is_not_in_the_mesh_is_refused():
    with pytest.raises(PlanError, match="tp"):
        owned_regions((4, 4), (ShardSpec("tp", 0),), Mesh({"dp_shard": 2}), 0)
    with pytest.raises(PlanError, match="dimension 2"):
        owned_regions((4, 4), (ShardSpec("tp", 2),), Mesh({"tp": 2}), 0)
