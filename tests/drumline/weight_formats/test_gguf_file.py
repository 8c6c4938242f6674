"""A GGUF file, of which each rank keeps the blocks of its own layers."""

from __future__ import annotations

import copy
import itertools
from enum import IntEnum
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import drumline
from coordinator import Coordinator
from drumline import CheckpointError, PlanError
from drumline.checkpoint.json_files import gguf_path
from drumline.checkpoint.safetensors_index import StoredTensor
from drumline.checkpoint.source import CheckpointFiles
from drumline.core.packed_tensor import PackedTensor
from drumline.weight_formats import gguf_file
from tests.drumline.checkpoint.gguf_bytes import TENSORS
from tests.drumline.conftest import LLAMA
from tests.drumline.weight_formats.test_lora_adapter import LINEAR, make_adapter, merge

KINDS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_XS")
SCALES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
SCALES_AT |= dict.fromkeys(("Q4_K", "Q5_K", "Q4_1", "Q5_1"), (0, 2))
"""Where the half-precision numbers of a block are, in bytes; at 0 in the others."""

MIXTURE = {"hidden_size": 256, "num_hidden_layers": 2, "head_dim": 64, "vocab_size": 64}
MIXTURE |= {"num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 4}
MIXTURE_TENSORS = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}


def random_blocks(gguf, kind, rows, columns, generator):
    """Any bytes are blocks, with scales that keep the weights small."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    return (
        random_bytes(kind.name, (rows * columns // size, nbytes), generator).view(rows, -1).numpy()
    )


def random_bytes(kind, shape, generator):
    """[blocks, bytes of a block]"""
    blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    for at in SCALES_AT.get(kind, (0,)):
        scales = torch.rand(len(blocks), 1, generator=generator) / 500
        blocks[:, at : at + 2] = scales.half().view(torch.uint8)
    return blocks


def write_gguf(gguf, path, plain, blocks_of, **others):
    """A Llama or Qwen3-MoE as llama.cpp has it. blocks_of: the type and the blocks of a matrix.
    others: tensors beside those of the model."""
    config = plain.config
    is_mixture = hasattr(config, "num_experts")
    writer = gguf.GGUFWriter(path, "qwen3moe" if is_mixture else "llama")
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
        kind, data = blocks_of(tensor) if tensor.dim() > 1 else (None, tensor.detach().numpy())
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    add("token_embd", plain.model.embed_tokens.weight)
    if is_mixture:
        writer.add_key_length(config.head_dim)
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    for number, layer in enumerate(plain.model.layers):
        names = {n: t for n, t in TENSORS.items() if not is_mixture or not n.startswith("mlp")}
        names |= MIXTURE_TENSORS if is_mixture else {}
        for ours, theirs in names.items():
            add(f"blk.{number}.{theirs}", layer.get_submodule(ours).weight)
        if is_mixture:
            gate, up = layer.mlp.experts.gate_up_proj.chunk(2, 1)
            for name, stack in ("gate", gate), ("up", up), ("down", layer.mlp.experts.down_proj):
                add(f"blk.{number}.ffn_{name}_exps", stack)
    add("output_norm", plain.model.norm.weight)
    add("output", plain.lm_head.weight)
    for name, tensor in others.items():
        add(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def file(checkpoints, tmp_path):
    """The tiny Llama, its matrices in Q8_0."""
    gguf = pytest.importorskip("gguf", reason="runs after `pip install gguf`")
    kind = gguf.GGMLQuantizationType.Q8_0

    def blocks_of(tensor):
        return kind, gguf.quantize(tensor.detach().numpy(), kind)

    write_gguf(gguf, tmp_path / "model.gguf", checkpoints.llama()[0], blocks_of)
    return tmp_path / "model.gguf"


@pytest.fixture
def mixed(checkpoints, tmp_path):
    """A Llama with rows of 256, each matrix of another type."""
    gguf = pytest.importorskip("gguf", reason="runs after `pip install gguf`")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3}
    plain, _ = checkpoints.make("llama of 256", "LlamaForCausalLM", **{**LLAMA, **sizes})
    kinds = itertools.cycle(getattr(gguf.GGMLQuantizationType, name) for name in KINDS)
    generator = torch.Generator().manual_seed(4)

    def blocks_of(tensor):
        kind = next(kinds)
        return kind, random_blocks(gguf, kind, *tensor.shape, generator)

    write_gguf(gguf, tmp_path / "model.gguf", plain, blocks_of)
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


@pytest.mark.parametrize("nprocs", [1, 2])
def test_blocks_stay_blocks_in_memory_and_in_the_plan(mixed, on_master, nprocs, caplog):
    """A file of 40 GB had needed 141."""

    @torch.no_grad()  # which remote layers run under: one library multiplies in all, in each plan
    def sizes(model):
        logits = model(torch.arange(3, 60)[None]).logits
        with torch.no_grad():
            few = model(torch.arange(3, 5)[None]).logits
        kept = sum(p.nbytes for p in model.parameters() if not p.is_meta)
        return logits, few, kept, sum(model.device_map.nbytes[n] for n in model.device_map.of(0))

    logits, few, kept, planned = on_master(mixed, nprocs, sizes, dtype=torch.float32)
    assert caplog.text.count("stay in the few bits that are stored") == 1  # for that takes time
    options = {"dtype": torch.float32, "dequantize": True}
    plain, few_plain, dense, more = on_master(mixed, nprocs, sizes, **options)
    assert caplog.text.count("stay in the few bits that are stored") == 1
    assert torch.equal(logits, plain)
    torch.testing.assert_close(few, few_plain, rtol=1e-5, atol=1e-5)
    assert kept < dense / 3
    assert more - planned == dense - kept


@pytest.mark.parametrize("kind_of_up", ["Q6_K", "F16"])
def test_experts_are_multiplied_one_by_one_in_their_blocks(
    checkpoints, on_master, tmp_path, kind_of_up
):
    """Each token made numbers of all experts of a layer, at once."""
    gguf = pytest.importorskip("gguf", reason="runs after `pip install gguf`")
    plain, _ = checkpoints.make("qwen3 moe of 256", "Qwen3MoeForCausalLM", **MIXTURE)
    kinds = itertools.cycle(
        getattr(gguf.GGMLQuantizationType, n) for n in ("Q4_K", kind_of_up, "Q8_0")
    )
    generator = torch.Generator().manual_seed(4)

    def blocks_of(tensor):
        kind = next(kinds)
        blocks = random_blocks(gguf, kind, tensor[..., 0].numel(), tensor.shape[-1], generator)
        return kind, blocks.reshape(*tensor.shape[:-1], -1)

    write_gguf(gguf, tmp_path / "model.gguf", plain, blocks_of)

    def run(model):
        with torch.no_grad():
            few = model(torch.arange(3, 8)[None]).logits
        experts = model.model.layers[0].mlp.experts
        return few, model.generate(torch.arange(3, 8)[None], max_new_tokens=6).tolist(), experts

    options = {"dtype": torch.float32, "device_map": {"": 0, "model.layers.1": 1}}
    path = tmp_path / "model.gguf"
    few, tokens, experts = on_master(path, 2, run, **options)
    few_plain, tokens_plain, _ = on_master(path, 2, run, dequantize=True, **options)
    torch.testing.assert_close(few, few_plain, rtol=1e-5, atol=1e-5)
    assert tokens == tokens_plain
    packed = experts.gate_up_proj
    assert isinstance(packed, PackedTensor) and isinstance(packed[1], PackedTensor)


def test_parts_with_rows_of_other_lengths_are_refused(checkpoints, ranks_or_errors, tmp_path):
    """Their elements were as many as the model's, and a product read behind the shorter rows."""
    gguf = pytest.importorskip("gguf", reason="runs after `pip install gguf`")
    plain, _ = checkpoints.make("qwen3 moe of 256", "Qwen3MoeForCausalLM", **MIXTURE)
    generator, kind = torch.Generator().manual_seed(4), gguf.GGMLQuantizationType.Q4_0
    size = plain.config.hidden_size
    columns = itertools.cycle([size // 2, size // 2 * 3, None])  # of gate, up, down

    def blocks_of(tensor):
        width = (tensor.dim() == 3 and next(columns)) or tensor.shape[-1]
        blocks = random_blocks(gguf, kind, tensor[..., 0].numel(), width, generator)
        return kind, blocks.reshape(*tensor.shape[:-1], -1)

    write_gguf(gguf, tmp_path / "model.gguf", plain, blocks_of)

    def rank(info):
        with Coordinator(info, timeout_s=30) as coor:
            drumline.load(tmp_path / "model.gguf", coor=coor, dtype=torch.float32).close()

    (error,) = ranks_or_errors(rank, 1)
    assert isinstance(error, CheckpointError) and "ffn_up_exps" in str(error)


def test_a_rank_without_the_file_is_sent_the_blocks(mixed, on_master, tmp_path):
    """Every rank had to have the file."""

    @torch.no_grad()  # which remote layers run under: one library multiplies in all, in each plan
    def sent(model):
        return model(torch.arange(3, 60)[None]).logits, model.loaded.nbytes_sent

    options = {"dtype": torch.float32, "elsewhere": tmp_path / "absent" / mixed.name}
    logits, nbytes = on_master(mixed, 2, sent, **options)
    plain, dense_nbytes = on_master(mixed, 2, sent, dequantize=True, **options)
    assert torch.equal(logits, plain)
    assert nbytes < dense_nbytes / 3


def test_blocks_are_read_from_disk_by_each_pass(mixed, on_master):
    """The first layer on disk ended the pass: what is read-only there was not known as packed."""

    @torch.no_grad()
    def run(model):
        return model(torch.arange(3, 60)[None]).logits

    device_map = {"": 0, "model.layers": (1, "disk"), "model.layers.0": (0, "disk")}
    logits = on_master(mixed, 2, run, dtype=torch.float32, device_map=device_map)
    assert torch.equal(logits, on_master(mixed, 1, run, dtype=torch.float32, dequantize=True))


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


def test_factors_of_positions_that_no_config_has_are_named_once(
    checkpoints, on_master, tmp_path, caplog
):
    """Those of Llama 3.1 were passed over without a word."""
    gguf = pytest.importorskip("gguf", reason="runs after `pip install gguf`")
    plain, kind = checkpoints.llama()[0], gguf.GGMLQuantizationType.F32
    path, factors = tmp_path / "model.gguf", torch.full((8,), 2.0)
    write_gguf(gguf, path, plain, lambda t: (kind, t.detach().numpy()), rope_freqs=factors)
    on_master(path, 2, lambda model: None)
    assert caplog.text.count("holds rope_freqs.weight") == 1
    config = copy.deepcopy(plain.config)
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    on_master(path, 2, lambda model: None, config=config)
    assert caplog.text.count("holds rope_freqs.weight") == 1


@pytest.mark.parametrize("kinds", [("default", "proportional"), ("default", "default")])
def test_factors_are_named_where_every_kind_of_layer_has_plain_positions(kinds, caplog):
    layers = ("sliding_attention", "full_attention")
    by_layer = {name: {"rope_type": kind} for name, kind in zip(layers, kinds, strict=True)}
    config = SimpleNamespace(rope_parameters=by_layer)
    files = SimpleNamespace(config=config, index={"rope_freqs.weight": 1}, path="a.gguf")
    gguf_file.warn_of_factors(files)
    assert ("holds rope_freqs.weight" in caplog.text) == ("proportional" not in kinds)


def test_weights_are_the_same_whatever_the_default_dtype_is(file, on_master):
    """Those of one dimension were rounded to it, or numpy did not know it."""
    _, expected = on_master(file, 2, result, dtype=torch.float32)
    torch.set_default_dtype(torch.bfloat16)
    try:
        _, own = on_master(file, 2, result, dtype=torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], expected[name]) for name in own)


