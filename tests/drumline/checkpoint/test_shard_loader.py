"""Loading over a mesh gives every rank the slices of a full load, from any reader."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import drumline
from coordinator import Coordinator
from drumline import CheckpointError, PlanError, ShardSpec
from drumline.checkpoint.safetensors_index import StoredTensor, TensorReader, read_index
from drumline.checkpoint.shard_plan import TensorRequest, plan_loading, reader_ranks, whole_tensor
from drumline.core.cpu.hugepages import allocate_hugepages
from drumline.core.mesh import Mesh
from drumline.core.shards import Region, local_shape, owned_regions

ROOT = Path(__file__).parents[3]
READERS = ["each", "node", "rank0"]
MESHES = [
    {"tp": 4},
    {"dp_shard": 2, "tp": 2},
    {"tp": 2, "dp_replicate": 2},
    {"dp_replicate": 2, "dp_shard": 2},
]


class Small(nn.Module):
    """Odd sizes, a tie, a persistent buffer and one that is computed."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = nn.Embedding(13, 6, dtype=dtype)
        self.up = nn.Linear(6, 10, dtype=dtype)
        self.head = nn.Linear(6, 13, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones((), dtype=dtype))
        self.register_buffer("steps", torch.arange(3), persistent=False)


def splits_over(mesh):
    """A split for every axis, several on one dimension where there are several."""
    axes = [axis for axis in mesh if axis != "dp_replicate"]
    splits = {"embed.weight": [], "up.weight": [], "up.bias": []}
    for number, axis in enumerate(axes):
        splits["embed.weight"].append(ShardSpec(axis, 0))
        splits["up.weight"].append(ShardSpec(axis, number % 2, factor=2))
        splits["up.bias"].append(ShardSpec(axis, 0, factor=2))
    return {name: tuple(specs) for name, specs in splits.items()}


def sliced(whole, splits, mesh, rank):
    out = torch.empty(local_shape(whole.shape, splits, mesh, rank), dtype=whole.dtype)
    for own in owned_regions(whole.shape, splits, mesh, rank):
        out[Region(own.at, own.region.size).slices()] = whole[own.region.slices()]
    return out


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Small's weights in two files."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    state = Small().state_dict()
    state["scale"] = torch.tensor(0.5)
    save_file({"embed.weight": state["embed.weight"]}, folder / "a.safetensors")
    rest = {name: state[name] for name in ("up.weight", "up.bias", "scale")}
    save_file(rest, folder / "b.safetensors")
    return folder


def loaded(path, info, mesh, dtype=torch.float32, **options):
    with torch.device("meta"):
        model = Small(dtype)
    model.steps = torch.arange(3)
    with Coordinator(info, timeout_s=30) as coor:
        done = drumline.load_into(model, path, coor, mesh=mesh, **options)
    return model, done


def state_of(folder):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_shard_equals_a_slice_of_a_full_load(ranks, checkpoint, sizes, reader):
    splits, mesh, full = splits_over(sizes), Mesh(sizes), state_of(checkpoint)
    found = ranks(
        lambda info: loaded(checkpoint, info, sizes, splits=splits, reader=reader), 4, [2, 2]
    )
    for rank, (model, _) in enumerate(found):
        assert model.head.weight is model.embed.weight
        for name, tensor in full.items():
            expected = sliced(tensor, splits.get(name, ()), mesh, rank)
            assert torch.equal(model.state_dict()[name], expected), (rank, name)


