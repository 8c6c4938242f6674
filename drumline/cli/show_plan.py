"""The device map of a model, as text; loads no weights.

drumline plan --model DIR --memory 8GiB 8GiB 16GiB
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drumline.cli import plan_pictures
from drumline.contact.loading.hub import local_folder
from drumline.core.device_map import format_nbytes
from drumline.planner import model_profile
from drumline.planner.cost_model import (
    DeviceSpeed,
    PassShape,
    estimate,
    ring_passes,
    uniform_speeds,
)
from drumline.planner.load_options import LoadOptions
from drumline.planner.memory import nbytes
from drumline.planner.plan import plan
from drumline.planner.token_memory import token_memory, with_tokens
from drumline.strategies.opening import describe_checkpoint
from drumline.strategies.plan_inputs import sized_model

DEFAULT_BANDWIDTH = "20GB"
"""Of the memory of an ordinary computer."""


def show_plan(
    model_path: str | Path,
    memory: list[str],
    device_map: str = "auto",
    dtype: str | None = None,
    batch: int = 1,
    length: int = 0,
    bandwidth: Sequence[str] | None = None,
    hop_us: float = 100.0,
    html: Path | None = None,
    png: Path | None = None,
    **options: Any,
) -> None:
    """Print the device map, the memory that is left, and the most tokens per second.

    memory: of each rank. batch, length: sequences, and the tokens of each in the cache.
    bandwidth: bytes that each rank reads in a second. hop_us: latency between two ranks.
    html, png: files for pictures of the map. options: of `load`.
    """
    request = LoadOptions(dtype=dtype, **options)
    folder = local_folder(model_path, request.revision, request.gguf_file)
    checkpoint = describe_checkpoint(folder, request)
    config, kind, torch_dtype = checkpoint.config, checkpoint.kind, checkpoint.dtype
    _, model, weights = sized_model(checkpoint, request)
    for_tokens = token_memory(kind, config, torch_dtype, weights, batch, length)
    profile = with_tokens(weights, for_tokens)
    free_nbytes = {(rank, "cpu"): nbytes(size) for rank, size in enumerate(memory)}
    bandwidth = bandwidth or [DEFAULT_BANDWIDTH] * len(memory)
    read = [nbytes(size) for size in bandwidth]
    speeds = uniform_speeds(free_nbytes, nbytes=read[0], hop_s=hop_us * 1e-6)
    places = {place: DeviceSpeed(math.inf, read[place[0]]) for place in free_nbytes}
    speeds = dataclasses.replace(speeds, places=places)
    shape = PassShape(batch, model_profile.hidden_width(config), torch_dtype.itemsize)
    planned = plan(profile, free_nbytes, device_map, speeds=speeds, step=shape)
    decoding = model_profile.decode_profile(model, profile)
    names = {part.name for part in (*decoding.others, *decoding.layers) if part.nbytes}
    ranks = [planned.places[name][0] for name, _ in model.named_modules() if name in names]
    shape = dataclasses.replace(shape, ring_passes=ring_passes(ranks))
    rate = estimate(decoding, planned, speeds, shape).tokens_a_second
    left = sum(size - planned.used(place) for place, size in planned.free_nbytes.items())
    kept = sum(part.kept_nbytes for part in (*profile.layers, *profile.others))
    text = (
        f"{planned}\n{format_nbytes(weights.nbytes)} of weights, "
        f"{format_nbytes(kept)} of cache ({batch} x {length} tokens), "
        f"{format_nbytes(left)} left over\n"
        f"{shape.ring_passes * len(memory)} hops a token; at most {rate:.1f} tokens/s at "
        f"{'/s, '.join(dict.fromkeys(bandwidth))}/s and {hop_us:g} us a hop"
    )
    if for_tokens.error:
        text += f"\n{for_tokens.warning(kind)}"
    print(text)
    if html is not None:
        plan_pictures.write_html(planned, text, html)
    if png is not None:
        plan_pictures.draw(planned, png)
