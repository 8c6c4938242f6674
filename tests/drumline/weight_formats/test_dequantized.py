"""Quantized checkpoints, dequantized by each rank as it reads its own layers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import drumline
import launcher
from coordinator import Coordinator
from drumline import CheckpointError
from drumline.checkpoint.safetensors_index import StoredTensor, TensorReader, read_index
from drumline.checkpoint.source import CheckpointFiles
from drumline.core.packed_tensor import PackedTensor
from drumline.core.shards import Region
from drumline.planner.load_options import LoadOptions
from drumline.strategies import opening
from drumline.strategies.plan_inputs import sized_model
from drumline.weight_formats.dequantized import METHODS, read_dequantized
from tests.drumline.weight_formats.test_lora_adapter import make_adapter

BLOCK = 16
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def quantized_folder(path, folder, rewrite, settings):
    """A copy of a checkpoint with rewrite(name, tensor) in place of each tensor."""
    shutil.copytree(path, folder)
    for file in folder.glob("*.safetensors"):
        tensors = {}
        for name, tensor in load_file(file).items():
            tensors.update(rewrite(name, tensor) or {name: tensor})
        save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return folder


def to_fp8(name, tensor):
    """Blocks of 16 x 16 with a scale each, as DeepSeek stores blocks of 128 x 128."""
    if "norm" in name or "embed" in name or "lm_head" in name or "gate.weight" in name:
        return None
    rows, columns = tensor.shape
    blocks = tensor.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    values = (blocks / scales).view(rows, columns).to(torch.float8_e4m3fn)
    return {name: values, f"{name}_scale_inv": scales.view(rows // BLOCK, columns // BLOCK)}


FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head", "gate"],
}


def greedy(model):
    return model.generate(torch.arange(3, 12)[None], max_new_tokens=8, do_sample=False).tolist()


def result(model):
    return greedy(model), {n: p.clone() for n, p in model.named_parameters() if not p.is_meta}


def assert_equal(found, plain):
    tokens, own = found
    assert tokens == greedy(plain) and own
    assert all(torch.equal(own[name], plain.get_parameter(name)) for name in own)


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_fp8_weights_with_scales_of_blocks_are_those_of_one_process(
    checkpoints, on_master, tmp_path, kind
):
    _, path = checkpoints.make(f"{kind} of 64", kind, **SMALL)
    folder = quantized_folder(path, tmp_path / "fp8", to_fp8, FP8)
    cls = getattr(transformers, kind)
    settings = transformers.FineGrainedFP8Config(dequantize=True, **{**FP8, "quant_method": None})
    plain = cls.from_pretrained(folder, quantization_config=settings)
    device_map = {"": 0, "model.layers.1": 1}
    assert_equal(on_master(folder, 2, result, dequantize=True, device_map=device_map), plain)


def test_a_decoder_whose_own_config_says_that_it_is_quantized_is_dequantized(
    checkpoints, on_master, ranks_or_errors, tmp_path
):
    """Its weights were loaded without their scales."""
    vision = {"model_type": "clip_vision_model", "num_hidden_layers": 2, "hidden_size": 32}
    vision |= {"num_attention_heads": 4, "intermediate_size": 48, "image_size": 16, "patch_size": 8}
    config = {"text_config": {"model_type": "llama", **SMALL}, "vision_config": vision}
    _, path = checkpoints.make("llava 64", "LlavaForConditionalGeneration", **config)

    def rewrite(name, tensor):
        return to_fp8(name, tensor) if "_proj" in name and "language_model" in name else None

    folder = quantized_folder(path, tmp_path / "fp8", rewrite, FP8)
    expected = on_master(folder, 1, result, dequantize=True)
    fields = json.loads((folder / "config.json").read_text())
    fields["text_config"]["quantization_config"] = fields.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(fields))
    tokens, own = on_master(folder, 1, result, dequantize=True)
    assert tokens == expected[0]
    assert all(torch.equal(own[name], expected[1][name]) for name in expected[1])

    def rank(info):
        with Coordinator(info, timeout_s=30) as coor:
            drumline.load(folder, coor=coor, tp=2)

    for error in ranks_or_errors(rank, 2):
        assert isinstance(error, drumline.PlanError) and "is quantised (fp8)" in str(error)


def test_each_rank_reads_the_bytes_of_its_own_layers_only(checkpoints, on_master, tmp_path):
    _, path = checkpoints.make("LlamaForCausalLM of 64", "LlamaForCausalLM", **SMALL)
    folder = quantized_folder(path, tmp_path / "fp8", to_fp8, FP8)
    loaded = on_master(
        folder, 2, lambda model: model.loaded, dequantize=True, device_map={"": 1, "lm_head": 0}
    )
    assert loaded.nbytes_read == 64 * 64 * 4


def test_fp8_weights_are_sharded_over_ranks(checkpoints, ranks, tmp_path):
    plain, path = checkpoints.make("LlamaForCausalLM of 64", "LlamaForCausalLM", **SMALL)
    folder = quantized_folder(path, tmp_path / "fp8", to_fp8, FP8)

    def rank(info):
        torch.set_num_threads(1)
        with (
            Coordinator(info, timeout_s=30) as coor,
            drumline.load(folder, coor=coor, tp=2, dequantize=True) as model,
        ):
            return result(model)

    whole = torch.cat([own["model.layers.1.mlp.up_proj.weight"] for _, own in ranks(rank, 2)])
    stored = to_fp8("up", plain.model.layers[1].mlp.up_proj.weight)
    scales = stored["up_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    assert torch.equal(whole, stored["up"].float() * scales)


def test_mxfp4_experts_are_those_of_one_process(checkpoints, on_master, tmp_path):
    sizes = {**SMALL, "intermediate_size": 32, "sliding_window": 8, "rope_scaling": None}
    _, path = checkpoints.make("gpt-oss of 64", "GptOssForCausalLM", **sizes)
    generator = torch.Generator().manual_seed(4)

    def to_mxfp4(name, tensor):
        if not name.endswith(("gate_up_proj", "down_proj")):
            return None
        experts, columns, rows = tensor.shape
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    settings = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    folder = quantized_folder(path, tmp_path / "mxfp4", to_mxfp4, settings)
    whole = transformers.GptOssForCausalLM.from_pretrained(
        folder, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    device_map = {"": 0, "model.layers.1": 1}
    found = on_master(folder, 2, result, dequantize=True, device_map=device_map)
    assert_equal(found, whole)


def packed(integers, dim, num_bits=4):
    """As compressed-tensors packs them: along `dim`, the first in the lowest bits, offset by 8."""
    integers = integers.movedim(dim, -1)
    words = []
    for row in integers.reshape(-1, integers.shape[-1]).tolist():
        for start in range(0, len(row), 32 // num_bits):
            group = row[start : start + 32 // num_bits]
            word = sum((value + 8) << (num_bits * at) for at, value in enumerate(group))
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
    shape = (*integers.shape[:-1], -1)
    return torch.tensor(words, dtype=torch.int32).view(shape).movedim(-1, dim).contiguous()


GROUP = 32
WEIGHTS = {"num_bits": 4, "type": "int", "group_size": GROUP, "strategy": "group"}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head"],
}


@pytest.mark.parametrize("variant", ["symmetric", "asymmetric", "by group of columns"])
def test_packed_integers_are_unpacked_by_their_owner(checkpoints, on_master, tmp_path, variant):
    plain, path = checkpoints.make("LlamaForCausalLM of 64", "LlamaForCausalLM", **SMALL)
    generator = torch.Generator().manual_seed(4)
    expected = type(plain).from_pretrained(path)

    def pack(name, tensor):
        if "proj" not in name:
            return None
        rows, columns = tensor.shape
        values = torch.randint(-8, 8, (rows, columns), generator=generator)
        zeros = torch.randint(-3, 4, (rows, columns // GROUP), generator=generator)
        scales = torch.rand(rows, columns // GROUP, generator=generator) / 8
        groups = torch.arange(columns) // GROUP
        stored = {
            f"{name}_packed": packed(values, 1),
            f"{name}_scale": scales,
            f"{name}_shape": torch.tensor(tensor.shape),
        }
        if variant == "asymmetric":
            stored[f"{name}_zero_point"] = packed(zeros, 0)
        else:
            zeros = zeros * 0
        if variant == "by group of columns":
            groups = groups[torch.randperm(columns, generator=generator)]
            stored[f"{name}_g_idx"] = groups.int()
        weight = (values - zeros[:, groups]) * scales[:, groups]
        with torch.no_grad():
            expected.get_parameter(name).copy_(weight)
        return stored

    folder = quantized_folder(path, tmp_path / "packed", pack, PACKED)
    device_map = {"": 0, "model.layers.1": 1}
    found = on_master(folder, 2, result, dequantize=True, device_map=device_map)
    assert_equal(found, expected)


@pytest.mark.parametrize(
    ("method", "settings", "offset"),
    [
        ("gptq", {"desc_act": True}, -1),
        ("gptq", {"checkpoint_format": "gptq_v2"}, 0),
        ("gptq", {"format": "gptq_v2"}, 0),
        ("gptq", {"format": "gptq_v2", "checkpoint_format": "gptq"}, -1),
        ("awq", {"version": "gemm"}, 0),
    ],
)
def test_gptq_and_awq_are_unpacked_by_their_owner(
    checkpoints, on_master, tmp_path, method, settings, offset
):
    """Against a slow formula: neither library runs where there is no GPU."""
    plain, path = checkpoints.make("LlamaForCausalLM of 64", "LlamaForCausalLM", **SMALL)
    generator = torch.Generator().manual_seed(4)
    expected = type(plain).from_pretrained(path)
    places = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # of AWQ: which column each place of a word has

    def words(integers, dim):
        if method == "awq":
            integers = integers.unflatten(1, (-1, 8))[..., places].flatten(1)
        return packed(integers - 8, dim)

    def pack(name, tensor):
        if "proj" not in name:
            return None
        rows, columns = tensor.shape
        values = torch.randint(0, 16, (columns, rows), generator=generator)
        zeros = torch.randint(1, 15, (columns // GROUP, rows), generator=generator)
        scales = torch.rand(columns // GROUP, rows, generator=generator) / 8
        groups, stem = torch.arange(columns) // GROUP, name.removesuffix("weight")
        stored = {f"{stem}qweight": words(values, int(method == "awq")), f"{stem}scales": scales}
        stored[f"{stem}qzeros"] = words(zeros + offset, 1)
        if "desc_act" in settings:
            groups = groups[torch.randperm(columns, generator=generator)]
            stored[f"{stem}g_idx"] = groups.int()
        with torch.no_grad():
            expected.get_parameter(name).copy_(((values - zeros[groups]) * scales[groups]).T)
        return stored

    quantization = {"quant_method": method, "bits": 4, "group_size": GROUP, **settings}
    folder = quantized_folder(path, tmp_path / "packed", pack, quantization)
    device_map = {"": 0, "model.layers.1": 1}
    found = on_master(folder, 2, result, dequantize=True, device_map=device_map)
    assert_equal(found, expected)


PACKED_KINDS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
}


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_quantized_weights_stay_so_on_a_rank_without_files(
    checkpoints, on_master, tmp_path, method
):
    """They were refused there: the formats' own libraries read the files, on every rank."""
    _, path = checkpoints.make("LlamaForCausalLM of 64", "LlamaForCausalLM", **SMALL)
    generator = torch.Generator().manual_seed(4)

    def pack(name, tensor):
        if "proj" not in name:
            return None
        rows, columns = tensor.shape
        shape = (columns, rows // 8) if method == "awq" else (columns // 8, rows)
        sizes = {"qweight": shape, "qzeros": (columns // GROUP, rows // 8)}
        words = {
            k: torch.randint(-(2**31), 2**31, n, generator=generator) for k, n in sizes.items()
        }
        parts = {key: value.int() for key, value in words.items()}
        parts["scales"] = torch.rand(columns // GROUP, rows, generator=generator).half() / 8
        if method == "gptq":
            parts["g_idx"] = torch.randperm(columns, generator=generator).int() // GROUP
        return {name.replace("weight", part): value for part, value in parts.items()}

    folder = quantized_folder(path, tmp_path / "packed", pack, PACKED_KINDS[method])

    def run(model):
        kept = sum(tensor.nbytes for tensor in model.model.layers[0].parameters())
        assert model.device_map.nbytes["model.layers.0"] == kept
        with torch.no_grad():
            few = model(torch.arange(3, 8)[None]).logits
        logits = model(torch.arange(3, 12)[None]).logits
        return greedy(model), logits, kept, model.loaded, few

    options = {"device_map": {"": 0, "model.layers.1": 1}, "elsewhere": tmp_path / "absent"}
    tokens, logits, kept, loaded, few = on_master(folder, 2, run, **options)
    expected = on_master(folder, 2, run, dequantize=True, **options)
    torch.testing.assert_close(few, expected[4], rtol=1e-4, atol=1e-4)
    assert (tokens, torch.equal(logits, expected[1])) == (expected[0], True)
    assert kept < expected[2] / 2
    assert loaded.nbytes_sent < expected[3].nbytes_sent / 2


def test_an_adapter_that_only_rank_0_has_is_kept_beside_quantized_weights(
    checkpoints, ranks, tmp_path
):
    """Plans had the path of its file in them, and that is another one on a rank without it."""
    plain, path = checkpoints.make("LlamaForCausalLM of 64", "LlamaForCausalLM", **SMALL)
    folder = quantized_folder(path, tmp_path / "fp8", to_fp8, FP8)
    make_adapter(tmp_path / "adapter", plain, ["q_proj"], torch.bfloat16, r=2)

    def run(info, **options):
        torch.set_num_threads(1)
        folders = ("absent", tmp_path / "absent") if info.rank else (folder, tmp_path / "adapter")
        places = {"device_map": {"": 0, "model.layers.1": 1}, "adapter": folders[1]}
        with Coordinator(info, timeout_s=30) as coor:
            try:
                with drumline.load(folders[0], coor=coor, **places, **options) as model:
                    return greedy(model), model.model.layers[0].self_attn.q_proj.weight.nbytes
            except drumline.WorkerExit as served:
                return served.code

    (tokens, kept), _ = ranks(run, 2)
    (expected, plain_nbytes), _ = ranks(lambda info: run(info, dequantize=True), 2)
    assert tokens == expected and kept < plain_nbytes


def test_copies_whose_integers_mean_other_weights_are_not_mixed(
    checkpoints, ranks_or_errors, tmp_path
):
    """What is read is not compared where its meaning is in the config, which rank 1 went by."""
    _, path = checkpoints.llama()
    settings = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"}
    others = [settings, {**settings, "checkpoint_format": "gptq_v2"}]
    folders = [
        quantized_folder(path, tmp_path / f"copy{k}", lambda *_: None, other)
        for k, other in enumerate(others)
    ]

    def rank(info):
        with Coordinator(info, timeout_s=30) as coor:
            drumline.load(folders[info.rank], coor=coor, dequantize=True).close()

    for error in ranks_or_errors(rank, 2):
        assert "checkpoint_format is gptq on rank 0 and gptq_v2 on rank 1" in str(error)


@pytest.mark.parametrize("scale_shape", [(), (1,), (64,), (64, 1)])
def test_integers_of_a_byte_have_one_scale_or_one_for_each_row(
    checkpoints, on_master, tmp_path, scale_shape
):
    plain, path = checkpoints.make("LlamaForCausalLM of 64", "LlamaForCausalLM", **SMALL)
    expected = type(plain).from_pretrained(path)

    def to_int8(name, tensor):
        if "mlp" not in name:
            return None
        scales = torch.rand(scale_shape) / 100 + 0.01
        values = (tensor * 100).round().clamp(-127, 127).to(torch.int8)
        with torch.no_grad():
            by_row = scales.view(-1, 1)
            expected.get_parameter(name).copy_(values.float() * by_row)
        extra = {name.replace("weight", "input_scale"): torch.ones(1)}
        return {name: values, f"{name}_scale": scales, **extra}

    settings = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    folder = quantized_folder(path, tmp_path / "int8", to_int8, settings)
    device_map = {"": 0, "model.layers.1": 1}
    found = on_master(folder, 2, result, dequantize=True, device_map=device_map)
    assert_equal(found, expected)


def test_a_checkpoint_that_is_not_quantized_is_loaded_as_ever(checkpoints, on_master):
    plain, path = checkpoints.llama()
    assert on_master(path, 2, greedy, dequantize=True) == greedy(plain)


def packed_with(**parts):
    """Of layers of 64 x 32, with parts that do not fit."""
    whole = {"packed": torch.zeros(64, 4, dtype=torch.int32), "scale": torch.ones(64, 1), **parts}
    return lambda name, tensor: (
        {f"{name}_{part}": value.clone() for part, value in whole.items()}
        if "up_proj" in name
        else None
    )


def bytes_with(**parts):
    """Of one byte an element, with a part that changes what the bytes mean."""

    def rewrite(name, tensor):
        values = {name: tensor.to(torch.int8), f"{name}_scale": torch.ones(64, 1)}
        extra = {f"{name}_{part}": value.clone() for part, value in parts.items()}
        return {**values, **extra} if "up_proj" in name else None

    return rewrite


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}


def to_gptq(name, tensor):
    """Without the group of each column."""
    stem, zeros = name.removesuffix("weight"), torch.zeros(4, 64, dtype=torch.int32)
    parts = {"qweight": zeros, "qzeros": zeros[:1, :8], "scales": torch.ones(1, 64)}
    return {f"{stem}{part}": parts[part].clone() for part in parts} if "up_proj" in name else None


def to_gelu_scales(name, tensor):
    """Of activations, with no integers beside them."""
    scales = name.replace("weight", "scales")
    return {name: tensor, scales: torch.ones(64)} if "gate_proj" in name else None


def rotated(*locations):
    groups = {"R4": {"apply": [{"targets": ["Linear"], "location": one} for one in locations]}}
    return {**PACKED, "transform_config": {"config_groups": groups}}


@pytest.mark.parametrize(
    ("settings", "rewrite", "problem"),
    [
        ({"quant_method": "quark"}, lambda name, tensor: None, "quark"),
        (
            FP8,
            lambda name, tensor: {name: tensor.to(torch.float8_e4m3fn)} if "mlp" in name else None,
            "mlp",
        ),
        (PACKED, packed_with(zero_point=torch.zeros(2, 1, dtype=torch.int32)), "up_proj"),
        (PACKED, packed_with(scale=torch.ones(64, 2)), "up_proj"),
        (PACKED, packed_with(g_idx=torch.tensor([1] * GROUP)), "group 1 of 1"),
        ({**PACKED, "config_groups": [1]}, packed_with(), "config.json: in quantization_config"),
        ({**GPTQ, "bits": float("inf")}, to_gptq, "bits=inf"),
        ({**GPTQ, "group_size": 1.5}, to_gptq, "group_size=1.5"),
        ({**FP8, "weight_block_size": [16, None]}, to_fp8, "weight_block_size=None"),
        ({**FP8, "weight_block_size": "16"}, to_fp8, "weight_block_size='16'"),
        ({**FP8, "weight_block_size": [1, 16, 16]}, to_fp8, "3 dimensions"),
        (PACKED, packed_with(scale=torch.ones(64, 1, dtype=torch.int32)), "up_proj"),
        (PACKED, packed_with(packed=torch.zeros(64 * 4, dtype=torch.int32)), "up_proj"),
        (
            {**PACKED, "config_groups": {"a": {"weights": {**WEIGHTS, "symmetric": False}}}},
            packed_with(),
            "up_proj",
        ),
        ({**GPTQ, "desc_act": True}, to_gptq, "up_proj"),
        ({**GPTQ, "desc_act": False, "format": "marlin"}, to_gptq, "up_proj"),
        (PACKED_KINDS["awq"], to_gelu_scales, "gate_proj.scales"),
        (rotated("input", "weight_input"), packed_with(), "transform_config rotates"),
        (PACKED, bytes_with(g_idx=torch.zeros(32, dtype=torch.int32)), "up_proj"),
        (PACKED, bytes_with(zero_point=torch.ones(64, 1, dtype=torch.int32)), "up_proj"),
    ],
)
def test_what_is_not_known_or_lacks_scales_is_named(
    checkpoints, ranks_or_errors, tmp_path, settings, rewrite, problem
):
    _, path = checkpoints.llama()
    folder = quantized_folder(path, tmp_path / "other", rewrite, settings)

    def rank(info):
        with Coordinator(info, timeout_s=30) as coor:
            drumline.load(folder, coor=coor, dequantize=True).close()

    for error in ranks_or_errors(rank, 2):
        assert isinstance(error, CheckpointError) and problem in str(error)


def test_a_parameter_of_the_model_is_no_scale_of_activations():
    """Gemma3n has it, and it was dropped as if the model had no such tensor."""
    names = ["altup.correct_output_scale", "k_proj.output_scale"]
    index = {name: StoredTensor("a", 0, "F32", (64,)) for name in names}
    config = transformers.LlamaConfig(quantization_config=FP8)
    source = CheckpointFiles(Path("a"), index, (0,), config)
    assert [*read_dequantized(source, torch.float32).index] == names[:1]


def test_zeros_that_do_not_fill_their_words_are_refused():
    """Those of the last four of 60 rows are in no word, and were read behind the last one."""
    shapes = {"qweight": ("I32", (4, 60)), "qzeros": ("I32", (1, 7)), "scales": ("F32", (1, 60))}
    index = {f"up.{part}": StoredTensor("a", 0, *form) for part, form in shapes.items()}
    with pytest.raises(CheckpointError, match=r"up\.qweight"):
        list(METHODS["gptq"](Path("a"), index, {**GPTQ, "group_size": 32}))


@pytest.mark.parametrize(("form", "zero"), [("gptq", 1.0), ("gptq_v2", 0.0)])
def test_settings_of_gptq_are_read_from_an_object_of_transformers(tmp_path, form, zero):
    """It has members of an Enum, of which none was a method that is known."""
    parts = to_gptq("up_proj.weight", None)
    save_file(parts, tmp_path / "a.safetensors")
    quantization = transformers.GPTQConfig(4, group_size=GROUP, format=form)
    config = transformers.LlamaConfig(quantization_config=quantization)
    source = CheckpointFiles(tmp_path, read_index(tmp_path), (0,), config)
    source = read_dequantized(source, torch.float32)
    with TensorReader(tmp_path) as reader:
        numbers = reader.box(source.index["up_proj.weight"], Region((0, 0), (64, 32)))
    assert (numbers == -zero).all()


@pytest.mark.parametrize("rows", [16, 8])
def test_zeros_of_gptq_are_those_of_words_from_which_ones_were_subtracted(tmp_path, rows):
    """A zero of 0 borrows from the next one: of 8 there, 7 was read, in C++ and in torch."""
    zeros = torch.tensor([[0, 8, 15, 0, 0, 1, 0, 0, 3, 0, 0, 0, 0, 0, 0, 15]])
    words = packed(zeros - 8, 1) - 0x11111111
    tensors = {"qweight": torch.zeros(4, 16, dtype=torch.int32), "qzeros": words}
    tensors = {f"up.{part}": tensor for part, tensor in tensors.items()}
    save_file({**tensors, "up.scales": torch.ones(1, 16)}, tmp_path / "a.safetensors")
    index = read_index(tmp_path)
    ((_, weight, _),) = METHODS["gptq"](tmp_path, index, {**GPTQ, "group_size": 32})
    weight = replace(weight, dtype="F32")
    with TensorReader(tmp_path) as reader:
        numbers = reader.box(weight, Region((0, 0), (rows, 32)))
    assert numbers.T.tolist() == 32 * (-zeros[:, :rows]).tolist()


def test_ranks_of_which_one_alone_would_compute_plain_weights_keep_them_as_they_are_stored(
    checkpoints, on_master, tmp_path, monkeypatch, caplog
):
    """As a CPU beside a GPU that multiplies fp8: their plans were others, and were refused."""
    _, path = checkpoints.make("LlamaForCausalLM of 64", "LlamaForCausalLM", **SMALL)
    folder = quantized_folder(path, tmp_path / "fp8", to_fp8, FP8)
    expected = on_master(folder, 2, greedy, dequantize=True)

    def validate(quantizer, **options):
        quantizer.quantization_config.dequantize = launcher.current().rank == 1

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", validate)
    assert on_master(folder, 2, greedy) == expected
    assert "on ranks [1] alone it would compute plain weights" in caplog.text


def test_the_plan_reserves_what_a_layer_of_experts_unpacks_at_once(
    checkpoints, on_master, tmp_path, monkeypatch
):
    """It reserved the whole stack, and one expert's matrix is unpacked."""
    _, path = checkpoints.make("MixtralForCausalLM of 64", "MixtralForCausalLM", **SMALL)
    folder = quantized_folder(path, tmp_path / "fp8", to_fp8, FP8)
    unpacked, box = [], PackedTensor.box

    def recorded(packed, region):
        unpacked.append(box(packed, region).nbytes)
        return box(packed, region)

    monkeypatch.setattr(PackedTensor, "box", recorded)
    monkeypatch.setattr(opening, "why_not_quantized", lambda config: ("no library", False))
    on_master(folder, 1, greedy)
    options = LoadOptions()
    _, _, parts = sized_model(opening.describe_checkpoint(folder, options), options)
    assert {part.unpacked_nbytes for part in parts.layers} == {max(unpacked)} == {128 * 64 * 4}


def test_a_form_that_nobody_can_read_is_named_with_what_would_help(
    checkpoints, ranks_or_errors, tmp_path
):
    """It said to load it without dequantize=True, as had been done."""
    _, path = checkpoints.llama()
    folder = quantized_folder(path, tmp_path / "other", to_gptq, {**GPTQ, "format": "marlin"})

    def rank(info):
        with Coordinator(info, timeout_s=30) as coor:
            drumline.load(folder, coor=coor).close()

    for error in ranks_or_errors(rank, 2):
        assert isinstance(error, CheckpointError) and "library is on every rank" in str(error)


def test_blocks_of_fp8_have_their_default_size_unless_another_is_stated():
    """Of 960 columns with eight scales, each scale was taken for 120 of them."""
    scales = StoredTensor("a", 0, "F32", (2, 8))
    index = {
        "up.weight": StoredTensor("a", 0, "F8_E4M3", (192, 960)),
        "up.weight_scale_inv": scales,
    }
    ((_, weight, _),) = METHODS["fp8"](Path("a"), index, {"quant_method": "fp8"})
    assert weight.scales.block == (128, 128)


def test_groups_end_where_their_size_says():
    """Of 1000 columns in groups of 128, each scale was taken for 125 of them."""
    scheme = {"config_groups": {"a": {"weights": {**WEIGHTS, "group_size": 128}}}}
    packed, values = ("I32", (4, 125)), ("I8", (4, 1000))
    scale = StoredTensor("a", 0, "F32", (4, 8))
    index = {"up_packed": StoredTensor("a", 0, *packed), "up_scale": scale}
    with pytest.raises(CheckpointError, match="up_packed"):  # its own library refuses them
        list(METHODS["compressed-tensors"](Path("a"), index, {**PACKED, **scheme}))
    index = {"up.weight": StoredTensor("a", 0, *values), "up.weight_scale": scale}
    ((_, weight, _),) = METHODS["compressed-tensors"](Path("a"), index, {**PACKED, **scheme})
    assert weight.scales.block == (1, 128)


def to_bitnet(name, tensor):
    """Four ternary weights a byte; all of them are -1 here."""
    if not name.startswith("model.layers") or tensor.dim() != 2:
        return None
    rows, columns = tensor.shape
    packed = torch.zeros(rows // 4, columns, dtype=torch.uint8)
    return {name: packed, f"{name}_scale": torch.ones(1)}


def test_weights_that_stay_quantized_are_planned_with_the_memory_that_they_take(
    checkpoints, on_master, tmp_path
):
    """Each had been counted as a weight of dtype, here for sixteen times its bytes."""
    _, path = checkpoints.make("LlamaForCausalLM of 64", "LlamaForCausalLM", **SMALL)
    folder = quantized_folder(path, tmp_path / "bitnet", to_bitnet, {"quant_method": "bitnet"})

    def sizes(model):
        planned = {name: model.device_map.nbytes[name] for name in model.device_map.of(0)}
        parts = {name: model.get_submodule(name) for name in planned}
        tensors = {name: [*part.parameters(), *part.buffers()] for name, part in parts.items()}
        return planned, {name: sum(t.nbytes for t in tensors[name]) for name in tensors}

    planned, kept = on_master(folder, 2, sizes, device_map={"": 0, "model.layers.1": 1})
    assert planned == kept
    assert planned["model.layers.2"] < planned["lm_head"] * 2
