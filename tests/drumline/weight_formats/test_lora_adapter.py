"""A LoRA adapter is merged by each rank into its own layers, to the weights that peft makes."""

from __future__ import annotations

import json
import math
import random
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5EncoderModel
from transformers.pytorch_utils import Conv1D

import drumline
from coordinator import Coordinator
from drumline import CheckpointError
from drumline.checkpoint.json_files import read_json
from drumline.checkpoint.safetensors_index import StoredTensor, read_index
from drumline.checkpoint.shard_plan import whole_tensor
from drumline.checkpoint.source import CheckpointFiles
from drumline.planner.load_options import LoadOptions
from drumline.strategies.opening import describe_checkpoint
from drumline.weight_formats.lora_adapter import LoraAdapter, MergedWeight
from tests.drumline.checkpoint.test_copy_check import change_byte
from tests.drumline.conftest import GPT2

LINEAR = ("q_proj", "v_proj", "down_proj", "lm_head")


def make_adapter(folder, model, targets, dtype=torch.float32, r=4, **settings):
    """An adapter as peft saves it, with weights that change what the model says."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in targets:
            continue
        rows, columns = module.weight.shape
        infix = "lora_{}.weight"
        if isinstance(module, (Conv1D, torch.nn.Embedding)):
            rows, columns = columns, rows
        if isinstance(module, torch.nn.Embedding):
            infix = "lora_embedding_{}"
        for letter, shape in (("A", (r, columns)), ("B", (rows, r))):
            factor = torch.randn(shape, generator=generator) / 4
            tensors[f"base_model.model.{name}.{infix.format(letter)}"] = factor.to(dtype)
    content = {"peft_type": "LORA", "r": r, "lora_alpha": 6, "target_modules": [*targets]}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**content, **settings}))
    return {name.removeprefix("base_model.model."): factor for name, factor in tensors.items()}


def merge(model, tensors, scaling=6 / 4):
    """peft's merge, of one process."""
    with torch.no_grad():
        for name, a in tensors.items():
            if ".lora_A" not in name and ".lora_embedding_A" not in name:
                continue
            module = model.get_submodule(name.partition(".lora_")[0])
            update = tensors[name.replace("_A", "_B")].float() @ a.float()
            is_turned = isinstance(module, (Conv1D, torch.nn.Embedding))
            module.weight += (update.T if is_turned else update) * scaling
    return model


def greedy(model):
    return model.generate(torch.arange(3, 12)[None], max_new_tokens=8, do_sample=False).tolist()


def weights(model):
    return {n: p.clone() for n, p in model.named_parameters() if not p.is_meta}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_merges_its_layers_to_the_weights_of_one_process(
    checkpoints, on_master, tmp_path, dtype
):
    plain, path = checkpoints.llama()
    tensors = make_adapter(tmp_path / "adapter", plain, LINEAR, dtype=dtype)
    merged = merge(type(plain).from_pretrained(path, dtype=dtype), tensors)
    options = {"adapter": tmp_path / "adapter", "dtype": dtype}
    found, own = on_master(path, 3, lambda model: (greedy(model), weights(model)), **options)
    assert found == greedy(merged) != greedy(type(plain).from_pretrained(path, dtype=dtype))
    assert "lm_head.weight" in own
    assert all(torch.equal(own[name], merged.get_parameter(name)) for name in own)


def test_convolutions_and_embeddings_are_merged_the_other_way_round(
    checkpoints, on_master, tmp_path
):
    plain, path = checkpoints.make(
        "untied gpt2",
        "GPT2LMHeadModel",
        **{**GPT2, "tie_word_embeddings": False},
    )
    tensors = make_adapter(tmp_path / "adapter", plain, ("c_attn", "c_fc", "wte"))
    merged = merge(type(plain).from_pretrained(path), tensors)
    assert on_master(path, 2, greedy, adapter=tmp_path / "adapter") == greedy(merged)


