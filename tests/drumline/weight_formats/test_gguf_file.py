"""A GGUF file, of which each rank dequantizes the tensors of its own layers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

import drumline
from coordinator import Coordinator
from drumline import CheckpointError, PlanError
from drumline.checkpoint.json_files import gguf_path
from tests.drumline.checkpoint.gguf_bytes import TENSORS
from tests.drumline.weight_formats.test_lora_adapter import LINEAR, make_adapter, merge


@pytest.fixture
def file(checkpoints, tmp_path):
    """The tiny Llama as llama.cpp would have it, its matrices in Q8_0."""
    gguf = pytest.importorskip("gguf", reason="runs after `pip install gguf`")
    plain, _ = checkpoints.llama()
    config = plain.config
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)

    def add(name, tensor):
        array = tensor.detach().float().numpy()
        kind = gguf.GGMLQuantizationType.Q8_0 if array.ndim > 1 else None
        data = array if kind is None else gguf.quantize(array, kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    add("token_embd", plain.model.embed_tokens.weight)
    for number, layer in enumerate(plain.model.layers):
        for ours, theirs in TENSORS.items():
            add(f"blk.{number}.{theirs}", layer.get_submodule(ours).weight)
    add("output_norm", plain.model.norm.weight)
    add("output", plain.lm_head.weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf"


def result(model):
    ids = torch.arange(3, 12)[None]
    tokens = model.generate(ids, max_new_tokens=8, do_sample=False).tolist()
    return tokens, {n: p.clone() for n, p in model.named_parameters() if not p.is_meta}


@pytest.mark.parametrize("names_file", [False, True])
def test_the_layers_are_those_of_one_process(file, on_master, names_file):
    plain = LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    options = {"gguf_file": file.name} if names_file else {}
    path = file.parent if names_file else file
    tokens, own = on_master(path, 3, result, dtype=torch.float32, **options)
    assert tokens == result(plain)[0] and own
    assert all(torch.equal(own[name], plain.get_parameter(name)) for name in own)


def test_an_adapter_is_merged_into_the_layers_of_a_file(file, on_master, tmp_path):
    plain = LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    merged = merge(plain, make_adapter(tmp_path / "adapter", plain, LINEAR))
    options = {"dtype": torch.float32, "adapter": tmp_path / "adapter"}
    tokens, own = on_master(file, 3, result, **options)
    assert tokens == result(merged)[0]
    assert all(torch.equal(own[name], merged.get_parameter(name)) for name in own)


def test_a_file_that_is_cut_off_is_named(file, ranks_or_errors):
    file.write_bytes(file.read_bytes()[:5000])

    def rank(info):
        with Coordinator(info, timeout_s=30) as coor:
            drumline.load(file, coor=coor).close()

    for error in ranks_or_errors(rank, 2):
        assert isinstance(error, CheckpointError) and "model.gguf is not a whole GGUF" in str(error)


def test_layers_of_a_gguf_file_are_not_split(tmp_path):
    with pytest.raises(PlanError, match="whole layers"):
        drumline.load(tmp_path / "model.gguf", tp=2)


def test_a_gguf_file_is_meant_by_its_path_or_its_name():
    assert gguf_path("folder", None) is None
    assert str(gguf_path("folder", "a.gguf")) == "folder/a.gguf"
    assert str(gguf_path("folder/a.gguf", None)) == "folder/a.gguf"
