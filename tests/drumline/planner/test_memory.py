"""Free memory is what is really left, and nothing is counted twice."""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import drumline
from coordinator import Coordinator
from drumline.planner import memory

RESERVE = memory.CPU_RESERVE_NBYTES
FREE = 6 * RESERVE


@pytest.mark.parametrize("nprocs", [1, 3])
def test_ranks_of_one_node_share_its_memory(ranks, monkeypatch, nprocs):
    monkeypatch.setattr(memory, "free_memory_by_limit", lambda: {"machine": FREE})

    def rank(info):
        with Coordinator(info) as coor:
            return drumline.get_max_memory(coor)

    expected = {(rank, "cpu"): FREE // nprocs - RESERVE for rank in range(nprocs)}
    assert ranks(rank, nprocs) == [expected] * nprocs


def report(local_rank, *ids, node="a"):
    seen = {f"cuda:{n}": {"id": name, "free": 100 + n} for n, name in enumerate(ids)}
    return {"node": node, "local_rank": local_rank, "accelerators": seen, "limits": {}}


@st.composite
def clusters(draw):
    """Nodes whose ranks see some of their accelerators, in any order, the same or one each."""
    reports = []
    for node in range(draw(st.integers(1, 2))):
        ids = [f"unit{n}" for n in range(draw(st.integers(0, 4)))]
        for local_rank in range(draw(st.integers(1, 4))):
            seen = draw(st.permutations(ids))[: draw(st.integers(0, len(ids)))]
            reports.append(report(local_rank, *seen, node=f"node{node}"))
    return reports


@given(clusters())
def test_an_accelerator_is_counted_once_however_many_see_it(reports):
    owned = memory.assign_accelerators(reports)
    units = [
        (reports[rank]["node"], reports[rank]["accelerators"][device]["id"])
        for rank, devices in enumerate(owned)
        for device in devices
    ]
    seen = {(r["node"], found["id"]) for r in reports for found in r["accelerators"].values()}
    assert sorted(units) == sorted(seen)


def test_ranks_that_see_the_same_accelerators_get_their_own_first():
    assert memory.assign_accelerators([report(0, "x", "y"), report(1, "x", "y")]) == [
        ["cuda:0"],
        ["cuda:1"],
    ]
    assert memory.assign_accelerators([report(0, "x"), report(1, "y")]) == [["cuda:0"], ["cuda:0"]]
    assert memory.assign_accelerators([report(0, "x"), report(1, "x")]) == [["cuda:0"], []]


def test_accelerators_beyond_the_ranks_go_to_ranks_too():
    units = ["w", "x", "y", "z"]
    assert memory.assign_accelerators([report(0, *units)]) == [
        ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    ]
    assert memory.assign_accelerators([report(0, *units), report(1, *units)]) == [
        ["cuda:0", "cuda:2"],
        ["cuda:1", "cuda:3"],
    ]


def test_accelerators_come_before_the_cpu_of_their_rank(ranks, monkeypatch):
    monkeypatch.setattr(memory, "free_memory_by_limit", lambda: {"machine": FREE})
    beside = memory.ACCELERATOR_RESERVE_NBYTES
    seen = {
        "cuda:0": {"id": "x", "free": 70 + beside},
        "cuda:1": {"id": "y", "free": 80 + beside},
        "cuda:2": {"id": "z", "free": beside - 1},
    }
    monkeypatch.setattr(memory, "accelerators", lambda: seen)

    def rank(info):
        with Coordinator(info) as coor:
            return list(drumline.get_max_memory(coor).items())

    assert ranks(rank, 2)[0] == [
        ((0, "cuda:0"), 70),
        ((0, "cuda:2"), 0),
        ((0, "cpu"), FREE // 2 - RESERVE),
        ((1, "cuda:1"), 80),
        ((1, "cpu"), FREE // 2 - RESERVE),
    ]


@pytest.mark.parametrize(
    "limits",
    [
        *({0: size} for size in (None, 1.5, -1, 10**400, "9" * 400, "9" * 5000, "1e9", b"1", [1])),
        *({place: 1} for place in (None, (0,), (), (0, "cpu", 2), ("x", "cpu"), (0.5, "cpu"), 1.5)),
        *({place: 1} for place in ("", "cuda:x", "cuda:²", (0, None), True, (False, "cpu"))),
        *({0: True}, {0: 1, "cpu": 2}, {(0, "cpu"): 1, 0: 2}),
        *("8GiB", 5),
    ],
)
def test_limits_that_are_none_are_an_error_of_the_plan(limits):
    """They raised what Python's readers do, and a third part of a place was dropped; True was rank
    1, and of two sizes for a place one was."""
    with pytest.raises(drumline.PlanError, match=r"max_memory|is not a size"):
        memory.limit_memory({(0, "cpu"): 10}, limits)


@pytest.fixture
def accelerators(monkeypatch):
    """Two of a kind that this torch was not built for, with 100 and 101 bytes free."""

    def install(kind):
        found = torch.accelerator
        monkeypatch.setattr(found, "current_accelerator", lambda **_: torch.device(kind))
        monkeypatch.setattr(found, "device_count", lambda: 2)
        monkeypatch.setattr(found, "get_memory_info", lambda device: (100 + device.index, 200))

    return install


def test_accelerators_of_any_kind_are_counted(accelerators, monkeypatch):
    """Those of Intel and Huawei were overlooked: the planner asked torch.cuda alone."""
    accelerators("xpu")
    units = types.SimpleNamespace(
        get_device_properties=lambda device: types.SimpleNamespace(uuid=f"unit {device.index}")
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: units)
    expected = {f"xpu:{n}": {"id": f"unit {n}", "free": 100 + n} for n in range(2)}
    assert memory.accelerators() == expected


def test_a_kind_without_uuids_goes_by_its_names(accelerators, monkeypatch):
    accelerators("mps")
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace())
    assert [found["id"] for found in memory.accelerators().values()] == ["mps:0", "mps:1"]


def test_a_model_runs_on_what_torch_calls_the_accelerator(
    checkpoints, on_master, accelerators, monkeypatch
):
    """A CPU stands in for it: cpu:0 and cpu:1 are other places than "cpu"."""
    accelerators("cpu")
    free = 600_000 + memory.ACCELERATOR_RESERVE_NBYTES
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (free, 0))
    model, path = checkpoints.llama()
    prompt = torch.arange(2, 8).view(1, 6)

    def work(model):
        return {*model.device_map.places.values()}, model.generate(prompt, max_new_tokens=4)

    places, tokens = on_master(path, 2, work, max_memory=None)
    assert places == {(0, "cpu:0"), (1, "cpu:1")}
    assert tokens.equal(model.generate(prompt, max_new_tokens=4))
    both_on_one = {(0, "cpu:1"): 600_000, (1, "cpu:1"): 600_000}
    assert on_master(path, 2, work, max_memory=both_on_one)[0] == {*both_on_one}


def test_containers_of_one_kernel_have_limits_of_their_own():
    """Three containers of 2.6 GB each got a third of one limit each, and a model that fits was
    refused."""
    limits = [{"host": 20_000, f"cgroup {rank}": 2_600} for rank in range(3)]
    assert memory.share(limits) == [2_600] * 3
    assert memory.share([*limits, {"host": 20_000}]) == [2_600] * 3 + [20_000 - 3 * 2_600]
    assert memory.share([{"host": 20_000, "cgroup a": 2_600}] * 2) == [1_300] * 2


@given(
    st.lists(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 1000), min_size=1), min_size=1)
)
def test_no_limit_is_exceeded_by_the_ranks_under_it_and_none_can_have_more(limits):
    shares = memory.share(limits)
    rest = {}
    for own in limits:
        for name, size in own.items():
            rest[name] = min(size, rest.get(name, size))
    for rank, own in enumerate(limits):
        for name in own:
            rest[name] -= shares[rank]
    assert all(size >= 0 for size in rest.values())
    assert all(min(rest[name] for name in own) < len(limits) for own in limits)
