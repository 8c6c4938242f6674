"""Weights from another machine are kept: sent once, bounded, and never used if damaged."""

import contextlib
import errno
import fcntl
import itertools
import os
import pwd
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import drumline
from coordinator import Coordinator
from drumline.checkpoint import plan_executor
from drumline.checkpoint.disk_cache import weight_cache
from drumline.checkpoint.disk_cache.weight_cache import WeightCache
from drumline.checkpoint.safetensors_index import TensorReader
from drumline.checkpoint.source import CheckpointFiles
from drumline.cli import main
from launcher import user_cache_folder
from tests.programs.time_limit import seconds

SIZE = 160  # rows and columns of a weight: 100 KB in float32


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False) for _ in range(6))


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """The folder of this test's own, as users have theirs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weight_cache, "user_cache_folder", user_cache_folder)
    return tmp_path / "cache" / "drumline" / "weights"


@pytest.fixture
def checkpoint(own_cache, tmp_path, monkeypatch):
    """The weights in two files."""
    monkeypatch.setattr(plan_executor, "BLOCK_NBYTES", 40_000)  # three blocks a weight
    folder = tmp_path / "model"
    folder.mkdir()
    torch.manual_seed(0)
    state = Weights().state_dict()
    for number in range(2):
        part = {name: state[name] for name in [*state][number::2]}
        save_file(part, folder / f"{number}.safetensors")
    return folder


class Traffic:
    """Counts the bytes that Coordinators and Communicators hand to each other."""

    def __init__(self, monkeypatch):
        self.nbytes = 0
        inner = Coordinator.allgather

        def allgather(coor, data, **options):
            self.nbytes += len(data)
            return inner(coor, data, **options)

        monkeypatch.setattr(Coordinator, "allgather", allgather)


def loaded(ranks, folder, nodes=(1, 1, 1), **options):
    """The model and the statistics of each rank, one of which has the files."""

    def rank(info):
        with torch.device("meta"):
            model = Weights()
        with Coordinator(info, timeout_s=30) as coor:
            stats = drumline.load_into(model, folder, coor, reader="rank0", **options)
        return model.state_dict(), stats

    return ranks(rank, sum(nodes), [*nodes])


def assert_equal(found):
    for state, _ in found[1:]:
        for name, tensor in found[0][0].items():
            assert torch.equal(state[name], tensor), name


def test_a_second_start_sends_names_only(ranks, checkpoint, monkeypatch):
    """Every start of a launch sent all the weights anew."""
    share = 6 * SIZE * SIZE * 4
    first = loaded(ranks, checkpoint)
    assert [stats.nbytes_received for _, stats in first] == [0, share, share]
    traffic = Traffic(monkeypatch)
    second = loaded(ranks, checkpoint)
    assert [stats.nbytes_kept for _, stats in second] == [0, share, share]
    sent = sum(stats.nbytes_sent for _, stats in second) + traffic.nbytes
    assert 0 < sent < 0.01 * 2 * share
    assert_equal(first + second)


def test_what_all_owners_have_kept_is_not_read_again(ranks, checkpoint):
    """A second start read all layers of other machines from the disk, for nobody."""
    only = {f"layers.{number}.weight": {"pp": int(number > 1)} for number in range(6)}
    options = {"mesh": {"pp": 2}, "only": only}
    shares = [number * SIZE * SIZE * 4 for number in (2, 4)]
    first = loaded(ranks, checkpoint, (1, 1), **options)
    second = loaded(ranks, checkpoint, (1, 1), **options)
    assert [found[0][1].nbytes_read for found in (first, second)] == [sum(shares), shares[0]]
    assert second[1][1].nbytes_kept == shares[1]


def test_blocks_for_here_and_for_others_are_read_one_after_another(ranks, checkpoint, monkeypatch):
    """A rank read its own block while a thread read the next: of GGUF, a tensor that the reader had
    computed was replaced by another before it was taken, a KeyError."""
    is_read, inner = threading.Lock(), TensorReader.read

    def read(*arguments):
        assert is_read.acquire(blocking=False), "two threads read"
        threading.Event().wait(0.01)
        inner(*arguments)
        is_read.release()

    monkeypatch.setattr(TensorReader, "read", read)
    only = {f"layers.{number}.weight": {"pp": number // 2 % 2} for number in range(6)}
    loaded(ranks, checkpoint, (1, 1), mesh={"pp": 2}, only=only)


def test_an_error_while_the_last_block_is_kept_is_raised(ranks_or_errors, checkpoint, monkeypatch):
    numbers, inner = itertools.count(1), weight_cache.CachedWeights.write

    def write(*arguments):
        if next(numbers) == 18:
            raise ZeroDivisionError
        inner(*arguments)

    monkeypatch.setattr(weight_cache.CachedWeights, "write", write)
    errors = loaded(ranks_or_errors, checkpoint, (1, 1))
    assert isinstance(errors[1], ZeroDivisionError)


def test_what_arrived_before_a_cut_is_not_sent_again(
    ranks, ranks_or_errors, checkpoint, monkeypatch
):
    """A link that was cut at the end of a long load had all of it begin anew."""
    share, passed = 6 * SIZE * SIZE * 4, []
    inner = plan_executor.PlanExecutor._receive

    def cut(executor, block, src, scratch):
        if len(passed) == 7:
            raise OSError("the link is down")
        passed.append(block)
        return inner(executor, block, src, scratch)

    with monkeypatch.context() as patch:
        patch.setattr(plan_executor.PlanExecutor, "_receive", cut)
        outcomes = loaded(ranks_or_errors, checkpoint, (1, 1))
        # the sender may be done before: its sockets hold what it sends
        assert isinstance(outcomes[1], OSError) and "the link is down" in str(outcomes[1])
    found = loaded(ranks, checkpoint, (1, 1))
    nbytes_kept = found[1][1].nbytes_kept
    assert nbytes_kept == sum(block.source.numel * 4 for block in passed)
    assert found[1][1].nbytes_received == share - nbytes_kept
    assert_equal(found)


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)


def exchange(file):
    """Put another block of the same size in its place: it is whole, but not this one."""
    others = (other for other in file.parent.iterdir() if other != file)
    other = next(o for o in others if o.stat().st_size == file.stat().st_size)
    file.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [flip, truncate, exchange, os.unlink])
def test_a_damaged_block_is_received_again(ranks, checkpoint, own_cache, damage):
    loaded(ranks, checkpoint, (1, 1))
    (folder,) = own_cache.iterdir()
    file = max(folder.iterdir(), key=lambda file: (file.stat().st_size, file.name))
    nbytes = file.stat().st_size - weight_cache.DIGEST_NBYTES
    damage(file)
    again, after = loaded(ranks, checkpoint, (1, 1)), loaded(ranks, checkpoint, (1, 1))
    assert (again[1][1].nbytes_received, after[1][1].nbytes_received) == (nbytes, 0)
    assert_equal(again + after)


@pytest.mark.parametrize("replaces", [True, False], ids=["another file", "in place"])
def test_other_weights_of_one_size_and_time_are_other_weights(ranks, checkpoint, replaces):
    loaded(ranks, checkpoint, (1, 1))
    file = checkpoint / "0.safetensors"
    status, data = file.stat(), bytearray(file.read_bytes())
    data[-1] ^= 0x40
    if replaces:
        file.rename(checkpoint / "old")
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    found = loaded(ranks, checkpoint, (1, 1))
    assert found[1][1].nbytes_kept == 0
    assert_equal(found)


def test_other_weights_in_another_file_system_of_the_same_number_are_other_weights(
    ranks, checkpoint, monkeypatch
):
    """Of two images, mounted one after the other, a file had one device, inode, size and times, and
    the weights of the first were loaded for the second."""
    found, file = loaded(ranks, checkpoint, (1, 1)), checkpoint / "0.safetensors"
    status, stat = file.stat(), Path.stat
    state = {name: -tensor for name, tensor in found[0][0].items() if int(name[7]) % 2 == 0}
    save_file(state, file)
    looks = {file: status}
    monkeypatch.setattr(Path, "stat", lambda path, **o: looks.get(path) or stat(path, **o))
    found = loaded(ranks, checkpoint, (1, 1))
    assert found[1][1].nbytes_kept == 0
    assert_equal(found)


def test_a_file_that_another_one_takes_the_place_of_before_it_is_named_is_an_error(
    ranks, ranks_or_errors, checkpoint, monkeypatch
):
    """The weights of the old file, whose pages were open, were kept under the name of the new."""
    file, identify = checkpoint / "0.safetensors", plan_executor.lasting_identity

    def replaced(path, index):
        (checkpoint / "new").write_bytes(file.read_bytes()[:-4] + b"new!")
        (checkpoint / "new").rename(file)
        return identify(path, index)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFiles, "maps", property(lambda files: True, lambda *_: None))
        patch.setattr(plan_executor, "lasting_identity", replaced)
        first = loaded(ranks_or_errors, checkpoint, (1, 1))
    assert all(isinstance(error, drumline.CheckpointError) for error in first)
    found = loaded(ranks, checkpoint, (1, 1))
    assert found[1][1].nbytes_kept == 0
    assert_equal(found)


def test_ranks_of_the_machine_that_has_the_files_keep_none(ranks, checkpoint):
    found = loaded(ranks, checkpoint, (2, 1))
    assert [stats.nbytes_received > 0 for _, stats in found] == [False, True, True]
    again = loaded(ranks, checkpoint, (2, 1))
    assert [stats.nbytes_kept > 0 for _, stats in again] == [False, False, True]
    assert_equal(found + again)


def test_blocks_are_named_by_who_keeps_them_alone(ranks, checkpoint, monkeypatch):
    """Every rank made the names of all blocks."""
    named, inner = set(), plan_executor.PlanExecutor._key

    def key(executor, block):
        named.add(executor.rank)
        return inner(executor, block)

    monkeypatch.setattr(plan_executor.PlanExecutor, "_key", key)
    loaded(ranks, checkpoint, (2, 1))
    assert named == {2}


def test_a_folder_that_cannot_be_written_is_a_line_and_no_error(
    ranks, checkpoint, own_cache, caplog
):
    own_cache.parents[1].write_text("a file where the folder should be")
    found = loaded(ranks, checkpoint, (1, 1))
    assert found[1][1].nbytes_received and "are not kept" in caplog.text
    assert_equal(found)


def test_a_folder_that_others_can_write_is_not_used(ranks, checkpoint, own_cache, caplog):
    """They could have put other weights there, with the right digest."""
    own_cache.mkdir(parents=True)
    own_cache.chmod(0o777)
    assert_equal(loaded(ranks, checkpoint, (1, 1)))
    assert "chmod 700" in caplog.text and not [*own_cache.iterdir()]


def test_a_user_without_a_home_loads_and_keeps_nothing(ranks, checkpoint, monkeypatch, caplog):
    """The RuntimeError of pathlib ended the load."""
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a KeyError, as of an unknown user
    found = loaded(ranks, checkpoint, (1, 1))
    assert found[1][1].nbytes_received and "are not kept" in caplog.text


def block(number=0, nbytes=1000):
    return memoryview(bytes([number]) * nbytes)


def is_kept(cache, identity, key="k"):
    with cache.open(identity, "") as kept:
        return kept.read(key, memoryview(bytearray(1000)))


def test_the_least_recently_used_goes_first_and_never_one_in_use(tmp_path):
    cache = WeightCache(tmp_path, limit_nbytes=3600)
    for number, identity in enumerate("abc"):
        with cache.open(identity, f"model {identity}") as kept:
            kept.write("k", block(number))
        os.utime(tmp_path / identity / "lock", (number, number))
    assert [checkpoint.name[-1] for checkpoint in cache.checkpoints()] == ["a", "b", "c"]
    with cache.open("a", "model a"), cache.open("d", "model d") as kept:
        assert [one.name for one in cache.checkpoints() if one.is_in_use] == ["model a", "model d"]
        kept.write("k", block(3))
        assert {one.name for one in cache.checkpoints()} == {f"model {one}" for one in "acd"}
        for number in range(5):
            kept.write(f"k{number}", block(3))
        assert sum(one.nbytes for one in cache.checkpoints()) <= 3600
        assert cache.clear() == 0  # the others are gone, and these are in use
    assert is_kept(cache, "a") and is_kept(cache, "d") and not is_kept(cache, "b")
    assert cache.clear() > 2000 and cache.checkpoints() == []


def test_a_writer_that_was_killed_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    cache = WeightCache(tmp_path)
    with cache.open("a", "") as kept, monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: 1 / 0)
        patch.setattr(os, "unlink", lambda *_: None)  # as if it was killed
        with pytest.raises(ZeroDivisionError):
            kept.write("k", block())
        assert not kept.read("k", memoryview(bytearray(1000)))
    assert len(list((tmp_path / "a").iterdir())) == 3
    assert not is_kept(cache, "a")
    assert {file.name for file in (tmp_path / "a").iterdir()} == {"lock", "name"}


def test_a_checkpoint_that_is_opened_while_it_is_deleted_keeps_what_is_written(
    tmp_path, monkeypatch
):
    """Its lock went before its blocks, so a process that made another lost them, and the deletion
    ended with "Directory not empty"."""
    cache, remove = WeightCache(tmp_path), os.rmdir
    assert not is_kept(cache, "a")
    with contextlib.ExitStack() as stack:

        def rmdir(folder, **options):
            stack.enter_context(cache.open("a", "")).write("k", block())
            remove(folder, **options)

        monkeypatch.setattr(os, "rmdir", rmdir)
        cache.clear()
    assert is_kept(cache, "a")


@pytest.mark.parametrize("does", [WeightCache.clear, lambda cache: is_kept(cache, "a")])
def test_an_old_lock_of_a_checkpoint_that_is_made_again_deletes_nothing_of_it(
    tmp_path, monkeypatch, does
):
    """Of two that deleted one at once, the slower deleted what a third process had in use; one that
    loaded took what another was writing for left over."""
    cache, part, is_free = WeightCache(tmp_path), tmp_path / "a" / "1.part", weight_cache._is_free
    assert not is_kept(cache, "a")
    (before,) = cache.checkpoints()
    with contextlib.ExitStack() as stack:

        def is_free_later(lock):
            monkeypatch.setattr(weight_cache, "_is_free", is_free)
            cache.clear()
            stack.enter_context(cache.open("a", ""))
            part.touch()
            return is_free(lock)

        monkeypatch.setattr(weight_cache, "_is_free", is_free_later)
        monkeypatch.setattr(cache, "checkpoints", lambda: [before])
        does(cache)
        assert part.exists()


def test_a_block_that_is_finished_while_it_is_counted_hides_no_others(tmp_path):
    """A checkpoint was left out of the sum if another process renamed a file of it meanwhile."""
    cache = WeightCache(tmp_path)
    with cache.open("a", "") as kept:
        kept.write("k", block())
        (tmp_path / "a" / "1.part").symlink_to("renamed meanwhile")
        assert [checkpoint.nbytes > 1000 for checkpoint in cache.checkpoints()] == [True]


def test_many_write_read_and_clear_at_once(tmp_path):
    cache, wrong = WeightCache(tmp_path), []

    def write(number):
        for _ in range(20):
            with cache.open("a", "") as kept:
                kept.write("k", block(7))
                out = bytearray(1000)
                if not kept.read("k", memoryview(out)) or out != bytes(block(7)):
                    wrong.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        cache.clear()
    assert wrong == []


def test_a_lock_that_another_process_keeps_is_not_waited_for_without_end(tmp_path, monkeypatch):
    """A process that was suspended while it deleted a checkpoint held up all loads of it."""
    cache = WeightCache(tmp_path)
    assert not is_kept(cache, "a")
    monkeypatch.setattr(weight_cache, "LOCK_S", 0.05, raising=False)
    with open(tmp_path / "a" / "lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        num_open = len(os.listdir("/proc/self/fd"))
        with seconds(10), pytest.raises(TimeoutError, match="a/lock is held by another process"):
            is_kept(cache, "a")
        assert len(os.listdir("/proc/self/fd")) == num_open


def test_what_is_kept_on_a_full_disk_is_read(tmp_path, monkeypatch):
    """All of it was sent again, as the name could not be written."""
    cache = WeightCache(tmp_path)
    with cache.open("a", "") as kept:
        kept.write("k", block())

    def write_bytes(file, data):
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    assert is_kept(cache, "a")


def test_a_block_that_cannot_be_read_is_said(tmp_path, caplog):
    """It was received again in silence, at each load."""
    cache = WeightCache(tmp_path)
    assert not is_kept(cache, "a") and caplog.text == ""
    (tmp_path / "a" / "k").mkdir()
    assert not is_kept(cache, "a")
    assert re.search("a/k.*so these weights are received again", caplog.text)


def test_the_disk_keeps_as_much_free_as_is_taken(tmp_path, monkeypatch, caplog):
    cache = WeightCache(tmp_path)
    disk = SimpleNamespace(free=9)
    monkeypatch.setattr(weight_cache.shutil, "disk_usage", lambda folder: disk)
    with cache.open("a", "") as kept:
        kept.write("k", block())
        assert not kept.read("k", memoryview(bytearray(1000))) and "is full" in caplog.text


FIRST_START = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
Path(sys.argv[1], "cgroup.procs").write_text("0")
from drumline.checkpoint.disk_cache.weight_cache import WeightCache
with WeightCache(sys.argv[2]).open("a", "") as kept:
    kept.write("k", memoryview(bytes(64 << 20)))
"""