@pytest.mark.parametrize("readers", [("each", "rank0"), ("rank0", "each")])
def test_ranks_with_different_readers_all_raise(ranks_or_errors, checkpoint, readers):
    """One found nothing to read in what rank 0 told, and the other waited for it."""

    def rank(info):
        return loaded(checkpoint, info, {"dp_shard": 2}, reader=readers[info.rank])

    for error in ranks_or_errors(rank, 2):
        assert "the same model, mesh and reader" in str(error)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_each_rank_reads_its_share_and_sends_nothing(ranks, checkpoint, sizes):
    splits = splits_over(sizes)
    for _, done in ranks(lambda info: loaded(checkpoint, info, sizes, splits=splits), 4):
        assert (done.nbytes_read, done.nbytes_sent) == (done.share, 0)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_rank0_alone_reads_each_byte_once_and_what_is_sent_is_the_sum_of_the_shards(
    ranks, checkpoint, sizes, tmp_path
):
    def rank(info):
        path = checkpoint if info.rank == 0 else tmp_path / "nowhere"
        return loaded(path, info, sizes, splits=splits_over(sizes), reader="rank0")[1]

    done = ranks(rank, 4)
    full = sum(tensor.nbytes for tensor in state_of(checkpoint).values())
    assert done[0].nbytes_read == full
    assert [one.nbytes_read for one in done[1:]] == [0, 0, 0]
    assert done[0].nbytes_sent <= full, "a box that two ranks share left the reader twice"
    assert sum(one.nbytes_sent for one in done) == sum(one.share for one in done[1:])
    assert [one.nbytes_received for one in done[1:]] == [one.share for one in done[1:]]


def test_one_rank_of_each_node_reads(ranks, checkpoint):
    def rank(info):
        return loaded(checkpoint, info, {"tp": 4}, splits=splits_over({"tp": 4}), reader="node")[1]

    done = ranks(rank, 4, [2, 2])
    assert [one.nbytes_read > 0 for one in done] == [True, False, True, False]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_is_converted_on_the_way(ranks, checkpoint, reader, dtype):
    full = state_of(checkpoint)

    def rank(info):
        return loaded(
            checkpoint, info, {"tp": 2}, dtype, splits=splits_over({"tp": 2}), reader=reader
        )

    found = ranks(rank, 2)
    for at, (model, _) in enumerate(found):
        expected = sliced(
            full["up.weight"], splits_over({"tp": 2})["up.weight"], Mesh({"tp": 2}), at
        )
        assert torch.equal(model.up.weight, expected.to(dtype))
    if reader == "rank0" and dtype == torch.bfloat16:
        assert found[0][1].nbytes_sent == found[1][1].share, "sent wider than needed"


DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.int8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_arrives_bit_for_bit(ranks, tmp_path, dtype):
    whole = (torch.arange(35).reshape(7, 5) - 17).to(dtype)
    save_file({"weight": whole}, tmp_path / "w.safetensors")

    def rank(info):
        model = nn.Module()
        model.register_buffer("weight", torch.empty(7, 5, dtype=dtype, device="meta"))
        with Coordinator(info, timeout_s=30) as coor:
            splits = {"weight": (ShardSpec("tp", 1),)}
            drumline.load_into(model, tmp_path, coor, mesh={"tp": 3}, reader="rank0", splits=splits)
        return model.weight

    parts = [part.view(torch.uint8).reshape(7, -1) for part in ranks(rank, 3)]
    assert torch.equal(torch.cat(parts, 1), whole.view(torch.uint8).reshape(7, -1))


def test_numbers_that_share_a_byte_arrive_bit_for_bit(ranks, tmp_path):
    """The file counts numbers of four bits, and torch the bytes that hold two of them."""
    whole = torch.arange(42, dtype=torch.uint8).reshape(7, 6)
    save_file({"weight": whole.view(torch.float4_e2m1fn_x2)}, tmp_path / "w.safetensors")

    def rank(info):
        model = nn.Module()
        empty = torch.empty(7, 6, dtype=torch.float4_e2m1fn_x2, device="meta")
        model.register_buffer("weight", empty)
        with Coordinator(info, timeout_s=30) as coor:
            splits = {"weight": (ShardSpec("tp", 1),)}
            drumline.load_into(model, tmp_path, coor, mesh={"tp": 3}, reader="rank0", splits=splits)
        return model.weight.view(torch.uint8)

    assert torch.equal(torch.cat(ranks(rank, 3), 1), whole)


