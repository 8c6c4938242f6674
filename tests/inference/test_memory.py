"""Room is what is really left, and nothing is counted twice."""

from __future__ import annotations

import pytest

import inference
from coordinator import Coordinator
from inference import memory


def cgroup(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{value}\n")


def test_the_tightest_cgroup_above_the_process_counts(tmp_path):
    cgroup(tmp_path / "a", memory_max=1000, memory_current=300)
    cgroup(tmp_path / "a" / "b", memory_max="max", memory_current=200)
    assert min(memory._cgroup_room(tmp_path, "/a/b")) == 700


def test_page_cache_that_the_kernel_can_give_back_is_room(tmp_path):
    cgroup(tmp_path / "a", memory_max=1000, memory_current=900)
    (tmp_path / "a" / "memory.stat").write_text("anon 400\ninactive_file 500\n")
    assert memory._cgroup_room(tmp_path, "/a") == [600]


def test_a_cgroup_of_the_first_version_counts_too(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("5000")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("1000")
    assert memory._cgroup_room(tmp_path, "") == [4000]


@pytest.mark.parametrize("nprocs", [1, 3])
def test_ranks_of_one_node_share_its_memory(ranks, monkeypatch, nprocs):
    monkeypatch.setattr(memory, "available_cpu", lambda: 1000)

    def rank(info):
        with Coordinator(info) as coor:
            return inference.get_max_memory(coor)

    expected = {(rank, "cpu"): 900 // nprocs for rank in range(nprocs)}
    assert ranks(rank, nprocs) == [expected] * nprocs
