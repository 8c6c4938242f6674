"""Plans over any profile and any memory: complete, contiguous, within the memory, ties together."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from accelerate.utils import convert_file_size_to_int
from hypothesis import given
from hypothesis import strategies as st

from drumline import DeviceMap, ModelProfile, ModulePart, PlanError, plan
from drumline.core.device_map import abbreviate_names
from drumline.planner.cost_model import DeviceSpeed, DeviceSpeeds, PassShape, estimate
from drumline.planner.measure import equalize_similar_devices
from drumline.planner.memory import limit_memory
from drumline.planner.plan import KINDS, SLACK, UNEVEN
from drumline.planner.sizes import nbytes


@st.composite
def layouts(draw) -> ModelProfile:
    sizes = draw(st.lists(st.integers(0, 50), min_size=1, max_size=12))
    around = draw(st.lists(st.integers(0, 50), max_size=3))
    others = tuple(ModulePart(f"other{i}", size) for i, size in enumerate(around))
    ties = [("other0", "other1")] if len(others) > 1 and draw(st.booleans()) else []
    if len(sizes) > 2 and draw(st.booleans()):
        ties.append(("layers.0", f"layers.{len(sizes) // 2}"))
    kept = [draw(st.integers(0, size)) for size in sizes]
    layers = tuple(
        ModulePart(f"layers.{i}", size, kept_nbytes=kept[i]) for i, size in enumerate(sizes)
    )
    return ModelProfile(layers, others, tuple(ties))


memories = st.lists(st.integers(0, 400), min_size=1, max_size=5).map(
    lambda sizes: {(rank, "cpu"): size for rank, size in enumerate(sizes)}
)
modes = st.sampled_from(["auto", "balanced", "sequential"])


@given(layouts(), memories, modes)
def test_a_plan_holds_every_module_once_and_no_place_more_than_its_memory(model, free_nbytes, mode):
    try:
        chosen = plan(model, free_nbytes, mode)
    except PlanError:
        return
    assert set(chosen.places) == {part.name for part in (*model.layers, *model.others)}
    assert all(chosen.used(place) <= free_nbytes[place] for place in free_nbytes)
    assert sum(chosen.used(place) for place in free_nbytes) == model.nbytes


@given(layouts(), memories, modes)
def test_a_plan_keeps_layers_contiguous_and_ties_together(model, free_nbytes, mode):
    try:
        chosen = plan(model, free_nbytes, mode)
    except PlanError:
        return
    ranks = [chosen.places[part.name][0] for part in model.layers]
    assert ranks == sorted(ranks)
    assert all(len({chosen.places[name] for name in tie}) == 1 for tie in model.ties)


@given(layouts(), st.integers(1, 4))
def test_a_plan_exists_whenever_the_first_place_has_memory_for_everything(model, ranks):
    free_nbytes = {(rank, "cpu"): model.nbytes for rank in range(ranks)}
    assert plan(model, free_nbytes).places


@given(layouts(), memories, modes)
def test_the_text_of_a_device_map_has_every_place_of_it(model, free_nbytes, mode):
    """Ranks compare it, so that none loads by another map."""
    try:
        device_map = plan(model, free_nbytes, mode)
    except PlanError:
        return
    places, free = json.loads(device_map.to_json())
    assert {name: (rank, device) for name, rank, device, _ in places} == device_map.places
    assert {name: nbytes for name, _, _, nbytes in places} == device_map.nbytes
    assert {(rank, device): nbytes for rank, device, nbytes in free} == device_map.free_nbytes


@given(layouts(), memories, st.lists(st.floats(0.1, 1.0), min_size=5, max_size=5))
def test_a_plan_by_speed_keeps_to_the_memory_and_never_makes_a_token_slower(model, free, factors):
    speeds = speeds_of(free, factors)
    try:
        plain = plan(model, free)
    except PlanError:
        return
    chosen = plan(model, free, speeds=speeds)
    assert all(chosen.used(place) <= free[place] for place in free)
    assert sum(chosen.used(place) for place in free) == model.nbytes
    evened = DeviceSpeeds(equalize_similar_devices(speeds.places, UNEVEN))  # the rest is noise
    took = [estimate(model, each, evened).pass_s for each in (chosen, plain)]
    assert took[0] <= SLACK * took[1] + 1e-9


def speeds_of(places, factors) -> DeviceSpeeds:
    pairs = zip(places, factors, strict=False)
    return DeviceSpeeds({place: DeviceSpeed(math.inf, factor * 100) for place, factor in pairs})


LLAMA = ModelProfile(
    layers=tuple(ModulePart(f"model.layers.{i}", 100) for i in range(8)),
    others=(
        ModulePart("model.embed_tokens", 50),
        ModulePart("model.norm", 1),
        ModulePart("lm_head", 50),
    ),
)


def layers_by_rank(chosen: DeviceMap) -> list[int]:
    ranks = [rank for name, (rank, _) in chosen.places.items() if ".layers." in name]
    return [ranks.count(rank) for rank in range(max(ranks) + 1)]


def test_auto_fills_every_rank_to_the_same_part_of_its_memory():
    free_nbytes = {(0, "cpu"): 600, (1, "cpu"): 600, (2, "cpu"): 1200}
    assert layers_by_rank(plan(LLAMA, free_nbytes)) == [1, 2, 5]


def test_places_that_work_on_a_batch_at_once_get_equal_work_where_that_fits():
    """A server's cache weighs more than its layers, so rank 0 had half of them and the head too."""
    layers = tuple(ModulePart(f"model.layers.{i}", 100, kept_nbytes=90) for i in range(30))
    model = ModelProfile(layers, (ModulePart("lm_head", 80),))
    roomy, step = {(0, "cpu"): 9000, (1, "cpu"): 9000}, PassShape(batch=32)
    assert layers_by_rank(plan(model, roomy, step=step)) == [12, 18]
    assert layers_by_rank(plan(model, roomy, "balanced", step=step)) == [15, 15]
    assert layers_by_rank(plan(model, roomy)) == [15, 15]  # one token is at one place at a time
    tight = {(0, "cpu"): 1700, (1, "cpu"): 1800}
    assert layers_by_rank(plan(model, tight, step=step)) == [14, 16]
    unlike = {(0, "cuda:0"): 9000, (0, "cuda:1"): 3000}  # the smaller one may be slower
    assert plan(model, unlike, step=step) == plan(model, unlike)