@pytest.mark.parametrize("reader", READERS)
def test_tensors_larger_than_a_block_arrive_in_blocks(ranks, tmp_path, monkeypatch, reader):
    monkeypatch.setattr("drumline.checkpoint.plan_executor.BLOCK_NBYTES", 64)
    torch.manual_seed(0)
    whole = torch.randn(9, 4, 23)
    save_file({"weight": whole}, tmp_path / "w.safetensors")
    splits = {"weight": (ShardSpec("dp_shard", 0), ShardSpec("tp", 2, factor=2))}
    mesh = Mesh({"dp_shard": 2, "tp": 2})

    def rank(info):
        model = nn.Module()
        model.weight = nn.Parameter(torch.empty(9, 4, 23, device="meta"))
        with Coordinator(info, timeout_s=30) as coor:
            drumline.load_into(model, tmp_path, coor, mesh=mesh, reader=reader, splits=splits)
        return model.weight

    for at, found in enumerate(ranks(rank, 4)):
        assert torch.equal(found, sliced(whole, splits["weight"], mesh, at))


def test_ranks_of_another_stage_leave_a_tensor_on_meta(ranks, checkpoint):
    only = {"up.weight": {"pp": 1}, "up.bias": {"pp": 1}}
    found = ranks(lambda info: loaded(checkpoint, info, {"pp": 2}, only=only, reader="rank0"), 2)
    assert [model.up.weight.is_meta for model, _ in found] == [True, False]
    assert not found[0][0].embed.weight.is_meta


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_a_box_read_from_a_file_is_a_slice(tmp_path_factory, shape, data):
    file = tmp_path_factory.mktemp("box") / "w.safetensors"
    whole = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
    save_file({"other": torch.ones(3), "weight": whole}, file)
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True))
    out = torch.empty(size, dtype=whole.dtype)
    with TensorReader(file) as reader:
        reader.read(read_index(file)["weight"], Region(start, size), out)
    assert torch.equal(out, whole[Region(start, size).slices()])
    assert reader.nbytes == out.nbytes


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"mesh": {"tp": 3}}, PlanError, "3 places"),
        ({"mesh": {"dp_shard": 2}}, PlanError, "'tp'"),
        ({"reader": "all"}, PlanError, "reader"),
    ],
)
def test_an_impossible_request_raises_on_every_rank(
    ranks_or_errors, checkpoint, options, error, says
):
    options = {"mesh": {"tp": 2}, "splits": splits_over({"tp": 2}), **options}
    found = ranks_or_errors(lambda info: loaded(checkpoint, info, **options), 2)
    assert all(isinstance(one, error) and says in str(one) for one in found), found


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_the_plan_for_one_rank_is_its_part_of_the_whole_plan(sizes, reader):
    """A rank that planned for all others would take longer the more there are."""
    shapes = {"embed": (13, 6), "up": (10, 6), "bias": (10,)}
    index = {name: StoredTensor("a", 8, "F32", shape) for name, shape in shapes.items()}
    axes = [axis for axis in sizes if axis != "dp_replicate"]
    splits = tuple(ShardSpec(axis, 0, factor=2) for axis in axes)
    wanted = {
        name: TensorRequest(shape, 4, whole_tensor(name, shape), splits)
        for name, shape in shapes.items()
    }
    readers = reader_ranks(reader, [[0, 1], [2, 3]])
    everything = plan_loading(wanted, index, Mesh(sizes), readers)
    for rank in range(4):
        own = plan_loading(wanted, index, Mesh(sizes), readers, rank)
        assert list(own.hops(rank)) == list(everything.hops(rank))
        if reader == "each":
            assert {transfer.route for transfer in own.transfers} == {(rank,)}


def test_hugepage_tensors_are_ordinary_tensors_that_do_not_overlap():
    """Small ones, large ones, none at all, and more than share a mapping."""
    kinds = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool]
    shapes = [(), (0, 3), (7,), (1031, 4099), (3, 5), (1031, 4099), (2, 1, 513)]
    wishes = {
        f"{number} {dtype}": (shape, dtype, "cpu")
        for number, shape in enumerate(shapes)
        for dtype in kinds
    }
    wishes["elsewhere"] = ((4, 4), torch.float32, "meta")
    found = allocate_hugepages(wishes)
    assert found.keys() == wishes.keys() and found["elsewhere"].is_meta
    del found["elsewhere"]
    for number, (name, tensor) in enumerate(found.items()):
        shape, dtype, _ = wishes[name]
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
        assert tensor.data_ptr() % 64 == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.view(torch.uint8).fill_(number) if shape else tensor.fill_(1)
    for number, (name, tensor) in enumerate(found.items()):
        expected = number if tensor.dim() else 1
        seen = tensor.view(torch.uint8) if tensor.dim() else tensor.float()
        assert bool((seen == expected).all()), name