def test_what_is_kept_is_free_memory_for_the_next_start(tmp_path, memory_group):
    """It was as much less for half a minute, so that the same command was refused the second
    time: pages that are not written to the disk yet."""
    root = Path(__file__).parents[4]
    subprocess.run([sys.executable, "-c", FIRST_START, memory_group, tmp_path, root], check=True)
    deadline = time.monotonic() + 15
    while max(map(int, re.findall(r"dirty (\d+)", stat(memory_group)))) > 16 << 20:
        assert time.monotonic() < deadline, stat(memory_group)
        time.sleep(0.1)


def stat(group):
    return (group / "memory.stat").read_text()


def test_a_relative_cache_home_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert user_cache_folder() == Path.home() / ".cache" / "drumline"


def test_the_command_lists_and_clears(own_cache, capsys):
    with WeightCache().open("a", "one:/models/\udcff") as kept:  # a name of other bytes
        kept.write("k", block())
        assert main(["cache"]) == 0
    assert "one:/models/\\udcff, in use now\n1.0 KiB of at most 64.0 GiB" in capsys.readouterr().out
    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out.startswith("1.0 KiB deleted\n0 B of at most 64.0 GiB")


def test_a_folder_that_may_not_be_read_is_said_once(own_cache, monkeypatch, caplog):
    """It was not counted, in silence."""

    def refused(folder, *flags):
        raise PermissionError(13, "Permission denied", str(folder))

    (own_cache / "other").mkdir(parents=True)
    monkeypatch.setattr(weight_cache, "_open_lock", refused)
    cache = WeightCache()
    assert [cache.checkpoints(), cache.checkpoints()] == [[], []]
    for folder in (own_cache, own_cache / "other"):
        assert caplog.text.count(f"not counted: [Errno 13] Permission denied: '{folder}'") == 1


def test_folders_that_are_no_checkpoints_are_passed_over(own_cache, capsys):
    """A lock that was a folder, or led nowhere, ended `drumline cache`, and loading with it."""
    cache = WeightCache()
    with cache.open("whole", "whole") as kept:
        kept.write("key", memoryview(b"block"))
    (own_cache / "folder" / "lock").mkdir(parents=True)
    (own_cache / "loop").mkdir()
    (own_cache / "loop" / "lock").symlink_to("lock")
    assert [checkpoint.name for checkpoint in cache.checkpoints()] == ["whole"]
    assert cache.make_room(1) and main(["cache", "--clear"]) == 0
    assert cache.checkpoints() == [] and "0 B" in capsys.readouterr().out
