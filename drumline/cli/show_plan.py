"""The device map of a model, as text; loads no weights.

drumline plan --model DIR --memory 8GiB 8GiB 16GiB
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from drumline.cli import plan_pictures
from drumline.contact.loading.hub import folder_of_headers
from drumline.core.device_map import DeviceMap, ModelProfile, Place, format_nbytes
from drumline.errors import DrumlineError
from drumline.pipeline.microbatch import is_chunked, tokens_of_chunk
from drumline.planner import model_profile
from drumline.planner.cost_model import (
    DeviceSpeed,
    DeviceSpeeds,
    LinkSpeed,
    PassShape,
    estimate,
    estimate_prompt,
    ring_passes,
    stage_times,
)
from drumline.planner.load_options import LoadOptions
from drumline.planner.sizes import nbytes
from drumline.planner.token_memory import token_memory, with_calls, with_tokens
from drumline.strategies.opening import describe_checkpoint
from drumline.strategies.plan_inputs import PlanInputs, sized_model

DEFAULT_BANDWIDTH, DEFAULT_FLOPS, DEFAULT_CALLS = "20GB", 2e11, 1.2e5
"""Of the memory and the processor of an ordinary computer; calls are of torch, by Python."""

ORDERING = 3.2
"""Times as long as reading weights takes a CPU to bring them into order for several tokens; fitted
to the first tokens of `python -m benchmarks big`."""


def _speeds(
    places: Collection[Place], bandwidth: Sequence[str], hop: LinkSpeed, flops: float, calls: float
) -> DeviceSpeeds:
    """The speeds that the arguments of show_plan() say."""
    read = {place: nbytes(bandwidth[place[0]]) for place in places}
    by_place = {place: DeviceSpeed(flops, n, n / ORDERING, calls) for place, n in read.items()}
    return DeviceSpeeds(by_place, {rank: hop for rank, _ in places if len(places) > 1})


def _time_of_a_token(
    model: ModelProfile, planned: DeviceMap, speeds: DeviceSpeeds, shape: PassShape
) -> str:
    """The time of a token, and what takes it."""
    expected = estimate(model, planned, speeds, shape)
    parts = {
        f"on rank {rank}": seconds
        for (rank, _), seconds in stage_times(model, planned, speeds, shape).items()
    }
    trips = shape.ring_passes if expected.hops_s else 0
    delay_s = trips * sum(link.latency_s for link in speeds.links.values())
    parts |= {"of delay": delay_s, "of transfer": expected.hops_s - delay_s}
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    spent = ", ".join(f"{_time(seconds)} {name}" for name, seconds in ordered if seconds > 1e-12)
    return f"a token takes {_time(expected.pass_s)} at least: {spent}"


def _time_of_a_prompt(
    weights: ModelProfile,
    planned: DeviceMap,
    speeds: DeviceSpeeds,
    shape: PassShape,
    length: int,
    chunks: int,
) -> str:
    expected = estimate_prompt(weights, planned, speeds, shape, length, chunks)
    speed, *_ = speeds.places.values()
    return (
        f"the first token of {length} takes {_time(expected.pass_s)} at least, of which hops "
        f"{_time(expected.hops_s)}, at {speed.flops / 1e9:g} GFLOP/s"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def show_plan(
    model_path: str | Path,
    memory: list[str],
    device_map: str = "auto",
    dtype: str | None = None,
    batch: int = 1,
    length: int = 0,
    bandwidth: Sequence[str] | None = None,
    hop_us: float = 100.0,
    link: str | None = None,
    flops: float | None = None,
    calls: float = DEFAULT_CALLS,
    html: Path | None = None,
    png: Path | None = None,
    **options: Any,
) -> None:
    """Print the device map, the memory that is left, the most tokens per second, and where their
    time goes.

    memory: of each rank. batch, length: sequences, and the tokens of each in the cache.
    bandwidth: bytes that each rank reads in a second. hop_us: latency between two ranks. link:
    bytes that it takes in a second, no limit if not given. flops: of a rank in a second. calls: of
    functions of torch that a rank makes in a second; counted with a length alone.
    html, png: files for pictures of the map. options: of `load`.
    """
    request = LoadOptions(dtype=dtype, **options)
    with folder_of_headers(model_path, request.revision, request.gguf_file) as folder:
        checkpoint = describe_checkpoint(folder, request)
        _, model, weights = sized_model(checkpoint, request)
    config, kind, torch_dtype = checkpoint.config, checkpoint.kind, checkpoint.dtype
    whole_on = "" if is_chunked(config, length, len(memory)) else "cpu"
    for_tokens = token_memory(kind, config, torch_dtype, weights, batch, length, whole_on)
    profile = with_tokens(weights, for_tokens)
    free_nbytes = {(rank, "cpu"): nbytes(size) for rank, size in enumerate(memory)}
    bandwidth = bandwidth or [DEFAULT_BANDWIDTH] * len(memory)
    hop = LinkSpeed(hop_us * 1e-6, nbytes(link) if link else math.inf)
    speeds = _speeds(free_nbytes, bandwidth, hop, flops or DEFAULT_FLOPS, calls)
    shape = PassShape(batch, model_profile.hidden_width(config), torch_dtype.itemsize)
    planned = PlanInputs(checkpoint, profile, free_nbytes, shape).plan(device_map, speeds)
    decoding = model_profile.decode_profile(model, profile)
    names = {part.name for part in (*decoding.others, *decoding.layers) if part.nbytes}
    ranks = [planned.places[name][0] for name, _ in model.named_modules() if name in names]
    shape = dataclasses.replace(shape, ring_passes=ring_passes(ranks))
    expected = estimate(decoding, planned, speeds, shape)
    left = sum(size - planned.used(place) for place, size in planned.free_nbytes.items())
    kept = sum(part.kept_nbytes for part in (*profile.layers, *profile.others))
    on_link = f" of {link}/s" if link else ""
    text = (
        f"{planned}\n{format_nbytes(weights.nbytes)} of weights, {format_nbytes(kept)} of cache "
        f"({batch} x {length} tokens), {format_nbytes(left)} left over\n"
        f"{shape.ring_passes * len(memory)} hops a token; at most "
        f"{expected.tokens_a_second:.1f} tokens/s at "
        f"{'/s, '.join(dict.fromkeys(bandwidth))}/s and {hop_us:g} us a hop{on_link}\n"
        f"{_time_of_a_token(decoding, planned, speeds, shape)}"
    )
    if length and kind.can_generate():
        size = tokens_of_chunk(length, len(planned.ranks)) or length
        of_chunk = token_memory(kind, config, torch_dtype, weights, batch, size)
        called, chunks = with_calls(weights, of_chunk.prompt_calls), -(-length // size)
        text += f"\n{_time_of_a_prompt(called, planned, speeds, shape, length, chunks)}"
    if for_tokens.error:
        text += f"\n{for_tokens.warning(kind)}"
    print(text)
    try:
        if html is not None:
            plan_pictures.write_html(planned, text, html)
        if png is not None:
            plan_pictures.draw(planned, png)
    except (OSError, ValueError) as error:  # the latter for an ending that names no format
        raise DrumlineError(f"the picture was not written ({error}); name another file.") from error