def test_a_layer_that_is_sharded_is_merged_by_shards(checkpoints, ranks, tmp_path):
    plain, path = checkpoints.llama()
    tensors = make_adapter(tmp_path / "adapter", plain, LINEAR)
    merged = merge(type(plain).from_pretrained(path), tensors)

    def rank(info):
        torch.set_num_threads(1)
        with (
            Coordinator(info, timeout_s=30) as coor,
            drumline.load(path, coor=coor, tp=2, adapter=tmp_path / "adapter") as model,
        ):
            return greedy(model), weights(model)["model.layers.2.self_attn.q_proj.weight"]

    found = ranks(rank, 2)
    assert [tokens for tokens, _ in found] == [greedy(merged)] * 2
    whole = torch.cat([shard for _, shard in found])
    assert torch.equal(whole, merged.model.layers[2].self_attn.q_proj.weight)


def test_ranks_without_files_are_sent_what_rank_0_merges(checkpoints, ranks, tmp_path):
    plain, path = checkpoints.llama()
    tensors = make_adapter(tmp_path / "adapter", plain, LINEAR)
    expected = greedy(merge(type(plain).from_pretrained(path), tensors))

    def rank(info):
        torch.set_num_threads(1)
        folders = ("nowhere", "nowhere") if info.rank else (path, tmp_path / "adapter")
        with Coordinator(info, timeout_s=30) as coor:
            memory = [1 << 30] * 3
            try:
                options = {"adapter": folders[1], "max_memory": memory}
                with drumline.load(folders[0], coor=coor, **options) as model:
                    return greedy(model)
            except drumline.WorkerExit as served:
                return served.code

    assert ranks(rank, 3)[0] == expected


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [
        ({"use_rslora": True}, 6 / math.sqrt(4)),
        ({"alpha_pattern": {"layers.[0-9].self_attn.q_proj": 3}, "lora_alpha": 9}, None),
    ],
)
def test_the_scaling_is_that_of_its_config(checkpoints, on_master, tmp_path, settings, scaling):
    plain, path = checkpoints.llama()
    tensors = make_adapter(tmp_path / "adapter", plain, ("q_proj", "v_proj"), **settings)
    model = type(plain).from_pretrained(path)
    if scaling:
        merged = merge(model, tensors, scaling)
    else:
        queries = {name: factor for name, factor in tensors.items() if "q_proj" in name}
        others = {name: factor for name, factor in tensors.items() if "q_proj" not in name}
        merged = merge(merge(model, queries, 3 / 4), others, 9 / 4)
    assert on_master(path, 2, greedy, adapter=tmp_path / "adapter") == greedy(merged)


def test_tensors_that_were_trained_as_they_are_replace_those_of_the_model(
    checkpoints, on_master, tmp_path
):
    """modules_to_save and bias of peft's config."""
    plain, path = checkpoints.llama()
    make_adapter(tmp_path / "adapter", plain, ())
    head = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({"base_model.model.lm_head.weight": head}, file)
    changed = type(plain).from_pretrained(path)
    with torch.no_grad():
        changed.lm_head.weight.copy_(head)
    assert on_master(path, 2, greedy, adapter=tmp_path / "adapter") == greedy(changed)


@pytest.mark.parametrize("infix", [".base_layer", ""])
def test_tensors_that_are_saved_whole_beside_their_factors_are_what_these_are_added_to(
    checkpoints, on_master, tmp_path, infix
):
    """As peft saves an embedding with factors, and every bias for bias="all"."""
    config = {**GPT2, "tie_word_embeddings": False}
    plain, path = checkpoints.make("untied gpt2", "GPT2LMHeadModel", **config)
    tensors = make_adapter(tmp_path / "adapter", plain, ("c_attn", "wte"), bias="all")
    changed = type(plain).from_pretrained(path)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    saved = load_file(file)
    for name in ("transformer.wte.weight", "transformer.h.1.attn.c_attn.bias"):
        module, _, kind = name.rpartition(".")
        whole = torch.randn_like(parameter := changed.get_parameter(name).detach())
        parameter.copy_(whole)
        saved[f"base_model.model.{module}{infix}.{kind}"] = whole
    save_file(saved, file)
    merged = merge(changed, tensors)
    own = on_master(path, 1, weights, adapter=tmp_path / "adapter")
    assert all(torch.equal(own[name], merged.get_parameter(name)) for name in own)