@pytest.mark.parametrize("number", [39, 40])
def test_a_type_that_the_library_of_a_rank_without_the_file_does_not_know_is_named(
    monkeypatch, tmp_path, number
):
    """It was a ValueError of an Enum, or came with the first pass."""

    def dequantize(blocks, kind):
        raise NotImplementedError

    kind = IntEnum("GGMLQuantizationType", {"NEW": 40})
    library = SimpleNamespace(
        GGMLQuantizationType=kind, GGML_QUANT_SIZES={kind.NEW: (32, 18)}, dequantize=dequantize
    )
    monkeypatch.setattr(gguf_file, "import_gguf", lambda: library)
    index = {"output.weight": StoredTensor("model.gguf", 0, "U8", (4, 18))}
    files = CheckpointFiles(tmp_path / "model.gguf", index, (0, 0))
    described = [LlamaConfig().to_dict(), {"output.weight": ["llama", number, [4, 32]]}]
    with pytest.raises(CheckpointError, match=r"output\.weight is of type .* of this rank"):
        gguf_file._described(files, described)


def test_layers_of_a_gguf_file_are_not_split(tmp_path):
    with pytest.raises(PlanError, match="whole layers"):
        drumline.load(tmp_path / "model.gguf", tp=2)


def test_a_gguf_file_is_meant_by_its_path_or_its_name():
    assert gguf_path("folder", None) is None
    assert str(gguf_path("folder", "a.gguf")) == "folder/a.gguf"
    assert str(gguf_path("folder/a.gguf", None)) == "folder/a.gguf"