@pytest.mark.parametrize("factors", [[1.0, 1.0, 1.0], [0.7, 1.0, 0.9], [1.0, 0.61, 0.61]])
def test_hosts_that_measure_nearly_the_same_get_the_parts_of_equal_ones(factors):
    """Noise would move layers between machines from one start to the next."""
    free = {(rank, "cpu"): 700 for rank in range(3)}
    assert plan(LLAMA, free, speeds=speeds_of(free, factors)) == plan(LLAMA, free)


def test_a_slow_host_gets_what_the_fast_ones_have_no_room_for_and_these_equal_parts():
    free = {(0, "cpu"): 500, (1, "cpu"): 2000, (2, "cpu"): 500, (3, "cpu"): 500}
    chosen = plan(LLAMA, free, speeds=speeds_of(free, [1.0, 0.3, 1.0, 1.0]))
    assert [len(chosen.of(rank)) for rank in range(4)] == [5, 0, 3, 3]
    by_memory = plan(LLAMA, free, "balanced", speeds=speeds_of(free, [1.0, 0.3, 1.0, 1.0]))
    assert len(by_memory.of(1)) > 3
    assert "(nothing)" in str(chosen) and " 30 B/s" in str(chosen)
    free[(2, "cpu")] = free[(3, "cpu")] = 90
    chosen = plan(LLAMA, free, speeds=speeds_of(free, [1.0, 0.3, 1.0, 1.0]))
    assert chosen.used((0, "cpu")) <= 450 and len(chosen.of(1)) > 3


def test_many_ranks_are_planned_for_in_a_moment():
    """It took the third power of their number: two seconds for a hundred, minutes for 400."""
    free_nbytes = {(rank, "cpu"): 600 for rank in range(1000)}
    found = layers_by_rank(plan(LLAMA, free_nbytes))
    assert sum(found) == 8 and max(found) == 1


def test_sequential_fills_one_rank_after_the_other():
    free_nbytes = {(0, "cpu"): 700, (1, "cpu"): 1200, (2, "cpu"): 1200}
    assert layers_by_rank(plan(LLAMA, free_nbytes, "sequential")) == [5, 3]


def test_a_head_that_does_not_fit_on_rank_0_goes_behind_the_last_layer():
    chosen = plan(LLAMA, {(0, "cpu"): 60, (1, "cpu"): 500, (2, "cpu"): 500})
    assert chosen.places["model.embed_tokens"] == (0, "cpu")
    assert chosen.places["lm_head"] == (2, "cpu")


def test_a_model_that_is_too_large_is_refused_with_the_bytes_that_are_missing():
    with pytest.raises(PlanError, match=r"401 bytes .* are missing in all"):
        plan(LLAMA, {(0, "cpu"): 300, (1, "cpu"): 200})


