"""Each rank reads its own tensors, and a checkpoint that is wrong is an error on every rank."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import inference
from coordinator import Coordinator
from inference.checkpoint import load_shard
from inference.layout import layout, skeleton


def real(model) -> set[str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name for name, tensor in named if not tensor.is_meta}


def test_a_rank_has_only_its_own_tensors_and_they_are_those_of_the_checkpoint(checkpoints):
    plain, path = checkpoints.llama()
    places = {"": "meta", "model.layers.2": "cpu", "model.layers.3": "cpu"}
    shard = load_shard(LlamaForCausalLM, path, places, torch.float32)
    own = {name for name, _ in plain.named_parameters() if ".2." in name or ".3." in name}
    assert real(shard) == own
    assert all(torch.equal(shard.get_parameter(n), plain.get_parameter(n)) for n in own)


def test_experts_that_transformers_fuses_are_fused_on_their_owner_too(checkpoints):
    config = {"num_hidden_layers": 2, "num_local_experts": 4, "hidden_size": 32, "vocab_size": 64}
    sizes = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    plain, path = checkpoints.make("mixtral2", "MixtralForCausalLM", **config, **sizes)
    shard = load_shard(type(plain), path, {"": "meta", "model.layers.1": "cpu"}, torch.float32)
    names = [name for name, _ in plain.named_parameters() if name.startswith("model.layers.1.")]
    assert any("gate_up_proj" in name for name in names)
    assert all(torch.equal(shard.get_parameter(n), plain.get_parameter(n)) for n in names)


def test_the_layout_counts_every_byte_once(checkpoints):
    for plain, _ in (checkpoints.llama(), checkpoints.gpt2()):
        model = skeleton(type(plain), plain.config, torch.float32)
        tensors = [*plain.parameters(), *plain.buffers()]
        expected = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert layout(model).nbytes == expected


def test_tied_weights_are_on_one_rank_wherever_they_are(checkpoints, on_master):
    config = {"tie_word_embeddings": True, **SMALL}
    plain, path = checkpoints.make("tied", "LlamaForCausalLM", **config)
    ids = torch.arange(3, 12)[None]
    device_map = {"": 0, "model.embed_tokens": 1, "lm_head": 1}

    def work(model):
        return model.generate(ids, max_new_tokens=8, do_sample=False).tolist()

    assert on_master(path, 2, work, device_map=device_map) == work(plain)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,
}


@pytest.fixture
def sharded(tmp_path):
    """A checkpoint in several files with an index, to be damaged."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    return tmp_path


def complaints(ranks_or_errors, path) -> list[str]:
    """What each of three ranks raises."""

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            inference.load(path, coor=coor, max_memory=[1 << 30] * 3).close()

    found = ranks_or_errors(rank, 3)
    assert all(isinstance(error, inference.CheckpointError) for error in found), found
    return [str(error) for error in found]


def test_a_sharded_checkpoint_loads(sharded, on_master):
    assert on_master(sharded, 3, lambda model: model.device_map.ranks) == [0, 1, 2]


def test_a_missing_tensor_is_an_error_on_every_rank(sharded, ranks_or_errors):
    name = "model.layers.1.mlp.up_proj.weight"
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    file = sharded / index["weight_map"][name]
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    assert all(name in text for text in complaints(ranks_or_errors, sharded))


def test_a_surplus_tensor_is_an_error_on_every_rank(sharded, ranks_or_errors):
    file = sorted(sharded.glob("*.safetensors"))[0]
    save_file({**load_file(file), "extra": torch.zeros(2)}, file, metadata={"format": "pt"})
    assert all("extra" in text for text in complaints(ranks_or_errors, sharded))


def test_a_tensor_of_another_shape_is_an_error_on_every_rank(sharded, ranks_or_errors):
    file = sorted(sharded.glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file({**tensors, name: torch.zeros(3, 3)}, file, metadata={"format": "pt"})
    assert all(name in text for text in complaints(ranks_or_errors, sharded))


def test_a_truncated_file_is_an_error_on_every_rank(sharded, ranks_or_errors):
    file = sorted(sharded.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-100])
    assert all(file.name in text for text in complaints(ranks_or_errors, sharded))


def test_a_missing_file_is_an_error_on_every_rank(sharded, ranks_or_errors):
    file = sorted(sharded.glob("*.safetensors"))[-1]
    file.unlink()
    assert all(file.name in text for text in complaints(ranks_or_errors, sharded))


def test_pickles_are_refused_with_the_line_that_converts_them(sharded, ranks_or_errors):
    for file in sharded.glob("*.safetensors*"):
        file.unlink()
    (sharded / "pytorch_model.bin").write_bytes(b"")
    texts = complaints(ranks_or_errors, sharded)
    assert all("pytorch_model.bin" in text and "save_pretrained" in text for text in texts)


def test_a_path_without_a_model_is_refused(tmp_path, ranks_or_errors):
    texts = complaints(ranks_or_errors, tmp_path / "nowhere")
    assert all("nowhere" in text and "config.json" in text for text in texts)


def test_ranks_with_different_models_find_out_before_serving(sharded, tmp_path, ranks_or_errors):
    other = tmp_path / "other"
    shutil.copytree(sharded, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            path = other if info.rank == 1 else sharded
            inference.load(path, coor=coor, max_memory=[1 << 30] * 2).close()

    texts = [str(error) for error in ranks_or_errors(rank, 2)]
    assert all("config" in text and "rank 1" in text for text in texts)


def test_a_world_of_one_is_an_ordinary_model(checkpoints, on_master):
    plain, path = checkpoints.llama()
    ids = torch.arange(3, 12)[None]

    def work(model):
        return model.generate(ids, max_new_tokens=8, do_sample=False).tolist()

    assert on_master(path, 1, work) == work(plain)