def own_memory():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def test_hugepage_tensors_take_no_more_memory_than_their_bytes():
    """With huge pages of its own for each of them, a third of it would be for nothing."""
    before = own_memory()
    found = allocate_hugepages(
        {str(number): ((700, 1024), torch.float32, "cpu") for number in range(24)}
    )
    for tensor in found.values():
        tensor.fill_(1)
    took, share = own_memory() - before, sum(tensor.nbytes for tensor in found.values())
    assert took < 1.1 * share, (took, share)


def test_a_mesh_that_one_rank_has_wrong_is_an_error_on_every_rank(ranks_or_errors, checkpoint):
    """The others waited for the index of a rank that had gone."""
    meshes = [{"tp": 2}, {"tp": 3}]
    found = ranks_or_errors(lambda info: loaded(checkpoint, info, meshes[info.rank]), 2)
    assert all(isinstance(error, PlanError) for error in found), found
    assert "rank 1 (host" in str(found[0]) and "3 places" in str(found[0])


def test_a_model_that_one_rank_has_wrong_is_an_error_on_every_rank(ranks_or_errors, checkpoint):
    def rank(info):
        with torch.device("meta"):
            model = Small()
            if info.rank == 1:
                model.more = nn.Linear(2, 2)
        with Coordinator(info, timeout_s=30) as coor:
            drumline.load_into(model, checkpoint, coor, mesh={"tp": 3})

    found = ranks_or_errors(rank, 3)
    assert all(isinstance(one, CheckpointError) and "more.weight" in str(one) for one in found)
    assert "rank 1 (host" in str(found[2])


def damaged(folder, checkpoint, change):
    state = {name: tensor.clone() for name, tensor in state_of(checkpoint).items()}
    change(state)
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.pop("up.bias"), "missing"),
        (lambda state: state.update(extra=torch.ones(1)), "extra"),
        (lambda state: state.update({"up.bias": torch.ones(9)}), "up.bias"),
        (lambda state: state.update({"embed.weight": torch.ones(16, 6)}), "embed.weight [16, 6]"),
        (
            lambda state: state.update({"head.weight": torch.ones(13, 6)}),
            "embed.weight and head.weight are one",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_on_every_rank(
    ranks_or_errors, checkpoint, tmp_path, change, says
):
    folder = damaged(tmp_path, checkpoint, change)
    found = ranks_or_errors(lambda info: loaded(folder, info, {"tp": 2}, reader="rank0"), 2)
    assert all(isinstance(one, CheckpointError) and says in str(one) for one in found), found


def test_a_tie_that_is_stored_twice_with_one_value_is_loaded(ranks, checkpoint, tmp_path):
    def change(state):
        state["head.weight"] = state["embed.weight"].clone()

    folder = damaged(tmp_path, checkpoint, change)
    for model, _ in ranks(lambda info: loaded(folder, info, {"tp": 2}), 2):
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.head.weight, state_of(checkpoint)["embed.weight"])


def test_a_file_cut_short_is_refused_on_every_rank(ranks_or_errors, checkpoint, tmp_path):
    folder = damaged(tmp_path, checkpoint, lambda state: None)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    found = ranks_or_errors(lambda info: loaded(folder, info, {"tp": 2}), 2)
    assert all(isinstance(one, CheckpointError) for one in found), found


def test_ranks_with_different_files_all_raise(ranks_or_errors, checkpoint, tmp_path):
    other = damaged(tmp_path, checkpoint, lambda state: None)
    paths = [checkpoint, other]
    found = ranks_or_errors(lambda info: loaded(paths[info.rank], info, {"tp": 2}), 2)
    assert all(isinstance(one, CheckpointError) for one in found), found
    assert "[1]" in str(found[0])
