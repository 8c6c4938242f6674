"""The fastest plan is the best of all contiguous ones, wherever those can be counted."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MixtralConfig, MixtralForCausalLM

from drumline import DeviceMap, ModelProfile, ModulePart, PlanError, plan
from drumline.planner.cost_model import (
    DeviceSpeed,
    DeviceSpeeds,
    GroupSpeed,
    LinkSpeed,
    PassShape,
    estimate,
    estimate_prompt,
    estimate_tensor_parallel,
    part_time_s,
    ring_passes,
)
from drumline.planner.model_profile import build_on_meta, nbytes_of_tensor, profile_model

sizes = st.integers(1, 40)


@st.composite
def cases(draw):
    """Up to six layers on up to three places, of one rank or several, with a head on the first."""
    layers = tuple(
        ModulePart(f"layers.{i}", n) for i, n in enumerate(draw(st.lists(sizes, max_size=6)))
    )
    model = ModelProfile(
        layers, (ModulePart("embed", 9, unread_nbytes=9), ModulePart("head", draw(sizes)))
    )
    ranks = draw(st.sampled_from([[0], [0, 0], [0, 1], [0, 1, 2], [0, 0, 1]]))
    places = [(rank, f"cuda:{n}") for n, rank in enumerate(ranks)]
    speed = st.builds(DeviceSpeed, st.sampled_from([5.0, 50.0]), st.sampled_from([1.0, 4.0, 10.0]))
    link = st.builds(LinkSpeed, st.sampled_from([0.0, 2.0]), st.sampled_from([1.0, 100.0]))
    speeds = DeviceSpeeds(
        {place: draw(speed) for place in places},
        {rank: draw(link) for rank in set(ranks)} if ranks[-1] else {},
    )
    step = PassShape(draw(st.integers(1, 3)), draw(st.integers(0, 4)), 1, draw(st.integers(1, 3)))
    free_nbytes = {place: draw(st.sampled_from([60, 100, 1000])) for place in places}
    return model, free_nbytes, speeds, step


def every_cut(model, free_nbytes):
    """All maps that keep layers in order and the others on the first place, and that fit."""
    places, count = list(free_nbytes), len(model.layers)
    nbytes = {part.name: part.nbytes for part in (*model.others, *model.layers)}
    for ends in itertools.combinations_with_replacement(range(count + 1), len(places) - 1):
        bounds = [0, *ends, count]
        where = {part.name: places[0] for part in model.others}
        for place, start, end in zip(places, bounds, bounds[1:], strict=False):
            where.update({part.name: place for part in model.layers[start:end]})
        found = DeviceMap(where, nbytes, free_nbytes)
        if all(found.used(place) <= free_nbytes[place] for place in places):
            yield found


@settings(max_examples=300, deadline=None)
@given(cases())
def test_no_other_partition_gives_more_tokens_a_second(case):
    model, free_nbytes, speeds, step = case
    rates = [
        estimate(model, cut, speeds, step).tokens_a_second for cut in every_cut(model, free_nbytes)
    ]
    try:
        chosen = plan(model, free_nbytes, "fastest", speeds=speeds, step=step)
    except PlanError:
        assert not rates
        return
    assert set(chosen.places) == {part.name for part in (*model.layers, *model.others)}
    assert all(chosen.used(place) <= free_nbytes[place] for place in free_nbytes)
    if not rates:  # it fits only where parts around the layers are elsewhere
        assert {chosen.places[part.name] for part in model.others} != {next(iter(free_nbytes))}
        return
    found = estimate(model, chosen, speeds, step).tokens_a_second
    assert found == pytest.approx(max(rates))


MODEL = ModelProfile(
    tuple(ModulePart(f"layers.{i}", 100) for i in range(8)), (ModulePart("head", 100),)
)
EQUAL = DeviceSpeeds({(rank, "cpu"): DeviceSpeed(1e9, 100.0) for rank in range(2)})
HOP = {0: LinkSpeed(0.5, 1e9), 1: LinkSpeed(0.5, 1e9)}


def layers_by_rank(chosen):
    ranks = [rank for name, (rank, _) in chosen.places.items() if name.startswith("layers")]
    return [ranks.count(rank) for rank in range(2)]


FREE_NBYTES = {(0, "cpu"): 10_000, (1, "cpu"): 10_000}


def test_one_stream_stays_on_rank_0_if_the_other_rank_is_no_faster():
    speeds = DeviceSpeeds(EQUAL.places, HOP)
    assert layers_by_rank(plan(MODEL, FREE_NBYTES, "fastest", speeds=speeds)) == [8, 0]


def test_several_generations_keep_both_ranks_at_work():
    speeds, step = DeviceSpeeds(EQUAL.places, HOP), PassShape(streams=4)
    assert layers_by_rank(plan(MODEL, FREE_NBYTES, "fastest", speeds=speeds, step=step)) == [4, 4]


def test_a_faster_rank_gets_what_fits_if_that_pays_for_the_hops():
    faster = DeviceSpeeds({**EQUAL.places, (1, "cpu"): DeviceSpeed(1e9, 400.0)}, HOP)
    free_nbytes = {**FREE_NBYTES, (1, "cpu"): 500}
    assert layers_by_rank(plan(MODEL, free_nbytes, "fastest", speeds=faster)) == [3, 5]


def test_a_large_batch_is_bound_by_arithmetic_and_a_small_one_by_reading():
    speeds = DeviceSpeeds({(0, "cpu"): DeviceSpeed(1e3, 100.0)})
    alone = plan(MODEL, {(0, "cpu"): 10_000})
    one = estimate(MODEL, alone, speeds, PassShape(batch=1, itemsize=2))
    many = estimate(MODEL, alone, speeds, PassShape(batch=100, itemsize=2))
    assert one.pass_s == pytest.approx(900 / 100.0)
    assert many.pass_s == pytest.approx(2 * 100 * 450 / 1e3)


def test_a_place_of_unknown_speed_is_named():
    with pytest.raises(PlanError, match=r"\(1, 'cpu'\)"):
        plan(
            MODEL, FREE_NBYTES, "fastest", speeds=DeviceSpeeds({(0, "cpu"): DeviceSpeed(1.0, 1.0)})
        )


def even(places, nbytes, flops, link):
    speeds = dict.fromkeys(places, DeviceSpeed(flops, nbytes))
    return DeviceSpeeds(speeds, {rank: link for rank, _ in places})


def test_assumed_speeds_are_those_of_every_place():
    chosen = plan(MODEL, FREE_NBYTES, {"": 0, "layers.7": 1})
    found = estimate(MODEL, chosen, even(FREE_NBYTES, 100.0, math.inf, LinkSpeed(0.25, math.inf)))
    assert found.pass_s == pytest.approx(9 + 0.5) and found.hops_s == pytest.approx(0.5)
    assert found.tokens_a_second == pytest.approx(1 / 9.5)


@pytest.mark.parametrize(
    ("device_map", "expected"),
    [
        ({"": 0, "model.layers.3": 1, "model.layers.4": 2}, 1),
        ({"": 0, "model.layers": 1, "lm_head": 2}, 2),
        ({"": 0, "model.embed_tokens": 2, "model.layers": 1, "lm_head": 1}, 3),
    ],
    ids=["a layer in the middle", "a head elsewhere", "embeddings and a head elsewhere"],
)
def test_trips_round_the_ring_are_those_that_a_token_makes(
    checkpoints, on_master, device_map, expected
):
    """A plan said that a token passes each rank once, wherever the head was."""
    plain, path = checkpoints.llama()
    sent = []

    def generate(model):
        for num_new in (2, 2, 6):
            before = model.traffic[0]
            ids = torch.arange(3, 9)[None]
            model.generate(ids, min_new_tokens=num_new, max_new_tokens=num_new)
            sent.append(model.traffic[0] - before)
        return model.device_map.places

    places = on_master(path, 3, generate, device_map=device_map)
    route = [places[name][0] for name, _ in plain.named_modules() if name in places]
    route.remove(places["model.rotary_emb"][0])  # which runs before the layers, and is here
    assert (sent[2] - sent[1]) / 4 == ring_passes(route) == expected


def test_a_prompt_is_multiplied_by_each_stage_and_carried_by_each_link():
    """Its parts follow each other, so that the slowest stage is the pace."""
    model = ModelProfile((ModulePart("a", 40), ModulePart("b", 40)), (ModulePart("head", 8),))
    places = [(0, "cpu"), (1, "cpu")]
    speeds = even(places, 8e9, 100.0, LinkSpeed(0.5, 80.0))
    device_map = DeviceMap.of_parts(
        [*model.layers, *model.others],
        {"a": places[0], "b": places[1], "head": places[0]},
        dict.fromkeys(places, 100),
    )
    step = PassShape(width=4, itemsize=4)
    whole = estimate_prompt(model, device_map, speeds, step, length=50)
    work, transfer = 2 * 50 * 40 / 4 / 100, 50 * 4 * 4 / 80
    assert whole.pass_s == pytest.approx(2 * (work + transfer + 0.5) + 2 * 8 / 4 / 100)
    parts = estimate_prompt(model, device_map, speeds, step, length=50, chunks=1000)
    assert parts.pass_s == pytest.approx(2 * 0.5 + max(work, transfer), rel=0.02)


def test_several_tokens_take_the_time_in_which_weights_are_brought_into_order_for_them():
    """On a CPU a first token after 32 took 2.5 times what `drumline plan` said."""
    part, speed = ModulePart("a", 4000), DeviceSpeed(1e6, 4e5, ordered_nbytes=1e5)
    for batch, expected_s in ((1, 0.01), (2, 0.01 + 0.04 / 2), (16, 0.032 + 0.04 * 15 / 16)):
        step = PassShape(batch, itemsize=4)
        assert part_time_s(part, speed, step) == pytest.approx(expected_s)


def test_the_tokens_of_a_batch_go_to_more_experts_than_one_does():
    """A prompt was planned for as if all of its tokens went to the same two of eight."""
    config = MixtralConfig(num_hidden_layers=1, hidden_size=64, vocab_size=64, head_dim=16)
    (layer,) = profile_model(build_on_meta(MixtralForCausalLM, config, torch.bfloat16)).layers
    experts_nbytes = 8 * 3 * 64 * config.intermediate_size * 2
    for batch, unread in ((1, 3 / 4), (2, 9 / 16), (1000, 0)):
        read_s = part_time_s(layer, DeviceSpeed(math.inf, 1.0), PassShape(batch, itemsize=2))
        assert read_s == pytest.approx(layer.nbytes - unread * experts_nbytes)
        work_s = part_time_s(layer, DeviceSpeed(1.0, math.inf), PassShape(batch, itemsize=2))
        assert work_s == pytest.approx(batch * (layer.nbytes - experts_nbytes * 3 / 4))
    table, speed = ModulePart("a", 9, unread_nbytes=9), DeviceSpeed(1.0, 1.0)
    assert part_time_s(table, speed, PassShape(batch=5)) == 0


def test_packed_weights_are_multiplied_as_often_as_plain_ones():
    """Work was counted by bytes, so a prompt of a model in 4 bits took a quarter of the time."""
    plain = torch.nn.ModuleList([torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)])
    speed, step = DeviceSpeed(1.0, math.inf), PassShape(batch=3, itemsize=2)
    for kept in (nbytes_of_tensor, lambda _, tensor: tensor.numel() // 2):
        (part,) = profile_model(plain, tensor_nbytes=kept).layers
        assert part_time_s(part, speed, step) == pytest.approx(2 * 3 * 64 * 64)


def test_every_call_of_a_function_takes_its_time_in_each_chunk_and_on_each_rank_of_a_group():
    """A token over 12 layers took 10 ms longer than `drumline plan` said, whatever their size."""
    parts = tuple(ModulePart(name, 40, num_calls=50) for name in "ab")
    model, at = ModelProfile(parts), {name: (0, "cpu") for name in "ab"}
    speed = DeviceSpeed(1e9, 4e3, calls=1e3)
    device_map, speeds = DeviceMap.of_parts(parts, at, {}), DeviceSpeeds({(0, "cpu"): speed})
    token = PassShape(itemsize=4)
    assert estimate(model, device_map, speeds, token).pass_s == pytest.approx(2 * (0.01 + 0.05))
    prompt = estimate_prompt(model, device_map, speeds, token, length=6, chunks=3)
    assert prompt.pass_s == pytest.approx(2 * (0.01 + 3 * 0.05), rel=0.01)
    group = GroupSpeed(2, speed, LinkSpeed(0.0, 1e9))
    sharded = estimate_tensor_parallel(model, group, speeds, token)
    assert sharded.pass_s == pytest.approx(2 * (0.01 / 2 + 0.05))


def test_a_tp_group_reads_at_the_same_time_and_pays_for_its_allreduces():
    """900 bytes over 2 ranks, 18 sums, and from stage to stage if there are two."""
    group = GroupSpeed(2, DeviceSpeed(1e9, 50.0), LinkSpeed(0.25, 8.0))
    links = {rank: LinkSpeed(0.5, 1e9) for rank in range(4)}
    step = PassShape(width=1, itemsize=4)
    one = estimate_tensor_parallel(MODEL, group, DeviceSpeeds({}, {0: links[0], 1: links[1]}), step)
    assert one.pass_s == pytest.approx(900 / 50 / 2 + 18 * (0.25 + 4 / 8)) and one.hops_s == 0
    two = estimate_tensor_parallel(MODEL, group, DeviceSpeeds({}, links), step)
    assert two.pass_s == pytest.approx(one.pass_s + 2 * 0.5)
    assert two.slowest_s == pytest.approx(one.slowest_s / 2)
