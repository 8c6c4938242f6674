"""A rank's memory is its own share, measured after it has run: mapped pages count once touched."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from inference import plan
from inference.layout import layout, skeleton

SPARE = 64 << 20
"""What a rank may take beside its share: blocks on their way, and code that is loaded late."""

SCRIPT = """
import json, sys, threading
import torch
from transformers import MixtralConfig, MixtralForCausalLM
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
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=4,
    )
    return MixtralForCausalLM(config)

torch.set_num_threads(1)
path, everything = sys.argv[1], sys.argv[2] == "everything"
where = {"": 0, "model.layers": (0, "disk")} if sys.argv[2] == "on disk" else "auto"
coor = Coordinator()
if coor.rank == 2:
    path = "nowhere"  # the master sends what this rank holds
tokens = torch.arange(3, 40)[None]
small().generate(tokens, max_new_tokens=3)
coor.barrier()
open("/proc/self/clear_refs", "w").write("5")
before = memory()
try:
    if everything:
        MixtralForCausalLM.from_pretrained(path).generate(tokens, max_new_tokens=3)
    else:
        model = inference.load(path, where, coor, max_memory=[1 << 30] * coor.world_size)
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
    """About 240 MiB in several files, most of it in experts, which are fused as they are loaded."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("large")
    config = MixtralConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_local_experts=4,
        eos_token_id=None,
    )
    MixtralForCausalLM(config).save_pretrained(folder, max_shard_size="60MB")
    return folder


def growth(start, checkpoint, nprocs: int, kind: str) -> list[dict[str, int]]:
    """By how much the memory of each rank grew."""
    processes = start(SCRIPT, nprocs, checkpoint, kind)
    outputs = [process.communicate(timeout=100) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.fixture(scope="module")
def shares(checkpoint) -> list[int]:
    """The bytes that the plan gives to each of three ranks."""
    config = MixtralConfig.from_pretrained(checkpoint)
    parts = layout(skeleton(MixtralForCausalLM, config, torch.float32))
    room = {(rank, "cpu"): 1 << 30 for rank in range(3)}
    chosen = plan(parts, room)
    return [chosen.used(place) for place in room]


def test_a_rank_takes_its_own_share_and_little_more_wherever_the_files_are(
    start, checkpoint, shares
):
    found = growth(start, checkpoint, 3, "its own")
    for share, grown in zip(shares, found, strict=True):
        assert grown["anonymous"] + grown["file"] >= share, "the weights are not there yet"
        assert grown["anonymous"] + grown["file"] <= share + SPARE
        assert grown["peak"] <= share + SPARE


def test_layers_that_stay_on_disk_take_the_room_of_two(start, checkpoint):
    """Far less than the share: the memory of one layer at work and of one on its way."""
    config = MixtralConfig.from_pretrained(checkpoint)
    parts = layout(skeleton(MixtralForCausalLM, config, torch.float32))
    around = sum(part.nbytes for part in parts.others)
    needed = around + 2 * max(part.nbytes for part in parts.layers) + SPARE
    assert needed < parts.nbytes
    (grown,) = growth(start, checkpoint, 1, "on disk")
    assert grown["peak"] <= needed


def test_a_rank_that_loads_everything_is_caught_by_the_same_measure(start, checkpoint, shares):
    (grown,) = growth(start, checkpoint, 1, "everything")
    assert grown["peak"] > max(shares) + SPARE
