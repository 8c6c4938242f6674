"""Accelerate's names give Accelerate's answers in one process, and the cluster's for its places."""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading

import accelerate
import pytest
import safetensors.torch
import torch
from accelerate import utils
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import drumline
import launcher
from coordinator import Coordinator
from drumline.planner import memory
from drumline.planner.model_profile import layer_names

NAMES = [
    "get_max_memory",
    "get_balanced_memory",
    "infer_auto_device_map",
    "dispatch_model",
    "load_checkpoint_and_dispatch",
]


def theirs(name):
    return getattr(utils, name, None) or getattr(accelerate, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_function_has_the_signature_that_accelerate_gives_it(name):
    mine = inspect.signature(getattr(drumline, name)).parameters
    assert list(mine.items()) == list(inspect.signature(theirs(name)).parameters.items())


class Stack(nn.Module):
    """Layers of the given widths, two of them tied if asked."""

    def __init__(self, widths, tied):
        super().__init__()
        self.embed = nn.Linear(widths[0], 3, device="meta")
        self.blocks = nn.Sequential(*[nn.Linear(3, width, device="meta") for width in widths])
        self.head = nn.Linear(widths[0], 3, device="meta")
        if tied:
            self.head.weight = self.embed.weight


stacks = st.builds(Stack, st.lists(st.integers(1, 40), min_size=1, max_size=6), st.booleans())
memories = st.lists(st.integers(0, 900), max_size=4).map(
    lambda sizes: {**dict(enumerate(sizes)), "cpu": 5000}
)


@settings(max_examples=80, deadline=None)
@given(stacks, memories, st.booleans(), st.booleans())
def test_maps_and_memory_are_those_of_accelerate(model, max_memory, low_zero, fallback):
    no_split = ["Linear"]
    mine = drumline.get_balanced_memory(model, max_memory, no_split, low_zero=low_zero)
    assert mine == utils.get_balanced_memory(model, max_memory, no_split, low_zero=low_zero)
    found, expected = [
        outcome(infer, model, dict(mine), no_split, fallback_allocation=fallback)
        for infer in (drumline.infer_auto_device_map, utils.infer_auto_device_map)
    ]
    assert found == expected


def outcome(infer, *arguments, **options):
    """The map in its order, or the error: for some of these models Accelerate has one."""
    try:
        return list(infer(*arguments, **options).items())
    except Exception as error:
        return repr(error)


@given(st.dictionaries(st.sampled_from(["cpu", "disk"]), st.sampled_from(["1GiB", "2GB", 3])))
def test_sizes_are_read_as_accelerate_reads_them(given):
    assert drumline.get_max_memory(dict(given)) == utils.get_max_memory(dict(given))


def test_a_coordinator_is_asked_for_the_room_of_all_ranks(ranks, monkeypatch):
    free_nbytes = 4 * (900 + memory.CPU_RESERVE_NBYTES)
    monkeypatch.setattr(memory, "free_memory_by_limit", lambda: {"machine": free_nbytes})

    def rank(info):
        with Coordinator(info) as coor:
            return drumline.get_max_memory(coor)

    assert ranks(rank, 4) == [{(rank, "cpu"): 900 for rank in range(4)}] * 4


def test_places_of_ranks_are_planned_for_by_the_cluster():
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False, device="meta") for _ in range(4)])
    max_memory = {(0, "cpu"): "200", (1, "cpu"): 200}
    found = drumline.infer_auto_device_map(model, max_memory)
    assert found.places == {str(n): (n // 2, "cpu") for n in range(4)}


def test_sizes_by_place_are_read_and_a_rank_alone_is_its_cpu():
    found = drumline.get_max_memory({1: "2KB", (0, "disk"): "1KiB", (0, "cpu"): 3})
    assert list(found.items()) == [((0, "cpu"), 3), ((0, "disk"), 1024), ((1, "cpu"), 2000)]


def test_a_device_beside_places_is_one_of_rank_0():
    sizes = {(0, "cpu"): 3, (1, "cpu"): 4}
    assert drumline.get_max_memory({(1, "cpu"): 4, "cpu": 3}) == sizes


def test_options_as_they_are_if_not_given_are_as_good_as_not_given():
    model, max_memory = nn.Linear(2, 2), {(0, "cpu"): 900, 1: 900}
    plain = {"no_split_module_classes": None, "clean_result": True, "verbose": False}
    assert drumline.infer_auto_device_map(model, max_memory=max_memory, **plain).ranks == [0]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("infer_auto_device_map", {"fallback_allocation": True}),
        ("infer_auto_device_map", {"dtype": torch.float16}),
        ("infer_auto_device_map", {"special_dtypes": {"weight": torch.float16}}),
        ("get_balanced_memory", {}),
    ],
)
def test_an_option_that_the_cluster_does_not_know_is_refused(name, options):
    with pytest.raises(TypeError, match=next(iter(options), "places of several ranks")):
        getattr(drumline, name)(nn.Linear(2, 2), {(0, "cpu"): 900}, **options)


