"""What only processes can show: DTensors of torch's own process groups, and memory."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

HERE = Path(__file__).parent
MIB = 1 << 20
WINDOW = 64 * MIB
LLAMA = {
    "vocab_size": 63,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
T5 = {
    "vocab_size": 63,
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 8,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
SHAPES = {f"w{number}": [2048, 4096] for number in range(8)} | {"embed": [16384, 2048]}


def run(warm, *arguments):
    done = warm.run("-m", "launcher", "run", "-n", "4", HERE / "shard_loader_ranks.py", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_dtensors_and_fully_shard_hold_their_own_shards_and_compute_the_same(warm, tmp_path):
    shapes = {"head.weight": [11, 10]}
    for block in range(2):
        shapes |= {f"blocks.{block}.up.weight": [18, 10], f"blocks.{block}.up.bias": [18]}
        shapes |= {f"blocks.{block}.down.weight": [10, 18], f"blocks.{block}.down.bias": [10]}
    torch.manual_seed(0)
    state = {name: torch.randn(shape) / 4 for name, shape in shapes.items()}
    save_file(state, tmp_path / "model.safetensors")
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(tmp_path / "llama")
    T5ForConditionalGeneration(T5Config(**T5)).save_pretrained(tmp_path / "t5")
    out = run(warm, "dtensor", tmp_path)
    assert out.count("shards bitwise") == 2
    assert out.count("loss equal") == 6


@pytest.fixture(scope="module")
def over(warm, tmp_path_factory):
    """By reader, how far each rank's peak was above its share; a tensor is twice the window."""
    folder = tmp_path_factory.mktemp("large")
    state = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    save_file(state, folder / "model.safetensors")
    (folder / "shapes.json").write_text(json.dumps(SHAPES))
    found = {}
    for line in run(warm, "memory", folder).splitlines():
        match = re.search(r"(each|rank0|everything) (\[\[.*)", line)
        if match:
            found[match[1]] = [peak - share for share, peak in json.loads(match[2])]
    return found


@pytest.mark.parametrize("reader", ["each", "rank0"])
def test_no_rank_needs_more_than_its_share_and_the_window(over, reader):
    assert max(over[reader]) < WINDOW


def test_the_measurement_sees_a_rank_that_loads_everything(over):
    assert min(over["everything"]) > WINDOW