def test_another_rank_is_not_the_advice_where_a_workspace_fits_on_none():
    model = dataclasses.replace(LLAMA, workspace_nbytes=2000)
    sizes = {(0, "cpu"): 1500, (1, "cpu"): 900}
    with pytest.raises(PlanError, match="plan for fewer tokens at a time") as raised:
        plan(model, sizes)
    assert "Add a rank" not in str(raised.value)
    with pytest.raises(PlanError, match="Add a rank"):
        plan(model, {(0, "cpu"): 2001})


def test_layers_that_fit_into_no_rest_are_refused_with_their_size():
    with pytest.raises(PlanError, match=r"ranks 1-9 cpu: 99 B each") as raised:
        plan(LLAMA, {(rank, "cpu"): 99 + (101 * (rank == 0)) for rank in range(10)})
    assert "model.layers.0, which is kept whole, needs 100 bytes and finds 99" in str(raised.value)


@pytest.mark.parametrize("mode", ["auto", "sequential"])
@pytest.mark.parametrize(
    "sizes",
    [(0, 900, 60), (60, 850, 0), (120, 60, 750, 60)],
    ids=["nothing on the master", "the head in the middle", "a place too narrow for a layer"],
)
def test_the_parts_around_the_layers_go_wherever_the_layers_still_fit(sizes, mode):
    """Where they fitted neither at the first nor at the last place, no plan was found."""
    free_nbytes = {(rank, "cpu"): size for rank, size in enumerate(sizes)}
    chosen = plan(LLAMA, free_nbytes, mode)
    assert all(chosen.used(place) <= free_nbytes[place] for place in free_nbytes)


def test_a_map_of_ones_own_is_spread_over_what_its_prefixes_cover():
    free_nbytes = {(0, "cpu"): 1000, (1, "cpu"): 1000}
    chosen = plan(LLAMA, free_nbytes, {"": 0, "model.layers": 1, "model.layers.0": (0, "cpu")})
    assert layers_by_rank(chosen) == [1, 7]
    assert chosen.places["lm_head"] == (0, "cpu")


@pytest.mark.parametrize(
    ("device_map", "complaint"),
    [
        ({"model": 0}, "no place for 'lm_head'"),
        ({"": 7}, "rank 7 cpu, which does not exist"),
        ({"": 0, "model.norm": (5, "disk")}, "rank 5 disk, .* or is left out of max_memory"),
        ({"": 0}, "101 bytes are missing"),
        ("somehow", "is not a plan"),
        (0, 'device_map=0 .* write {"": 0}'),
        ([0], r"device_map=\[0\] .* nor a dict"),
        ({}, "no place for"),
        (
            {"": 0, "model.layer.3": 0},
            "'model.layer.3', which is not in the model.*mean 'model.layers.3'",
        ),
        ({"": 0, "lm_head.weight": 0}, "a part of lm_head, which stays whole"),
        ({"": 0, "model.layers.99": 0}, "'model.layers.99', which is not in the model"),
    ],
)
def test_a_map_of_ones_own_that_cannot_hold_is_refused(device_map, complaint):
    with pytest.raises(PlanError, match=complaint):
        plan(LLAMA, {(0, "cpu"): 800}, device_map)


def test_a_map_that_separates_tied_modules_is_refused():
    tied = ModelProfile(LLAMA.layers, LLAMA.others, (("model.embed_tokens", "lm_head"),))
    with pytest.raises(PlanError, match="share tensors"):
        plan(tied, {(0, "cpu"): 800, (1, "cpu"): 800}, {"": 0, "lm_head": 1})


def test_the_picture_has_a_line_for_each_place_with_what_it_holds():
    lines = str(plan(LLAMA, {(0, "cpu"): 600, (1, "cuda:0"): 1024})).splitlines()
    assert len(lines) == 2
    assert "rank 1 cuda:0" in lines[1] and "1.0 KiB" in lines[1] and "model.layers." in lines[1]


def test_neighbouring_layers_are_abbreviated():
    names = ["embed", "layers.0", "layers.1", "layers.2", "layers.4", "head"]
    assert abbreviate_names(names) == "embed, layers.0-2, layers.4, head"


@pytest.mark.parametrize(
    ("size", "expected"), [(7, 7), ("7", 7), ("2KiB", 2048), ("2 KB", 2000), ("1.5GiB", 3 << 29)]
)
def test_sizes_are_numbers_or_text(size, expected):
    assert nbytes(size) == expected


