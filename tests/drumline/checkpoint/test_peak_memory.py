"""A rank's memory is its own share, read from outside once it has run: mapped pages count."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from drumline import plan
from drumline.planner.model_profile import build_on_meta, profile_model

SPARE = 64 << 20
"""What a rank may take beside its share: blocks on their way, and code that is loaded late."""

SCRIPT = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})  # before there is any other thread
import torch
from transformers import MixtralConfig, MixtralForCausalLM
import drumline
from coordinator import Coordinator

def stand_still():
    '''Until this process has been measured.'''
    print("still", flush=True)
    signal.sigwait({signal.SIGUSR2})

def small():
    '''A model of the same kind, so that all code is loaded before anything is measured.'''
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=4,
    )
    return MixtralForCausalLM(config)

torch.set_num_threads(1)
path, kind, blind = sys.argv[1:]
where = {"": 0, "model.layers": (0, "disk")} if kind == "on disk" else "auto"
coor = Coordinator()
if str(coor.rank) in blind:
    path = "nowhere"  # the master sends what this rank holds
tokens = torch.arange(3, 40)[None]
small().generate(tokens, max_new_tokens=3)
stand_still()
try:
    if kind == "everything":
        model = MixtralForCausalLM.from_pretrained(path)
    else:
        model = drumline.load(path, where, coor, max_memory=[1 << 30] * coor.world_size)
    model.generate(tokens, max_new_tokens=3)
    stand_still()
    if kind != "everything":
        model.close()
except drumline.WorkerExit:
    stand_still()
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


def growth(start, checkpoint, nprocs: int, kind: str, blind: str = "") -> list[dict[str, int]]:
    """By how much the memory of each rank grew, seen from here. blind: who has no files."""
    processes = start(SCRIPT, nprocs, checkpoint, kind, blind)
    before = [measured(process, is_first=True) for process in processes]
    for process in processes:
        process.send_signal(signal.SIGUSR2)
    after = []
    for process in processes:  # the master first: the others serve until it closes the model
        after.append(measured(process))
        process.send_signal(signal.SIGUSR2)
    outputs = [process.communicate(timeout=100) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    return [
        {key: now[key] - then[key] for key in now} for then, now in zip(before, after, strict=True)
    ]


def measured(process, is_first: bool = False) -> dict[str, int]:
    """Bytes of a process that stands still: in anonymous and in file-backed pages, and the peak.

    is_first: the peak begins anew here (proc(5), clear_refs).
    """
    line = process.stdout.readline()
    assert line == "still\n", (line, process.communicate(timeout=100))
    folder = Path("/proc") / str(process.pid)
    if is_first:
        (folder / "clear_refs").write_text("5")
    pages, status = numbers(folder / "smaps_rollup"), numbers(folder / "status")
    anonymous = pages["Anonymous"]
    return {"anonymous": anonymous, "file": pages["Rss"] - anonymous, "peak": status["VmHWM"]}


def numbers(path: Path) -> dict[str, int]:
    """The sizes that a file of /proc tells, in bytes."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    return {name: int(size) * 1024 for name, size in found}


@pytest.fixture(scope="module")
def shares(checkpoint) -> list[int]:
    """The bytes that the plan gives to each of three ranks."""
    config = MixtralConfig.from_pretrained(checkpoint)
    parts = profile_model(build_on_meta(MixtralForCausalLM, config, torch.float32))
    max_memory = {(rank, "cpu"): 1 << 30 for rank in range(3)}
    chosen = plan(parts, max_memory)
    return [chosen.used(place) for place in max_memory]


@pytest.mark.parametrize(
    "blind", ["", "12"], ids=["each reads its own", "the master reads for all"]
)
def test_a_rank_takes_its_own_share_and_little_more_wherever_the_files_are(
    start, checkpoint, shares, blind
):
    found = growth(start, checkpoint, 3, "its own", blind)
    for share, grown in zip(shares, found, strict=True):
        assert grown["anonymous"] + grown["file"] >= 0.9 * share, "the weights are not there yet"
        assert grown["anonymous"] + grown["file"] <= share + SPARE
        assert grown["peak"] <= share + SPARE


def test_layers_that_stay_on_disk_take_the_room_of_two(start, checkpoint):
    """Far less than the share: the memory of one layer at work and of one on its way."""
    config = MixtralConfig.from_pretrained(checkpoint)
    parts = profile_model(build_on_meta(MixtralForCausalLM, config, torch.float32))
    around = sum(part.nbytes for part in parts.others)
    needed = around + 2 * max(part.nbytes for part in parts.layers) + SPARE
    assert needed < parts.nbytes
    (grown,) = growth(start, checkpoint, 1, "on disk")
    assert grown["peak"] <= needed


def test_a_rank_that_loads_everything_is_caught_by_the_same_measure(start, checkpoint, shares):
    (grown,) = growth(start, checkpoint, 1, "everything")
    assert grown["peak"] > max(shares) + SPARE