def test_a_whole_tensor_of_another_shape_beside_its_factors_is_named(adapter_of):
    def change(tensors):
        tensors[QUERY.replace("lora_{}", "base_layer")] = torch.zeros(31, 32)

    with pytest.raises(CheckpointError, match=r"q_proj\.weight \[31, 32\] in place of \[32, 32\]"):
        adapter_of({}, change=change)


def loading(path, adapters, **options):
    def rank(info):
        with Coordinator(info, timeout_s=30) as coor:
            adapter = adapters[info.rank]
            memory = [1 << 30] * len(adapters)
            drumline.load(path, coor=coor, max_memory=memory, adapter=adapter, **options).close()

    return rank


@pytest.mark.parametrize(
    ("settings", "targets", "problem"),
    [
        ({"use_dora": True}, ("q_proj",), "LORA use_dora"),
        ({"of_tomorrow": {"a": 1}}, ("q_proj",), "LORA of_tomorrow"),
        ({"init_lora_weights": "pissa_niter_4"}, ("q_proj",), "init_lora_weights='pissa_niter_4'"),
        ({"peft_type": "IA3"}, ("q_proj",), "IA3"),
        ({}, ("c_attn",), "no place"),
    ],
)
def test_an_adapter_that_is_no_update_of_weights_is_refused(
    checkpoints, ranks_or_errors, tmp_path, settings, targets, problem
):
    plain, path = checkpoints.llama()
    other, _ = checkpoints.gpt2()
    model = other if "c_attn" in targets else plain
    make_adapter(tmp_path / "adapter", model, targets, **settings)
    for error in ranks_or_errors(loading(path, [tmp_path / "adapter"] * 2), 2):
        assert isinstance(error, CheckpointError), error
        assert problem in str(error) and "merge_and_unload" in str(error)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_an_adapter_is_named(checkpoints, ranks_or_errors, tmp_path, name):
    plain, path = checkpoints.llama()
    folder = tmp_path / "adapter"
    make_adapter(folder, plain, ("q_proj",))
    (folder / name).unlink()
    for error in ranks_or_errors(loading(path, [folder] * 2), 2):
        assert isinstance(error, CheckpointError)
        assert f"{folder} holds no {name}" in str(error)
    with pytest.raises(CheckpointError, match=f"{folder} holds no {name}"):
        describe_checkpoint(path, LoadOptions(adapter=folder))


def test_a_tied_weight_is_not_changed_for_both_its_users(checkpoints, ranks_or_errors, tmp_path):
    plain, path = checkpoints.gpt2()
    make_adapter(tmp_path / "adapter", plain, ("wte",))
    for error in ranks_or_errors(loading(path, [tmp_path / "adapter"] * 2), 2):
        assert isinstance(error, CheckpointError) and "tied" in str(error)


def test_adapters_that_differ_between_ranks_are_an_error(checkpoints, ranks_or_errors, tmp_path):
    plain, path = checkpoints.llama()
    make_adapter(tmp_path / "a", plain, LINEAR)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    name = "base_model.model.lm_head.lora_A.weight"
    change_byte_of_adapter(tmp_path / "b", name)
    for error in ranks_or_errors(loading(path, [tmp_path / "a", tmp_path / "b"]), 2):
        assert isinstance(error, CheckpointError) and name in str(error)


def change_byte_of_adapter(folder, name):
    shutil.copy(folder / "adapter_model.safetensors", folder / "model.safetensors")
    change_byte(folder, name)
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


