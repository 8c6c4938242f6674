"""Ranks that read different copies of a checkpoint compare them, down to the byte."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import drumline
from coordinator import Coordinator, FailureReason, PeerLost, RankFailure
from drumline import CheckpointError, timings
from drumline.checkpoint import copy_check
from drumline.checkpoint.copy_check import CopyCheck, PassingReader, group_by_copy
from drumline.checkpoint.safetensors_index import read_index
from drumline.checkpoint.shard_loader import load_into
from drumline.core.shards import split_into_blocks
from launcher import linux

NPROCS = 3
PAGE_NBYTES = mmap.PAGESIZE


@pytest.fixture
def copies(checkpoints, tmp_path):
    """The path of each rank: ranks 0 and 1 read one copy, rank 2 another."""
    _, path = checkpoints.llama()
    shutil.copytree(path, tmp_path / "other")
    return [path, path, tmp_path / "other"]


def change_byte(folder, name, at=-1):
    """Flip a bit of a tensor: in its byte `at`."""
    stored = read_index(folder)[name]
    file = folder / stored.file
    data = bytearray(file.read_bytes())
    data[stored.offset + at % stored.nbytes] ^= 1
    file.write_bytes(data)


def loading(paths, work=lambda model: None, **options):
    """A rank that loads the model from its path, and what work(model) gives on the master."""

    def rank(info):
        torch.set_num_threads(1)
        with Coordinator(info, timeout_s=30) as coor:
            memory = {} if "mesh" in options else {"max_memory": [1 << 30] * NPROCS}
            try:
                with drumline.load(paths[info.rank], coor=coor, **memory, **options) as model:
                    return work(model)
            except drumline.WorkerExit as served:
                return served.code

    return rank


def greedy(model):
    return model.generate(torch.arange(3, 12)[None], max_new_tokens=8, do_sample=False).tolist()


def assert_named(errors, paths, name):
    assert all(isinstance(error, drumline.DrumlineError) for error in errors), errors
    for error in errors:
        assert name in str(error), error
        assert str(paths[0]) in str(error) and str(paths[2]) in str(error)


@pytest.fixture
def in_background(monkeypatch):
    """Small files are compared as large ones are: a sample of each tensor, then all on a thread."""
    monkeypatch.setattr(copy_check, "AT_ONCE_NBYTES", 0)
    monkeypatch.setattr(copy_check, "SAMPLE_NBYTES", 16)
    monkeypatch.setattr(copy_check, "BLOCK_NBYTES", 1000)


@pytest.mark.parametrize(
    ("name", "at"),
    [("lm_head.weight", 0), ("model.layers.3.mlp.up_proj.weight", 77), ("model.norm.weight", -1)],
)
def test_copies_that_differ_in_one_byte_are_named_with_the_tensor(
    copies, ranks_or_errors, name, at
):
    """Loaded by whoever owned the layers: tokens of neither, and nothing was said."""
    change_byte(copies[2], name, at)
    errors = ranks_or_errors(loading(copies), NPROCS)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert_named(errors, copies, name)


def test_the_first_of_several_tensors_that_differ_is_named(copies, ranks_or_errors):
    index = read_index(copies[0])
    names = sorted(index, key=lambda name: index[name].offset)
    for name in names[3:]:
        change_byte(copies[2], name)
    assert_named(ranks_or_errors(loading(copies), NPROCS), copies, names[3])


def test_copies_that_are_sharded_over_tp_are_compared_too(copies, ranks_or_errors):
    change_byte(copies[2], "lm_head.weight")
    errors = ranks_or_errors(loading(copies, mesh={"dp_replicate": NPROCS}), NPROCS)
    assert_named(errors, copies, "lm_head.weight")


def test_the_bytes_of_large_copies_are_compared_while_the_model_is_in_use(
    copies, ranks_or_errors, in_background
):
    change_byte(copies[2], "model.layers.1.self_attn.q_proj.weight")
    errors = ranks_or_errors(loading(copies), NPROCS)
    assert_named(errors, copies, "model.layers.1.self_attn.q_proj.weight")


def test_samples_of_large_copies_are_compared_before_loading(
    copies, ranks_or_errors, in_background, monkeypatch
):
    monkeypatch.setattr(CopyCheck, "__enter__", lambda check: pytest.fail("it was loaded"))
    name = "model.layers.1.self_attn.q_proj.weight"
    change_byte(copies[2], name, read_index(copies[0])[name].nbytes // 2)
    assert_named(ranks_or_errors(loading(copies), NPROCS), copies, name)


def test_ranks_may_differ_by_hours_in_reading_samples(copies, ranks, monkeypatch):
    deadlines, inner = [], copy_check.run_and_share

    def share(coor, work, summarize, timeout_s=None):
        deadlines.append(timeout_s)
        return inner(coor, work, summarize, timeout_s)

    monkeypatch.setattr(copy_check, "run_and_share", share)
    ranks(loading(copies), NPROCS)
    assert deadlines == [timings.TIMINGS.load_s] * NPROCS


@pytest.mark.parametrize("failures", [[RankFailure(1, None, FailureReason.EXITED)], []])
def test_a_rank_that_is_lost_during_the_comparison_is_lost_and_no_wrong_checkpoint(
    tmp_path, failures
):
    """A CheckpointError, so who starts anew after a loss did not; the survivor named itself."""
    save_file({"weight": torch.ones(9)}, tmp_path / "model.safetensors")
    lost, reported = PeerLost("it died", failures), []

    def wait(*arguments, **options):
        raise lost

    calls = {"put": lambda *_: None, "wait": wait, "report_failure": lambda *a: reported.append(a)}
    coor = SimpleNamespace(rank=0, rank_name=lambda: "0", is_master=lambda: True, **calls)
    check = CopyCheck(coor, tmp_path, read_index(tmp_path), ((0,), (1,)), "a")
    check._is_small = False
    with pytest.raises(PeerLost, match="it died"), check:
        pass
    assert not reported


@pytest.mark.parametrize("is_large", [False, True])
def test_equal_copies_give_the_tokens_of_one(copies, ranks, checkpoints, is_large, request):
    if is_large:
        request.getfixturevalue("in_background")
    expected = greedy(checkpoints.llama()[0])
    assert ranks(loading(copies, greedy), NPROCS)[0] == expected


def test_ranks_that_open_the_same_files_compare_nothing(copies, ranks, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(copies[0])
    monkeypatch.setattr(CopyCheck, "_digests", lambda *args: pytest.fail("it read"))
    ranks(loading([copies[0], copies[0], tmp_path / "link"]), NPROCS)


def test_a_model_of_ones_own_is_not_filled_from_copies_that_differ(
    tmp_path, ranks_or_errors, in_background
):
    weights = {"weight": torch.arange(600.0).view(20, 30), "bias": torch.arange(20.0)}
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        save_file(weights, tmp_path / str(rank) / "model.safetensors")
    change_byte(tmp_path / "1", "weight", 0)

    def rank(info):
        model = nn.Linear(30, 20, device="meta")
        with Coordinator(info, timeout_s=30) as coor:
            load_into(model, tmp_path / str(info.rank), coor)

    for error in ranks_or_errors(rank, 2):
        assert isinstance(error, CheckpointError) and "weight in model" in str(error)


def resident_pages(fd, nbytes):
    """The pages of a file that are in memory, by mincore(2). A read with RWF_NOWAIT would ask, too,
    but has the kernel read what it did not find."""
    states = ctypes.create_string_buffer(nbytes // PAGE_NBYTES)
    with mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE) as pages:
        first = ctypes.c_char.from_buffer(pages)
        assert ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(nbytes), states) == 0
        del first  # otherwise the pages cannot be unmapped
    return {page for page, state in enumerate(states.raw) if state & 1}


def test_a_comparison_leaves_the_page_cache_as_it_was(tmp_path):
    """It read the whole copy through the pages that were weights: the first generate() was 4 to 14
    times slower where memory was short."""
    nbytes = 4 << 20
    data = torch.randint(255, (nbytes,), dtype=torch.uint8)
    save_file({"weight": data}, tmp_path / "model.safetensors")
    index = read_index(tmp_path)
    fd = os.open(tmp_path / "model.safetensors", os.O_RDONLY)
    os.fsync(fd)
    try:
        os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
    except OSError as error:
        pytest.skip(f"this file system does not say what is in memory: {error}")
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    if len(resident_pages(fd, nbytes)) > 16:
        pytest.skip("this file system keeps pages that it was told are not needed")
    os.preadv(fd, [bytearray(nbytes // 4)], nbytes // 2)
    before = resident_pages(fd, nbytes)
    read = torch.empty(nbytes, dtype=torch.uint8)
    with PassingReader(tmp_path) as reader:
        for region in split_into_blocks((nbytes,), 1 << 20):
            start = region.start[0]
            reader.read(index["weight"], region, read[start : start + region.numel])
    assert torch.equal(read, data)
    after = resident_pages(fd, nbytes)
    os.close(fd)
    lost, added = len(before - after), len(after - before)
    assert lost == 0 and added <= 16


def test_ranks_are_grouped_by_the_files_that_they_open():
    assert group_by_copy(["a", None, "b", "a", "b", "b"]) == ((0, 3), (2, 4, 5))


def test_a_shared_file_system_has_one_name_on_all_hosts():
    """proc_pid_mountinfo(5): optional fields end with a hyphen."""
    mounts = (
        "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"
        "90 35 0:52 / /models rw,relatime shared:7 - nfs4 10.0.0.1:/models rw,vers=4.2\n"
    )
    assert linux.file_system(os.makedev(0, 52), mounts) == ("nfs4", "10.0.0.1:/models")
    assert linux.file_system(os.makedev(98, 0), mounts) == ("ext3", "/dev/root")
    assert linux.file_system(os.makedev(98, 7), mounts) == ("", "")
