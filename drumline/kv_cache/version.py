"""What the other ranks know of a layer of a cache, to tell when a script has changed it by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

from drumline.errors import DrumlineError


class LayerVersion(NamedTuple):
    """A layer as its rank last heard of it. Every cut makes another tensor."""

    keys: Any = None
    values: Any = None
    length: int = 0
    has_state: bool = False


EMPTY_LAYER = LayerVersion()


def version_of(layer: Any) -> LayerVersion:
    states = getattr(layer, "has_previous_state", None) or {}
    length = int(getattr(layer, "get_seq_length", int)())
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    return LayerVersion(keys, values, length, any(states.values()))


def check_unchanged(index: int, layer: Any, known: LayerVersion) -> None:
    """Raise DrumlineError unless the layer, None if it is gone, is as its rank knows it."""
    now = version_of(layer)
    if known is EMPTY_LAYER and (now.length, now.has_state) == (0, False):
        return
    is_same = now.keys is known.keys and now.values is known.values
    if not is_same or now[2:] != known[2:]:
        raise DrumlineError(
            f"rank 0: layer {index} of this cache was changed by hand: it has {now.length} tokens "
            f"here, of the {known.length} that the rank which holds it has in it and keeps, so "
            "what follows would be wrong; change the whole cache, with cache.crop(-3), "
            "cache.batch_select_indices(rows) or cache.reorder_cache(rows), or start from an "
            "empty one."
        )