def test_an_adapter_beside_the_model_is_applied_or_named(
    checkpoints, on_master, ranks_or_errors, tmp_path
):
    """from_pretrained applies it where peft is installed; it was ignored without a word."""
    plain, path = checkpoints.llama()
    tensors = make_adapter(tmp_path / "adapter", plain, LINEAR)
    folder = tmp_path / "both"
    shutil.copytree(path, folder)
    shutil.copytree(tmp_path / "adapter", folder, dirs_exist_ok=True)
    for options in ({}, {"mesh": {"dp_replicate": 2}, "max_memory": None}):

        def rank(info, options=options):
            with Coordinator(info, timeout_s=30) as coor:
                drumline.load(folder, coor=coor, **options).close()

        for error in ranks_or_errors(rank, 2):
            assert isinstance(error, CheckpointError) and f"adapter='{folder}'" in str(error)
    merged = merge(type(plain).from_pretrained(path), tensors)
    assert on_master(folder, 2, greedy, adapter=folder) == greedy(merged)


def test_peft_makes_the_same_tokens(checkpoints, on_master, tmp_path):
    peft = pytest.importorskip("peft", reason="runs after `pip install peft`")
    plain, path = checkpoints.llama()
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    torch.manual_seed(3)
    live = peft.get_peft_model(type(plain).from_pretrained(path), config)
    live.save_pretrained(tmp_path / "adapter")
    found, own = on_master(
        path, 2, lambda model: (greedy(model), weights(model)), adapter=tmp_path / "adapter"
    )
    assert found == greedy(live)
    merged = live.merge_and_unload()
    assert all(torch.equal(own[name], merged.get_parameter(name)) for name in own)


