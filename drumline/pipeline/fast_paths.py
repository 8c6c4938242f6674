"""Self-check of the fast paths: a tiny model is run with the installed transformers, and watched.

python -m drumline.pipeline.fast_paths      # one JSON object, for `drumline doctor`

A fast path is chosen by what a pass is given. Where a release of transformers names that otherwise,
tokens would be right and come later, with nothing said. No version number is compared.
"""

from __future__ import annotations

import functools
import json
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from drumline.contact import model_parts
from drumline.contact.cache_layers import counts_in_python, max_tokens, num_tokens, tiny_cache
from drumline.contact.caches import cache_of
from drumline.contact.releases import READ, installed
from drumline.pipeline.overlap import MicrobatchMixin

ROWS, TOKENS = 8, 64
"""Of a batch that is worth two groups: see `microbatch.groups_of_pass`."""

STREAMS = 32
"""Rows that are worth two generations at the same time."""


class _Watch:
    """In place of the driver of several ranks: counts the parts of each batch that is split."""

    half_changed = None

    def __init__(self) -> None:
        self.microbatches, self.unread = self, set[str]()
        self.splits: list[int] = []

    def map(self, work: Callable[[Any], Any], items: Iterable[Any], *until: Any) -> list[Any]:
        parts = list(items)
        self.splits.append(len(parts))
        return [work(part) for part in parts]

    def end_pass(self, model: Any) -> None:
        """There are no calls of other ranks."""


class _WatchedModel(MicrobatchMixin):
    """Mixed into a tiny model, as if its last layer was on the second of two ranks."""

    _stages = (2, 1)
    _last_layer = object()
    outputs: list[Any]

    def _pass(self, *args: Any, **kwargs: Any) -> Any:
        self.outputs.append(super()._pass(*args, **kwargs))
        return self.outputs[-1]


def _watched() -> Any:
    model = model_parts.build_tiny()
    kind = type(model)
    model.__class__ = types.new_class(
        kind.__name__,
        (_WatchedModel, kind),
        exec_body=lambda names: names.update(__module__=kind.__module__),
    )
    model._driver, model.outputs = _Watch(), []
    return model


def _splits(model: Any, rows: int, tokens: int) -> bool:
    """True if a prompt of this shape is split on its way to the first token."""
    ids = torch.arange(rows * tokens).view(rows, tokens) % model_parts.VOCABULARY
    model._driver.splits = []
    model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False
    )
    return bool(model._driver.splits)


def _groups(model: Any) -> bool:
    return _splits(model, ROWS, TOKENS)


def _merged_caches(model: Any) -> bool:
    """The batch in groups has left one cache behind, of all rows and tokens."""
    cache = cache_of(model.outputs[-1])
    layers = [] if cache is None else cache.layers
    return {(layer.keys.shape[0], num_tokens(layer)) for layer in layers} == {(ROWS, TOKENS)}


def _streams(model: Any) -> bool:
    return _splits(model, STREAMS, 2)


def _chunks(model: Any) -> bool:
    model.prefill_chunk = 4
    return _splits(model, 1, 8)


def _static_layers(model: Any) -> bool:
    layers = tiny_cache(is_static=True).layers
    return not counts_in_python(layers[0]) and max_tokens(layers[0]) == 8


FAST_PATHS: dict[str, Callable[[Any], bool]] = {
    "groups of rows": _groups,
    "merged caches": _merged_caches,
    "generations side by side": _streams,
    "chunks of long prompts": _chunks,
    "static layers": _static_layers,
}
"""By name, what tells with a watched model whether it happens, in this order."""


@functools.cache
def check() -> dict[str, bool]:
    """By name of each fast path, whether it happens with what is installed: once per process.

    It takes some ten milliseconds, and leaves the state of random numbers as it was.
    """
    with torch.no_grad():
        model = _watched()
        return {name: _happens(path, model) for name, path in FAST_PATHS.items()}


def _happens(path: Callable[[Any], bool], model: Any) -> bool:
    try:
        return path(model)
    except Exception:  # whatever it is: a check must not keep a model from being loaded
        return False


@functools.cache
def warn_if_off() -> None:
    """Warn, once per process, if a fast path does not happen with what is installed."""
    if off := [name for name, happens in check().items() if not happens]:
        warnings.warn(
            f"transformers {installed('transformers')}: {', '.join(off)} do not happen with "
            "this version, so tokens are right and come later. `drumline doctor` shows the "
            f"versions that were read; pip install 'transformers=={READ['transformers'][-1]}' "
            "is the newest of them.",
            stacklevel=3,
        )


def main() -> None:
    print(
        json.dumps(
            {
                "transformers": installed("transformers"),
                "read": list(READ["transformers"]),
                "fast_paths": check(),
            }
        )
    )


if __name__ == "__main__":
    main()