@pytest.mark.parametrize("size", ["8Gb", "8gb", "8GB", "8Gib", "1.5Mb", "8kb", "8GIB"])
def test_a_size_in_bits_is_what_accelerate_takes_it_for(size):
    assert nbytes(size) == convert_file_size_to_int(size)


def test_a_size_that_is_none_is_refused():
    with pytest.raises(PlanError, match="2GiB"):
        nbytes("much")


def test_memory_may_be_given_by_place_by_rank_or_as_a_list():
    free_nbytes = {(0, "cuda:0"): 9, (1, "cpu"): 9}
    assert limit_memory(free_nbytes, [1, "2"]) == {(0, "cuda:0"): 1, (1, "cpu"): 2}
    assert limit_memory(free_nbytes, {1: 3}) == {(1, "cpu"): 3}
    assert limit_memory(free_nbytes, {(0, "cpu"): 4}) == {(0, "cpu"): 4}
    assert limit_memory(free_nbytes, {0: "1KiB", "cpu": 5}) == {(0, "cuda:0"): 1024, (0, "cpu"): 5}
    with pytest.raises(PlanError, match=r"ranks \[5\]"):
        limit_memory(free_nbytes, {5: 1})


OFFLOADING = {(0, "cuda:0"): 450, (0, "cpu"): 700, (1, "cuda:0"): 450, (1, "disk"): 5000}


def test_nothing_is_offloaded_and_nothing_reserved_where_the_accelerators_suffice():
    free_nbytes = {**OFFLOADING, (0, "cuda:0"): 451, (1, "cuda:0"): 500}
    chosen = plan(LLAMA, free_nbytes)
    assert {device for _, device in chosen.places.values()} == {"cuda:0"}


def test_the_cpu_takes_what_the_accelerators_do_not_and_disk_what_the_cpu_does_not():
    chosen = plan(LLAMA, {**OFFLOADING, (1, "cuda:0"): 200})
    devices = [chosen.places[part.name] for part in LLAMA.layers]
    assert devices == [(0, "cuda:0")] * 1 + [(0, "cpu")] * 5 + [(1, "cuda:0")] * 2
    chosen = plan(LLAMA, {**OFFLOADING, (0, "cpu"): 100, (1, "cuda:0"): 200})
    devices = [chosen.places[part.name] for part in LLAMA.layers]
    assert devices == [(0, "cuda:0")] + [(0, "cpu")] + [(1, "disk")] * 6


def test_memory_for_two_layers_is_kept_where_offloaded_ones_run():
    chosen = plan(LLAMA, OFFLOADING)
    assert chosen.used((0, "cuda:0")) <= 450 - 200
    assert any(device == "cpu" for _, device in chosen.places.values())


@pytest.mark.parametrize("mode", ["auto", "sequential", "fastest"])
def test_caches_of_offloaded_layers_are_planned_where_they_run(mode):
    """A plan kept 80 bytes of caches "on disk" that a pass then has on the device."""
    layers = tuple(ModulePart(f"layers.{i}", 20, kept_nbytes=10) for i in range(8))
    free_nbytes = {(0, "cpu"): 130, (0, "disk"): 1000}
    speeds = DeviceSpeeds(dict.fromkeys(free_nbytes, DeviceSpeed(1e9, 1e9)))
    chosen = plan(ModelProfile(layers), free_nbytes, mode, speeds=speeds)
    own = [part for part in layers if chosen.places[part.name] == (0, "cpu")]
    assert len(own) == 1  # beside two layers of 20 and eight caches of 10
    assert chosen.used((0, "cpu")) == 10 + 80 and chosen.used((0, "disk")) == 70
    assert chosen.free_for_tokens((0, "cpu")) == (80, 20)  # two layers of 10 come and go
    with pytest.raises(PlanError, match="missing"):
        plan(ModelProfile(layers), {**free_nbytes, (0, "cpu"): 119}, mode, speeds=speeds)


def test_a_users_device_map_needs_memory_for_the_caches_of_offloaded_layers():
    layers = tuple(ModulePart(f"layers.{i}", 20, kept_nbytes=10) for i in range(8))
    device_map = {"": "disk", "layers.0": "cpu"}
    assert plan(ModelProfile(layers), {(0, "cpu"): 110}, device_map).used((0, "cpu")) == 90
    with pytest.raises(PlanError, match="1 bytes are missing"):  # two layers of 10 come and go
        plan(ModelProfile(layers), {(0, "cpu"): 109}, device_map)
    with pytest.raises(PlanError, match="1 bytes are missing"):
        plan(ModelProfile(layers), {(0, "cpu"): 99}, {"": "disk"})