class Three(nn.Module):
    """What Accelerate's own tests dispatch, with buffers of both kinds and a tie."""

    def __init__(self, tied=False):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 3)
        self.linear3 = nn.Linear(3, 4)
        self.register_buffer("shift", torch.ones(3) / 7, persistent=False)
        if tied:
            self.linear3.weight = self.linear1.weight

    def forward(self, x):
        x = self.linear2(self.batchnorm(self.linear1(x))) + self.shift
        return self.linear3(x)


INPUT = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
MAPS = [
    {"linear1": 0, "batchnorm": 1, "linear2": 0, "linear3": 0, "shift": 0},
    {"": 0, "linear1": 1, "batchnorm": 1, "linear2": 2, "linear3": 1},
    {"": (0, "cpu"), "batchnorm": (2, "cpu")},
    "auto",
]


def over_ranks(work, nprocs=3):
    """What work() returns on the master."""
    return launcher.launch(work, nprocs=nprocs, launcher="threads", timeout_s=60)[0]


def three(tied):
    torch.manual_seed(0)
    return Three(tied).eval()


building = threading.Lock()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("device_map", MAPS)
def test_a_module_of_any_kind_is_dispatched_over_ranks(device_map, tied):
    expected = three(tied)(INPUT)

    def rank():
        with building:
            model = three(tied)
        with torch.no_grad(), drumline.dispatch_model(model, device_map) as spread:
            return spread(INPUT)

    assert torch.equal(over_ranks(rank), expected)


def test_a_module_in_training_mode_is_in_evaluation_mode_on_all_ranks():
    """Other ranks went on with the statistics of their batch, whatever eval() said on rank 0."""

    def rank():
        with building:
            model = three(False).train()
        with torch.no_grad(), drumline.dispatch(model, MAPS[0]) as spread:
            assert not spread.training
            return spread.eval()(INPUT)

    assert torch.equal(over_ranks(rank, 2), three(False)(INPUT))


ON_DISK = {"linear1": "disk", "batchnorm": (1, "disk"), "linear2": 2, "linear3": "cpu", "shift": 0}


@pytest.mark.parametrize("kind", ["own", "other", "meta"])
def test_modules_of_any_rank_stay_on_disk_and_are_read_when_they_run(kind, tmp_path):
    """With a checkpoint, whose weights they have, whatever the model has had before."""
    plain = three(False)
    checkpoint = tmp_path / "model.safetensors"
    safetensors.torch.save_file(plain.state_dict(), checkpoint)
    folder = tmp_path / "offload"
    folder.mkdir()

    def rank():
        with building:
            model = three(False)
            if kind == "other":
                model = Three().eval()
            elif kind == "meta":
                with accelerate.init_empty_weights():
                    model = Three().eval()
        with torch.no_grad():
            if kind != "own":
                given = {"offload_folder": folder, "preload_module_classes": ["Three"]}
                drumline.load_checkpoint_and_dispatch(model, checkpoint, ON_DISK, **given)
            else:
                drumline.dispatch_model(model, ON_DISK, offload_dir=folder)
            with model:
                assert model.linear1.weight.is_meta and not model.linear3.weight.is_meta
                return [model(INPUT) for _ in range(2)]

    for found in over_ranks(rank):
        assert torch.equal(found, plain(INPUT))
    written = ["batchnorm.rank1.safetensors", "linear1.rank0.safetensors"]
    files = sorted(file.name for file in folder.iterdir())
    assert files == (written if kind == "own" else [])


def test_a_weight_whose_columns_lie_together_stays_on_disk_too(tmp_path):
    """A ValueError of safetensors: "non contiguous tensor"."""

    def rank():
        with building:
            model = three(False)
        model.linear1.weight.data = model.linear1.weight.data.T.contiguous().T
        with torch.no_grad(), drumline.dispatch(model, ON_DISK, offload_dir=tmp_path) as spread:
            return spread(INPUT)

    assert torch.equal(over_ranks(rank), three(False)(INPUT))


@pytest.mark.parametrize("device_map", [MAPS[0], ON_DISK])
def test_a_module_without_values_is_refused_by_name(device_map, tmp_path):
    """A NotImplementedError of torch."""

    def rank():
        with building, torch.device("meta"):
            model = three(False)
        with pytest.raises(drumline.PlanError, match=r"is on meta.*checkpoint_and"):
            drumline.dispatch_model(model, device_map, offload_dir=tmp_path)

    over_ranks(rank)


def test_modules_that_are_to_stay_on_disk_need_a_folder():
    def rank():
        with pytest.raises(drumline.DrumlineError, match="give offload_dir="):
            drumline.dispatch_model(three(False), ON_DISK)

    over_ranks(rank)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("device_map", MAPS)
