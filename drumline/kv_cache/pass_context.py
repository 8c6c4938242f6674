"""The pass of a model that a thread is in: its input, and the caches that came with it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from drumline.contact.caches import Cache, iter_caches
from drumline.kv_cache.proxy import came_filled

NO_PASS: Any = (lambda: None), ()


class PassContext(threading.local):
    """The pass of each thread.

    shape: rows and tokens of its input. wants_hidden_states: whether this thread last requested
    hidden states, and so reads more outputs. loses_gradient: whether other ranks were given what
    requires a gradient.
    """

    shape: tuple[int, int] | None = None
    wants_hidden_states = loses_gradient = False
    # The outermost model, and its caches that came filled. An interrupt may leave them here, so
    # they are set and deleted together.
    _pass: tuple[Callable[[], Any], tuple[weakref.ref[Cache], ...]] = NO_PASS

    def begin(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Remember what a model of this thread is called with, and its caches that came filled."""
        if self._pass[0]() in (None, model):  # itself if the last pass was interrupted
            filled = filter(came_filled, iter_caches((args, kwargs)))
            self._pass = weakref.ref(model), tuple(map(weakref.ref, filled))
            self.loses_gradient = False
        if "output_hidden_states" in kwargs:
            self.wants_hidden_states = bool(kwargs["output_hidden_states"])
        for tensor in (*args[:1], kwargs.get("inputs_embeds"), kwargs.get("input_ids")):
            if isinstance(tensor, torch.Tensor) and tensor.dim() in (2, 3):
                self.shape = tensor.shape[0], tensor.shape[1]

    def end(self, model: Any, *_: Any) -> None:
        if self._pass[0]() is model:
            self._pass = NO_PASS

    def __deepcopy__(self, memo: Any) -> PassContext:
        return self

    def came_empty(self, cache: Cache) -> bool:
        """True if this thread is in a pass, and the cache was empty when that began."""
        outermost, filled = self._pass
        return outermost() is not None and all(cache is not reference() for reference in filled)
