"""Speeds are measured in a moment, and are the same numbers on every rank."""

from __future__ import annotations

import time

import pytest
import torch

import inference
from coordinator import Coordinator
from inference.speed import device_speed, measure_speeds, place_speed


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


def test_what_is_read_from_disk_is_slower_than_what_is_in_memory():
    disk, memory = [place_speed(device, "cpu", torch.float32) for device in ("disk", "cpu")]
    assert disk.nbytes < memory.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_measurement_is_over_in_a_moment(dtype):
    device_speed("cpu", dtype)
    start = time.monotonic()
    device_speed("cpu", dtype)
    assert time.monotonic() - start < 2


def test_the_fastest_plan_is_loaded_and_its_tokens_are_exact(checkpoints, ranks):
    plain, path = checkpoints.llama()
    ids = torch.arange(3, 12)[None]
    expected = plain.generate(ids, max_new_tokens=6, do_sample=False).tolist()

    def rank(info):
        torch.set_num_threads(1)
        with Coordinator(info, timeout_s=20) as coor:
            room = ["70KiB", "1GiB", "1GiB"]
            try:
                with inference.load(path, "fastest", coor, max_memory=room) as model:
                    assert len(model.device_map.ranks) > 1
                    return model.generate(ids, max_new_tokens=6, do_sample=False).tolist()
            except inference.Served:
                return expected

    assert ranks(rank, 3) == [expected] * 3
