"""A rank's memory is its own share, measured after it has run: mapped pages count once touched."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inference import plan
from inference.layout import layout, skeleton

SPARE = 64 << 20

SCRIPT = """
import json, sys, threading
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import inference
from coordinator import Coordinator

def memory():
    '''Bytes of this process: now, at the peak, and in pages of the checkpoint.'''
    status = dict(line.split(":") for line in open("/proc/self/status"))
    names = {"anonymous": "RssAnon", "peak": "VmHWM"}
    found = {key: int(status[name].split()[0]) * 1024 for key, name in names.items()}
    found["file"] = 0
    for line in open("/proc/self/smaps"):
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            ours = line.rstrip().endswith(".safetensors")
        elif words[0] == "Rss:" and ours:
            found["file"] += int(words[1]) * 1024
    return found

def small():
    '''A model of the same kind, so that all code is loaded before anything is measured.'''
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config)

torch.set_num_threads(1)
path, everything = sys.argv[1], sys.argv[2] == "everything"
coor = Coordinator()
tokens = torch.arange(3, 40)[None]
small().generate(tokens, max_new_tokens=3)
coor.barrier()
open("/proc/self/clear_refs", "w").write("5")
before = memory()
try:
    if everything:
        LlamaForCausalLM.from_pretrained(path).generate(tokens, max_new_tokens=3)
    else:
        model = inference.load(path, coor=coor, max_memory=[1 << 30] * coor.world_size)
        model.generate(tokens, max_new_tokens=3)
    after = memory()
    if not everything:
        model.close()
except inference.Served:
    after = memory()
print(json.dumps({key: after[key] - before[key] for key in before}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """About 230 MiB in several files."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=14,
        num_attention_heads=8,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="60MB")
    return folder


def growth(start, checkpoint, nprocs: int, kind: str) -> list[dict[str, int]]:
    """By how much the memory of each rank grew."""
    processes = start(SCRIPT, nprocs, checkpoint, kind)
    outputs = [process.communicate(timeout=100) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.fixture(scope="module")
def shares(checkpoint) -> list[int]:
    """The bytes that the plan gives to each of two ranks."""
    config = LlamaConfig.from_pretrained(checkpoint)
    parts = layout(skeleton(LlamaForCausalLM, config, torch.float32))
    room = {(0, "cpu"): 1 << 30, (1, "cpu"): 1 << 30}
    chosen = plan(parts, room)
    return [chosen.used(place) for place in room]


def test_a_rank_takes_its_own_share_and_little_more(start, checkpoint, shares):
    found = growth(start, checkpoint, 2, "its own")
    for share, grown in zip(shares, found, strict=True):
        assert grown["anonymous"] + grown["file"] >= share, "the weights are not there yet"
        assert grown["anonymous"] + grown["file"] <= share + SPARE
        assert grown["peak"] <= share + SPARE


def test_a_rank_that_loads_everything_is_caught_by_the_same_measure(start, checkpoint, shares):
    (grown,) = growth(start, checkpoint, 1, "everything")
    assert grown["peak"] > max(shares) + SPARE