@given(
    layouts(),
    st.lists(st.integers(0, 300), min_size=6, max_size=6),
    st.integers(0, 60),
    st.sampled_from([*KINDS]),
)
def test_offloading_keeps_every_module_within_the_memory_of_its_place(
    model, sizes, workspace_nbytes, mode
):
    """With two layers on their way to where they run, and the workspace there."""
    places = [(rank, device) for rank in range(2) for device in ("cuda:0", "cpu", "disk")]
    free_nbytes = dict(zip(places, sizes, strict=True))
    speeds = DeviceSpeeds(dict.fromkeys(places, DeviceSpeed(1e9, 1e9)))
    model = dataclasses.replace(model, workspace_nbytes=workspace_nbytes)
    try:
        chosen = plan(model, free_nbytes, mode, speeds=speeds)
    except PlanError:
        return
    needed = {place: chosen.needed(place, workspace_nbytes) for place in chosen.used_places()}
    assert all(nbytes <= free_nbytes[place] for place, nbytes in needed.items())
    ranks = [chosen.places[part.name][0] for part in model.layers]
    assert ranks == sorted(ranks)
    assert all(len({chosen.places[name] for name in tie}) == 1 for tie in model.ties)


def test_a_users_device_map_may_name_devices_of_rank_0_and_disks():
    free_nbytes = {(0, "cuda:0"): 1000, (0, "cpu"): 1000, (1, "cpu"): 1000}
    given = {
        "": 0,
        "model.layers.1": "cpu",
        "model.layers.2": "disk",
        "model.layers.3": (1, "disk"),
    }
    chosen = plan(LLAMA, free_nbytes, given)
    found = [chosen.places[f"model.layers.{n}"] for n in range(4)]
    assert found == [(0, "cuda:0"), (0, "cpu"), (0, "disk"), (1, "disk")]
    assert set(chosen.runs_on(0).values()) == {"cuda:0"} and chosen.device_of(1) == "cpu"


LOOSE = ModelProfile(LLAMA.layers, (ModulePart("scale", 4), *LLAMA.others), root_tensors=("scale",))


def test_a_tensor_that_the_model_uses_outside_of_modules_stays_on_rank_0():
    chosen = plan(LOOSE, {(0, "cpu"): 60, (1, "cpu"): 900})
    assert chosen.places["scale"] == (0, "cpu") and chosen.places["lm_head"] == (1, "cpu")
    free_nbytes = {(0, "cpu"): 1000, (1, "cpu"): 1000}
    with pytest.raises(PlanError, match=r"'scale'.*reads or changes it by itself"):
        plan(LOOSE, free_nbytes, {"": 0, "scale": 1})


def test_a_workspace_is_kept_on_every_place_that_runs_layers():
    workspace_nbytes = dataclasses.replace(LLAMA, workspace_nbytes=150)
    free_nbytes = {(0, "cpu"): 600, (1, "cpu"): 700}
    chosen = plan(workspace_nbytes, free_nbytes)
    assert all(chosen.used(place) <= nbytes - 150 for place, nbytes in free_nbytes.items())
    with pytest.raises(PlanError, match="151 bytes more as workspace"):
        plan(dataclasses.replace(LLAMA, workspace_nbytes=151), {(0, "cpu"): 551, (1, "cpu"): 651})
    with pytest.raises(PlanError, match="1 bytes are missing"):
        plan(workspace_nbytes, {(0, "cpu"): 1050}, {"": 0})
    with pytest.raises(PlanError, match="1 bytes are missing"):  # what has no GPU runs on the CPU
        plan(workspace_nbytes, {(0, "cuda:0"): 0, (0, "cpu"): 1050}, {"": "cpu"})


def test_a_place_without_room_for_the_workspace_gets_nothing_and_the_others_the_model():
    """One GPU that another job had taken made every plan impossible."""
    model = dataclasses.replace(LLAMA, workspace_nbytes=150)
    assert plan(model, {(0, "cpu"): 2000, (1, "cpu"): 0}).ranks == [0]
    assert plan(model, {(0, "cpu"): 0, (1, "cpu"): 2000}).ranks == [1]
    offloading = {(0, "cuda:0"): 600, (1, "cuda:0"): 0, (1, "cpu"): 9000}
    with pytest.raises(PlanError, match="are missing"):
        plan(model, offloading)  # offloaded layers run on the GPU of their rank
    chosen = plan(model, {**offloading, (0, "cpu"): 9000})
    assert chosen.ranks == [0] and "cpu" in chosen.of(0).values()
