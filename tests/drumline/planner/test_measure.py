"""DeviceSpeeds are measured in a moment, and are the same numbers on every rank."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time

import pytest
import torch
from transformers import LlamaConfig

import drumline
from communicator import Unsupported
from coordinator import Coordinator, peers
from drumline.core.meta_pass import LiveMemory
from drumline.planner import measure, memory
from drumline.planner.cost_model import DeviceSpeed, GroupSpeed, LinkSpeed
from drumline.planner.measure import (
    best_window,
    equalize_similar_devices,
    measure_device,
    measure_group_speeds,
    measure_machines,
    measure_place,
    measure_speeds,
)
from drumline.strategies import auto
from tests.cases import soak
from tests.drumline.conftest import LLAMA
from tests.drumline.weight_formats.test_dequantized import GPTQ, quantized_folder, to_gptq


def test_all_ranks_have_the_same_speeds_of_every_place_and_link(ranks):
    def rank(info):
        with Coordinator(info) as coor:
            return measure_speeds(coor, [(rank, "cpu") for rank in range(3)], torch.float32)

    found = ranks(rank, 3)
    assert found[0] == found[1] == found[2]
    assert found[0].places.keys() == {(0, "cpu"), (1, "cpu"), (2, "cpu")}
    assert found[0].links.keys() == {0, 1, 2}
    numbers = [*found[0].places.values(), *found[0].links.values()]
    assert all(value > 0 for number in numbers for value in vars(number).values())


def test_no_more_memory_is_taken_than_is_left(monkeypatch):
    """A host of 410 MB, of which a rank with torch left 124, was killed while it was measured."""
    monkeypatch.setattr(measure, "free_memory_by_limit", lambda: {"machine": 16 << 20})
    with LiveMemory() as live:
        speed = measure_device("cpu", torch.float32)
    assert live.peak_nbytes < 12 << 20 and min(vars(speed).values()) > 0


def test_tp_groups_are_measured_by_every_size_that_divides_a_node(ranks):
    def rank(info):
        torch.set_num_threads(1)
        with Coordinator(info) as coor:
            return measure_group_speeds(coor, "cpu", torch.float32)

    found = ranks(rank, 4)
    assert found[0] == found[1] == found[2] == found[3]
    assert [group.size for group in found[0]] == [2, 4]
    assert all(value > 0 for group in found[0] for value in vars(group.sums).values())


def test_a_group_without_a_backend_leaves_out_its_size_on_all_ranks(ranks, monkeypatch):
    """Its ranks alone went on, and the others waited for them without end."""
    make = measure.Communicator

    def without_pairs(group, **options):
        if group.world_size == 2 and 2 in group.ranks:
            raise Unsupported("no backend")
        return make(group, **options)

    def rank(info):
        torch.set_num_threads(1)
        with Coordinator(info) as coor:
            return [group.size for group in measure_group_speeds(coor, "cpu", torch.float32)]

    monkeypatch.setattr(measure, "Communicator", without_pairs)
    assert ranks(rank, 4) == [[4]] * 4


def test_devices_that_differ_by_little_count_as_equal():
    """A disturbed measurement would send layers away for nothing."""
    found = {
        (0, "cpu"): DeviceSpeed(90.0, 5.0),
        (1, "cpu"): DeviceSpeed(100.0, 10.0),
        (1, "cuda:0"): DeviceSpeed(101.0, 99.0),
    }
    middle = {(0, "cpu"): DeviceSpeed(95.0, 5.0), (1, "cpu"): DeviceSpeed(95.0, 10.0)}
    assert equalize_similar_devices(found) == {**found, **middle}


@pytest.fixture
def hosts(monkeypatch):
    """By rank, the host that it says it is on."""
    names = {}
    monkeypatch.setattr(peers.socket, "gethostname", lambda: names[threading.get_ident()])
    return lambda info, host: names.setdefault(threading.get_ident(), host)


@pytest.mark.parametrize("measured", ["ranks", "machines", "groups"])
@pytest.mark.parametrize("num_kernels", [1, 2])
def test_ranks_on_one_kernel_measure_in_turn_in_whatever_containers(
    ranks, hosts, monkeypatch, num_kernels, measured
):
    """Three at once on two cores each had two thirds of one, so that a plan said 3.4 tokens a
    second where there were 5. A container has a host name of its own."""
    together, most = [], []

    def note(*_):
        together.append(None)
        time.sleep(0.2)
        most.append(len(together))
        together.pop()
        return DeviceSpeed(1e13, 1e10)

    def rank(info):
        host = info.rank // size
        hosts(info, f"host{host}")
        kernels[threading.get_ident()] = f"kernel{host % num_kernels}"
        with Coordinator(info) as coor:
            if measured == "groups":
                measure_group_speeds(coor, "cpu", torch.float32)
            else:
                measure_all = measure_speeds if measured == "ranks" else measure_machines
                measure_all(coor, [(0, "cpu"), (1, "cpu")], torch.float32)

    size, kernels = 2 if measured == "groups" else 1, {}
    # Threads that send signs of life ask, too.
    monkeypatch.setattr(peers, "boot_id", lambda: kernels.get(threading.get_ident(), "kernel0"))
    monkeypatch.setattr(measure, "measure_device", note)
    ranks(rank, 2 * size, nodes=[size, size])
    assert len(most) == 2 * size and max(most) == num_kernels * size


@pytest.mark.parametrize(("slow", "num_layers"), [(0.3, 1), (0.7, 3)])
def test_auto_gives_a_slow_host_few_layers_and_equal_hosts_the_same(
    checkpoints, ranks, hosts, monkeypatch, slow, num_layers
):
    """By memory alone, a host with a third of a core and twice the memory got 7 of 9 layers."""
    _, path = checkpoints.llama()
    total = sum(file.stat().st_size for file in path.glob("*.safetensors"))

    def rank(info):
        hosts(info, f"host{info.rank // 2}")
        speeds[threading.get_ident()] = 1e10 * (slow if info.rank > 1 else 1.0)
        with Coordinator(info) as coor:
            memory = [total, 1, total, 1]
            with (
                contextlib.suppress(drumline.WorkerExit),
                drumline.load(path, coor=coor, max_memory=memory) as model,
            ):
                return model.device_map

    speeds: dict[int, float] = {}
    measured = lambda *_: DeviceSpeed(1e13, speeds[threading.get_ident()])  # noqa: E731
    monkeypatch.setattr(measure, "measure_device", measured)
    device_map = ranks(rank, 4, nodes=[2, 2])[0]
    assert sum("layers" in name for name in device_map.of(2)) == num_layers
    assert ("at" in str(device_map)) == (num_layers == 1)


@pytest.mark.parametrize("module", [memory, measure])
def test_an_error_of_one_rank_while_it_measures_is_raised_on_all(
    ranks_or_errors, monkeypatch, module
):
    """It alone raised, and the others waited for it."""
    limits, failing = memory.free_memory_by_limit, set()

    def fail_on_one():
        if threading.get_ident() in failing:
            raise OSError("no such file")
        return limits()

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            if info.rank == 1:
                failing.add(threading.get_ident())
            try:
                if module is memory:
                    memory.cluster_memory(coor)
                else:
                    measure_speeds(coor, [(0, "cpu"), (1, "cpu")], torch.float32)
            except Exception as error:
                return str(error)

    monkeypatch.setattr(module, "free_memory_by_limit", fail_on_one)
    assert all("no such file" in text for text in ranks_or_errors(rank, 2))


def test_a_host_that_stands_still_most_of_the_time_is_not_as_fast_as_its_best_round():
    """A cgroup with 0.3 of a core runs for 30 ms of 100, and then was as fast as a whole one."""
    throttled = [*[0.005] * 5, 0.08] * 4
    assert best_window(throttled) == pytest.approx(0.105 / 6, rel=0.01)
    disturbed = [0.005] * 60 + [0.3] + [0.005] * 10
    assert best_window(disturbed) == pytest.approx(0.005)
    assert best_window([0.5, 0.4]) == 0.4 and best_window([0.01]) == 0.01


def test_what_is_read_from_disk_is_slower_than_what_is_in_memory():
    disk = measure_place("disk", "cpu", torch.float32)
    memories = (measure_place("cpu", "cpu", torch.float32) for _ in range(100))
    assert any(disk.nbytes < memory.nbytes for memory in memories)  # what disturbs only slows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_measurement_is_over_in_a_moment(dtype):
    measure_device("cpu", dtype)
    start = time.monotonic()
    measure_device("cpu", dtype)
    assert time.monotonic() - start < 20


def test_what_is_measured_is_what_a_layer_computes(monkeypatch):
    """A matrix times tokens, in place of tokens times it, took 8 times as long in bfloat16 on a
    CPU, so that `drumline plan` said 9 times the time of a first token."""
    shapes, layer = set(), torch.nn.functional.linear

    def noted(inputs, weights):
        shapes.add((*inputs.shape, *weights.shape))
        return layer(inputs, weights)

    monkeypatch.setattr(measure, "linear", noted)
    speed = measure_device("cpu", torch.bfloat16)
    rows = measure.WEIGHTS // 2048
    assert shapes == {(1, 1024, rows, 1024), (measure.TOKENS, 1024, 1024, 1024)}
    assert speed.flops > 0 and speed.nbytes > 0 and math.isfinite(speed.calls)


def test_the_fastest_plan_is_loaded_and_its_tokens_are_exact(checkpoints, ranks):
    plain, path = checkpoints.llama()
    ids = torch.arange(3, 12)[None]
    expected = plain.generate(ids, max_new_tokens=6, do_sample=False).tolist()

    def rank(info):
        torch.set_num_threads(1)
        with Coordinator(info, timeout_s=20) as coor:
            free_nbytes = ["70KiB", "1GiB", "1GiB"]
            try:
                with drumline.load(path, "fastest", coor, max_memory=free_nbytes) as model:
                    assert len(model.device_map.ranks) > 1
                    return model.generate(ids, max_new_tokens=6, do_sample=False).tolist()
            except drumline.WorkerExit:
                return expected

    assert ranks(rank, 3) == [expected] * 3


FAST = GroupSpeed(2, DeviceSpeed(1e15, 1e15), LinkSpeed(1e-9, 1e12))
SLOW = GroupSpeed(2, DeviceSpeed(1e15, 1e15), LinkSpeed(1.0, 1e12))


def on_two_ranks(path, ranks, **options):
    """How many ranks share a layer, and the tokens, for what "fastest" has loaded."""
    ids = torch.arange(3, 12)[None]

    def rank(info):
        torch.set_num_threads(1)
        with Coordinator(info, timeout_s=20) as coor:
            try:
                with drumline.load(path, "fastest", coor, **options) as model:
                    tokens = model.generate(ids, max_new_tokens=6, do_sample=False).tolist()
                    return model.mesh.axis_size("tp") if hasattr(model, "mesh") else 1, tokens
            except drumline.WorkerExit:
                return None

    return ranks(rank, 2)[0]


@pytest.mark.parametrize(
    ("make", "speeds", "options", "sharing"),
    [
        ("llama", [FAST], {}, {2}),
        ("llama", [SLOW], {}, {1}),
        ("llama", None, {}, {1, 2}),
        soak("llama", [FAST], {"use_safetensors": True}, {2}),
        ("gpt2", [FAST], {}, {1}),
    ],
    ids=["faster", "not faster", "as measured", "options of from_pretrained", "it cannot be cut"],
)
def test_ranks_of_a_node_share_layers_where_that_is_faster(
    checkpoints, ranks, monkeypatch, make, speeds, options, sharing
):
    plain, path = getattr(checkpoints, make)()
    if speeds is not None:
        monkeypatch.setattr(auto, "measure_group_speeds", lambda *_: speeds)
    expected = plain.generate(torch.arange(3, 12)[None], max_new_tokens=6, do_sample=False)
    shared, tokens = on_two_ranks(path, ranks, **options)
    assert shared in sharing and tokens == expected.tolist()


@pytest.mark.parametrize(("dequantize", "sharing"), [(False, 1), (True, 2)])
def test_ranks_share_no_layers_whose_weights_stay_packed(
    checkpoints, ranks, monkeypatch, tmp_path, dequantize, sharing
):
    """The checkpoint was opened once more for each number of ranks, to be refused there."""
    _, path = checkpoints.llama()
    folder, opened = quantized_folder(path, tmp_path / "gptq", to_gptq, GPTQ), []
    load = auto.load_pipeline_tp
    monkeypatch.setattr(auto, "measure_group_speeds", lambda *_: [FAST])
    monkeypatch.setattr(auto, "load_pipeline_tp", lambda *args: opened.append(1) or load(*args))
    assert on_two_ranks(folder, ranks, dequantize=dequantize)[0] == sharing
    assert len(opened) == (2 if dequantize else 0)


@pytest.mark.parametrize("speeds", [[FAST], []], ids=["shared", "whole"])
def test_a_config_of_ones_own_is_used_however_the_model_is_divided(
    checkpoints, ranks, monkeypatch, speeds
):
    """It was left out where ranks shared layers, and was changed where they did not."""
    plain, path = checkpoints.llama()
    config = LlamaConfig(**{**LLAMA, "rms_norm_eps": 0.5})
    changed = type(plain).from_pretrained(path, config=config)
    monkeypatch.setattr(auto, "measure_group_speeds", lambda *_: speeds)
    ids = torch.arange(3, 12)[None]
    expected = changed.generate(ids, max_new_tokens=6, do_sample=False).tolist()
    assert expected != plain.generate(ids, max_new_tokens=6, do_sample=False).tolist()
    given = LlamaConfig(**{**LLAMA, "rms_norm_eps": 0.5})
    before = given.to_dict()
    assert on_two_ranks(path, ranks, config=given)[1] == expected
    assert given.to_dict() == before


def test_ranks_with_different_arguments_raise(checkpoints, ranks_or_errors):
    """Each would have measured and chosen for itself."""
    _, path = checkpoints.llama()

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            drumline.load(path, "fastest", coor, batch=1 + info.rank)

    found = ranks_or_errors(rank, 2)
    assert all(re.search("batch is 1 on rank 0 and 2 on rank 1", str(each)) for each in found)
