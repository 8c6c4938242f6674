"""Layers that keep a window of their tokens give back the rest of a long prompt.

give_back_prompts(model)    # before its first pass

transformers' windows are views of all keys and values of the pass before: until the next token each
layer held those of the whole prompt, which no plan has room for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from drumline.contact.cache_layers import keep_no_more
from drumline.contact.caches import has_windows, iter_caches, make_cache
from drumline.contact.model_parts import layer_number


def give_back_prompts(model: nn.Module) -> None:
    """Have the layers of a model, which may be on meta, keep what their caches say, and no more."""
    pairs = ((module, layer_number(module)) for module in model.modules())
    numbered = [pair for pair in pairs if pair[1] >= 0] if _may_have_windows(model) else []
    last = max((number for _, number in numbered), default=0)
    for module, number in numbered:
        module.register_forward_hook(_give_back_of(number, last), with_kwargs=True)


def _may_have_windows(model: nn.Module) -> bool:
    try:
        return has_windows(make_cache(model.config, "dynamic", True, False))
    except Exception:  # of transformers, about a config that no plain cache can be made for
        return True


def _give_back_of(number: int, last: int) -> Callable[..., None]:
    """A hook of this module: batches are split beside it, as they are not beside a script's own.

    last: the number behind which a cache has layers for more turns of a recurrence (Dory).
    """

    def give_back(_: nn.Module, args: Any, kwargs: dict[str, Any], __: Any) -> None:
        if torch.compiler.is_compiling():  # a static cache, which keeps its size
            return
        for cache in iter_caches([args, kwargs]):
            for layer in (*cache.layers[number : number + 1], *cache.layers[last + 1 :]):
                keep_no_more(layer)

    return give_back