BOMB = {"(([a-z_.0-9]+)+)+!": 8}
NUMBERS = ["4", None, [4], True, 0, -4, 1 << 60, 10**400, 4.5, float("nan"), float("inf"), 1e400]
LIES = [
    *[({"r": r}, "r=") for r in NUMBERS],
    *[({"rank_pattern": {"q_proj": r}}, "rank_pattern") for r in (0, "4", 1 << 60)],
    *[
        ({"lora_alpha": alpha}, "lora_alpha=")
        for alpha in NUMBERS
        if alpha not in (0, -4, 4.5)  # which are numbers like any other
    ],
    *[({"alpha_pattern": {"q_proj": alpha}}, "alpha_pattern") for alpha in ("x", float("nan"))],
    *[({"lora_dropout": rate}, "lora_dropout=") for rate in (1 << 31, -0.1)],  # loaded
    ({"r": 8}, "r=8 makes them"),
    ({"r": 2}, "r=2 makes them"),
    ({"rank_pattern": {"q_proj": 3}}, "r=3 makes them"),
    ({"alpha_pattern": BOMB}, "alpha_pattern|not a plain pattern"),
    ({"rank_pattern": BOMB}, "rank_pattern|not a plain pattern"),
    ({"alpha_pattern": {".*.*.*.*.*.*!": 8}}, "alpha_pattern takes too long"),
    ({"alpha_pattern": {"a??": 8}}, "not a plain pattern"),
    ({"alpha_pattern": {"a?" * 60: 8}}, "alpha_pattern takes too long"),
    ({"alpha_pattern": {"(": 8}}, "not a plain pattern"),
    ({"alpha_pattern": {"[z-a]": 8}}, "is not a pattern"),
    ({"alpha_pattern": {"(?=a)": 8}}, "not a plain pattern"),
    ({"alpha_pattern": {"a" * 2000: 8}}, "longer than"),
    ({"alpha_pattern": {f"a{number}.*.*": 8 for number in range(9999)}}, "takes too long"),
    ({"alpha_pattern": [["q_proj", 8]]}, "alpha_pattern=.*is not an object"),
    ({"use_rslora": "false"}, "use_rslora='false'"),
    ({"target_modules": ["v_proj"]}, "q_proj.weight, which its target_modules do not name"),
    ({"target_modules": r".*v_proj"}, "q_proj.weight, which its target_modules do not name"),
    ({"target_modules": "../x"}, "q_proj.weight, which its target_modules do not name"),
    ({"target_modules": None}, "target_modules=None is neither"),
    ({"corda_config": True}, "corda_config=True is not of type dict"),  # which peft refuses
    ({"target_modules": "\ud800"}, "q_proj.weight, which its target_modules do not name"),
    ({"target_modules": "("}, "'\\(' is not a pattern"),
    ({"target_modules": ".*"}, r"name the model \(LlamaForCausalLM\), which has no update"),
    ({"target_modules": ["q_proj", "v_proj", "mlp"]}, r"name model.layers.0.mlp \(LlamaMLP\)"),
    ({"target_modules": "['q_proj', 'v_proj']"}, "which its target_modules do not name"),
    ({"target_modules": "(q|v)*_proj"}, "repeats a group"),
    ({"task_type": math.nan}, "task_type=nan is not one of peft's"),
    ({"modules_to_save": 7}, "modules_to_save=7 is not a list"),
    ({"modules_to_save": [""]}, "modules_to_save=.* is not a list of names"),
    ({"modules_to_save": ["lm_head"]}, "has not lm_head.weight, which its modules_to_save name"),
    ({"exclude_modules": 3}, "exclude_modules=3 is neither"),
    ({"exclude_modules": "((a+)+)+!"}, "not a plain pattern"),
    ({"exclude_modules": ["q_proj"]}, "q_proj.weight, which its target_modules do not name"),
    ({"exclude_modules": r".*\.2\..*"}, "layers.2.self_attn.q_proj.weight, which its target"),
    ({"layers_to_transform": "0"}, "layers_to_transform='0' is not numbers"),
    ({"layers_to_transform": [True]}, "layers_to_transform=.* is not numbers"),
    ({"layers_to_transform": [0]}, "layers.1.self_attn.q_proj.weight, which its target_modules"),
    ({"layers_to_transform": 0, "layers_pattern": "h"}, "layers.0.self_attn.q_proj.weight, which"),
    ({"layers_to_transform": 0, "layers_pattern": "(a+)+"}, "layers_pattern=.* is not the name"),
    ({"layers_pattern": "layers"}, "layers_pattern stands without"),
    ({"layers_to_transform": 0, "target_modules": ".*"}, "stands beside a pattern of names"),
    ({"bias": "some"}, "bias='some' is not one of"),
    ({"bias": None}, "bias=None is not one of"),  # which peft refuses, too
    ({"alpha_pattern": None}, "alpha_pattern=None is not an object"),
]


@pytest.fixture
def adapter_of(checkpoints, tmp_path):
    """Make an adapter with these settings, and read it as load() does, on one rank."""
    plain, _ = checkpoints.llama()
    index = {}
    for name, parameter in plain.named_parameters():
        index[name] = StoredTensor("model.safetensors", 0, "F32", tuple(parameter.shape))
    sources = {name: whole_tensor(name, stored.shape) for name, stored in index.items()}

    def merged(
        settings, targets=("q_proj", "v_proj"), change=lambda tensors: None, returns_again=False
    ):
        folder = tmp_path / "adapter"
        make_adapter(folder, plain, targets)
        content = read_json(folder / "adapter_config.json")
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")
        file = folder / "adapter_model.safetensors"
        files = CheckpointFiles(file, read_index(file), [0])

        def again(settings):
            (folder / "adapter_config.json").write_text(json.dumps({**content, **settings}))
            adapter = LoraAdapter(files, read_json(folder / "adapter_config.json"))
            adapter.check_settings()
            return adapter.merged(plain, sources, index, torch.float32)

        return again if returns_again else again(settings)

    return merged