def test_a_checkpoint_is_loaded_into_a_module_over_ranks(device_map, meta, tmp_path):
    plain = three(False)
    safetensors.torch.save_file(plain.state_dict(), tmp_path / "model.safetensors")

    def rank():
        with building:
            torch.manual_seed(launcher.current().rank + 5)
            with accelerate.init_empty_weights() if meta else contextlib.nullcontext():
                model = Three().eval()
        found = drumline.load_checkpoint_and_dispatch(model, tmp_path, device_map)
        with torch.no_grad(), found as spread:
            assert isinstance(device_map, str) or spread.linear2.weight.is_meta == (
                spread.device_map.places["linear2"][0] != 0
            )
            return spread(INPUT)

    assert torch.equal(over_ranks(rank), plain(INPUT))


def test_a_transformers_model_on_meta_is_loaded_over_ranks(checkpoints):
    plain, path = checkpoints.llama()
    ids = torch.arange(3, 12)[None]

    def rank():
        with building, torch.device("meta"):
            model = type(plain)(plain.config)
        max_memory = [1 << 30] * 2
        found = drumline.load_checkpoint_and_dispatch(model, path, "auto", max_memory=max_memory)
        with found as spread:
            return spread.generate(ids, max_new_tokens=5, do_sample=False)

    assert torch.equal(over_ranks(rank, 2), plain.generate(ids, max_new_tokens=5, do_sample=False))


def test_a_transformers_model_is_not_split_within_the_classes_that_are_given(checkpoints):
    """They were dropped, and its layers went to both ranks."""
    plain, path = checkpoints.llama()
    ids = torch.arange(3, 12)[None]

    def rank():
        with building, torch.device("meta"):
            model = type(plain)(plain.config)
        options = {"max_memory": [1 << 30] * 2, "no_split_module_classes": ["LlamaModel"]}
        with drumline.load_checkpoint_and_dispatch(model, path, "balanced", **options) as spread:
            places = spread.device_map.places
            return places, spread.generate(ids, max_new_tokens=5, do_sample=False)

    places, tokens = over_ranks(rank, 2)
    assert {*places} == {"model", "lm_head"}
    assert len([*layer_names(plain, ["GPTJBlock"])]) == plain.config.num_hidden_layers
    assert torch.equal(tokens, plain.generate(ids, max_new_tokens=5, do_sample=False))


def test_a_transformers_model_keeps_its_own_config_over_ranks(checkpoints):
    """It was that of the checkpoint, which said of other layers and another base of positions."""
    plain, path = checkpoints.llama()
    config = copy.deepcopy(plain.config)
    config.num_hidden_layers, config.rope_parameters["rope_theta"] = 2, 100.0
    expected, ids = type(plain).from_pretrained(path, config=config), torch.arange(3, 12)[None]

    def rank():
        with building, torch.device("meta"):
            model = type(plain)(config)
        sizes = {(0, "cpu"): 1 << 30, (1, "cpu"): 1 << 30}
        device_map = drumline.infer_auto_device_map(model, max_memory=sizes)
        spreading = drumline.load_checkpoint_and_dispatch(model, path, device_map, sizes)
        with torch.no_grad(), spreading as spread:
            return spread(ids).logits

    assert torch.equal(over_ranks(rank, 2), expected(ids).logits)


def test_weights_are_loaded_into_a_module_as_the_dtype_that_is_given(tmp_path):
    plain = three(False)
    safetensors.torch.save_file(plain.state_dict(), tmp_path / "model.safetensors")

    def rank():
        with building:
            model = three(False)
        model.linear1.register_buffer("computed", torch.ones(1), persistent=False)
        options = {"dtype": "float64"}
        spreading = drumline.load_checkpoint_and_dispatch(model, tmp_path, MAPS[0], **options)
        assert (
            model.linear1.computed.dtype == torch.float32
        )  # as Accelerate, which casts what it loads
        with torch.no_grad(), spreading as spread:
            return spread(INPUT.double())

    assert torch.equal(over_ranks(rank), three(False).double()(INPUT.double()))


def test_in_one_process_it_is_the_dispatch_of_accelerate(tmp_path):
    model = three(False)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = drumline.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert found is model and hasattr(model, "_hf_hook")
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    again = drumline.load_checkpoint_and_dispatch(Three().eval(), tmp_path, {"": "cpu"})
    assert torch.equal(again(INPUT), three(False)(INPUT))


def test_a_map_of_another_module_is_refused():
    def rank():
        with pytest.raises(drumline.PlanError, match="lineal"):
            drumline.dispatch_model(three(False), {"": 0, "lineal": 1})
        with pytest.raises(drumline.PlanError, match="device_map=1"):
            drumline.dispatch_model(three(False), 1)
        with pytest.raises(drumline.PlanError, match="rank 1: max_memory names 'cuda0'"):
            drumline.dispatch(three(False), max_memory={(1, "cuda0"): "1GB"})

    over_ranks(rank, 2)


@pytest.mark.parametrize("options", [{"skip_keys": "x"}, {"main_device": 1}])
def test_what_cannot_be_honoured_over_ranks_is_refused(options):
    """main_device=1 was ignored, for 1 is as good as True."""

    def rank():
        with pytest.raises(TypeError, match=next(iter(options))):
            drumline.dispatch_model(three(False), {"": 0}, **options)

    over_ranks(rank, 2)