@pytest.mark.parametrize(("settings", "problem"), LIES)
def test_settings_that_lie_are_named_within_a_second(adapter_of, settings, problem):
    """r was not compared with the factors, alpha made NaN of a model, and a pattern hung load()."""
    took_s = []
    merge_again = adapter_of({}, returns_again=True)
    for _ in range(3):  # a busy machine may disturb one of them
        start = time.process_time()
        with pytest.raises(CheckpointError, match=rf"adapter_.*({problem})"):
            merge_again(settings)
        took_s.append(time.process_time() - start)
    assert min(took_s) < 1


QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
FACTORS = {
    "no rows": {"A": (0, 32), "B": (32, 0)},
    "less rows": {"A": (3, 32), "B": (32, 3)},
    "another inner size": {"A": (4, 32), "B": (32, 3)},
    "less columns": {"A": (4, 31), "B": (32, 4)},
    "turned": {"A": (32, 4), "B": (4, 32)},
    "three dims": {"A": (4, 32, 1), "B": (32, 4)},
    "no B": {"A": (4, 32)},
    "no A": {"B": (32, 4)},
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors_of_other_shapes_are_named(adapter_of, name):
    """The inner size was not compared, and came to an error of torch as the weights were read."""

    def change(tensors):
        for letter in "AB":
            del tensors[QUERY.format(letter)]
        for letter, shape in FACTORS[name].items():
            tensors[QUERY.format(letter)] = torch.zeros(shape)

    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj\.weight"):
        adapter_of({}, change=change)


def test_an_update_of_a_convolution_is_named(tmp_path):
    """It ended in an error of unpacking its shape, which named nothing."""
    model = torch.nn.ModuleDict({"conv": torch.nn.Conv1d(4, 6, 3)})
    shapes = {"A": (2, 4, 3), "B": (6, 2, 1)}
    factors = {f"base_model.model.conv.lora_{k}.weight": n for k, n in shapes.items()}
    index = {name: StoredTensor("a", 0, "F32", shape) for name, shape in factors.items()}
    adapter = LoraAdapter(CheckpointFiles(tmp_path, index, [0]), {"target_modules": ["conv"]})
    stored = {name: StoredTensor("m", 0, "F32", p.shape) for name, p in model.named_parameters()}
    sources = {name: whole_tensor(name, tensor.shape) for name, tensor in stored.items()}
    with pytest.raises(CheckpointError, match=r"an update of conv.weight, which is not a matrix"):
        adapter.merged(model, sources, stored, torch.float32)


def test_a_weight_that_stays_wide_is_merged_without_rounding(tmp_path):
    """In half precision T5 keeps `wo` in float32, and with an adapter it was rounded to half."""
    config = T5Config(vocab_size=8, d_model=4, d_kv=2, d_ff=6, num_layers=1, num_heads=2)
    model, block = T5EncoderModel(config), "encoder.block.0.layer.1.DenseReluDense."
    parts = {"wi.lora_A": (2, 4), "wi.lora_B": (6, 2), "wo.lora_A": (2, 6), "wo.lora_B": (4, 2)}
    factors = {f"base_model.model.{block}{k}.weight": shape for k, shape in parts.items()}
    index = {name: StoredTensor("a", 0, "F32", shape) for name, shape in factors.items()}
    settings = {"target_modules": ["wi", "wo"], "r": 2}
    adapter = LoraAdapter(CheckpointFiles(tmp_path, index, [0]), settings)
    stored = {name: StoredTensor("m", 0, "F32", p.shape) for name, p in model.named_parameters()}
    sources = {name: whole_tensor(name, tensor.shape) for name, tensor in stored.items()}
    _, merged = adapter.merged(model, sources, stored, torch.float16)
    dtypes = [merged[f"{block}{name}.weight with its adapter"].dtype for name in ("wi", "wo")]
    assert dtypes == ["F16", "F32"]


def test_a_factor_that_peft_would_pass_over_is_named(adapter_of):
    """It was merged with the other factor, where peft takes random numbers in its place."""

    def change(tensors):
        name = QUERY.format("A")
        tensors[name.removeprefix("base_model.model.")] = tensors.pop(name)

    with pytest.raises(CheckpointError, match=r"has model\.layers\.0.*lora_A.*pass over"):
        adapter_of({}, change=change)


PATTERNS = [
    *(
        "q_proj",
        "self_attn.q_proj",
        r"layers\.[0-9]+\.self_attn\.q_proj",
        "proj",
        ".*q_proj",
        "nothing",
    ),
    *(
        "layers.(0|1|2).self_attn.(q|v)_proj",
        r"^model\.layers\.\d\.self_attn\.q_proj$",
        "[qv]_proj",
    ),
    *("^q_proj", "q.proj", "(?:q|v)_proj", ".*attn.*", r"layers\.([0-2]|5)\..*_proj", "l?q_proj"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_name_the_modules_that_peft_takes_them_for(adapter_of, pattern):
    key = pytest.importorskip("peft.utils.other").get_pattern_key
    _, index = adapter_of({"alpha_pattern": {pattern: 3}, "lora_alpha": 9})
    scalings = {n: w.scaling for n, w in index.items() if isinstance(w, MergedWeight)}
    assert len(scalings) == 12
    for name, scaling in scalings.items():
        module = name.partition(".weight")[0]
        assert scaling == (3 if key([pattern], module) == pattern != module else 9) / 4, name


SUBSETS = [
    {"layers_to_transform": [*range(6)], "layers_pattern": ["h", "layers"]},
    {"layers_to_transform": [0, 1, 2, 3, 4, 5]},
    {"exclude_modules": ["down_proj", "attn"]},
    {"exclude_modules": r".*\.down_proj"},
    {"layers_to_transform": [], "modules_to_save": ["_proj"]},
]


@pytest.mark.parametrize("settings", SUBSETS)
def test_an_adapter_for_some_modules_is_taken_where_these_have_its_factors(adapter_of, settings):
    """peft left out what settings exclude, and it was merged here: other weights, silently."""
    _, index = adapter_of(settings)
    assert sum(isinstance(weight, MergedWeight) for weight in index.values()) == 12


def test_one_pattern_for_each_module_is_taken(adapter_of, checkpoints):
    """As peft writes it for adapters whose ranks differ."""
    names = [name for name, _ in checkpoints.llama()[0].named_modules() if "_proj" in name]
    adapter_of({"r": 1, "rank_pattern": dict.fromkeys(names, 4)})


VALUES = (
    *NUMBERS,
    4,
    6,
    2.5,
    -3,
    1e7,
    1e308,
    "",
    "4.0",
    [],
    {},
    {"q_proj": 4},
    {"q_proj": "4"},
    BOMB,
)
SETTINGS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules")


def test_whatever_its_settings_say_an_adapter_is_merged_as_they_say_or_refused(adapter_of):
    """Each error names the file of the settings, and each scaling is a number."""
    pick, merge_again = random.Random(1), adapter_of({}, returns_again=True)
    num_refused, count = 0, 600
    for number in range(count):
        settings = {
            pick.choice(SETTINGS): pick.choice(VALUES) for _ in range(pick.choice([1, 1, 2]))
        }
        start = time.process_time()
        try:
            _, index = merge_again(settings)
        except CheckpointError as error:
            assert "adapter/adapter_" in str(error)
            num_refused += 1
        else:
            weights = [weight for weight in index.values() if isinstance(weight, MergedWeight)]
            assert len(weights) == 12, (number, settings)
            assert all(math.isfinite(w.scaling) and abs(w.scaling) <= 1e6 for w in weights)
        assert time.process_time() - start < 1, (number, settings)
    assert count / 4 < num_refused < count
