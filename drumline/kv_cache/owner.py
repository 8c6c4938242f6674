"""The KV caches of one rank, by the number that rank 0 gave them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from drumline.contact.cache_layers import class_for, is_filled
from drumline.contact.caches import Cache, make_cache, make_pair
from drumline.errors import DrumlineError, describe_error
from drumline.kv_cache.merge_caches import merge_caches

if TYPE_CHECKING:
    from drumline.kv_cache.paged_pool import PagedPool

CACHE_OPERATIONS = (
    "reorder_cache",
    "crop",
    "reset",
    "batch_repeat_interleave",
    "batch_select_indices",
    "activate_past_recording",
)
POOL_OPERATIONS = ("begin_step", "copy_tokens")


def make_pool(*shape: Any) -> PagedPool:
    """Pages for the layers of this rank, see PoolShape. Imported with the first batch."""
    from drumline.kv_cache.paged_pool import PagedPool

    return PagedPool(*shape)


class CacheRegistry:
    """The keys and values of the layers of this rank; they never leave it."""

    def __init__(self, config: Any):
        self.config = config
        self.by_number: dict[int, Any] = {}  # a Cache each, or a PagedPool
        self.failures: dict[int, str] = {}  # of operations, for those who use the cache
        self.pairs: dict[tuple[int, int], Cache] = {}

    def cache(self, number: int) -> Any:
        try:
            return self.by_number[number]
        except KeyError:
            why = self.failures.get(number, "the call that created or changed it failed")
            raise DrumlineError(
                f"cache {number} is not known here, because {why}; generate again from an empty "
                "cache."
            ) from None

    def pair(self, own: Cache, cross: Cache) -> Cache:
        """Both caches as one; the same object each time, since it remembers the filled layers."""
        key = (id(own), id(cross))
        if key not in self.pairs:
            self.pairs[key] = make_pair(own, cross)
        return self.pairs[key]

    def apply(self, operation: str, number: int, *arguments: Any) -> None:
        """Apply an operation that rank 0 logged.

        A cache for which it fails is forgotten, as it would differ from its parts on other ranks:
        the next call that uses it fails, and no call that does not.
        """
        try:
            self._apply(operation, number, *arguments)
        except Exception as error:
            self._free(number)
            self.failures.setdefault(number, f"{operation} of it raised {describe_error(error)}")

    # Every rank applies every operation, also for caches whose layers it does not hold: those stay
    # empty here, and the numbers and the pairs of all ranks remain the same.
    def _apply(self, operation: str, number: int, *arguments: Any) -> None:
        if operation == "create":
            self.by_number[number] = make_cache(self.config, *arguments[0])
        elif operation == "fork":
            self.by_number[number] = copy.deepcopy(self.cache(*arguments))
        elif operation == "join":
            merge_caches(self.cache(number), [self.cache(part) for part in arguments[0]])
        elif operation == "free":
            self._free(number)
            self.failures.pop(number, None)
        elif operation == "create_pool":
            self.by_number[number] = make_pool(*arguments)
        elif operation in POOL_OPERATIONS:
            getattr(self.cache(number), operation)(*arguments)
        elif operation in CACHE_OPERATIONS:
            change_layers(self.cache(number), operation, *arguments)
            if operation == "reset":
                self._forget_pairs(self.cache(number))
        else:
            raise DrumlineError(
                f"{operation!r} is not an operation on a cache; install the same version of "
                "drumline on all ranks."
            )

    def _free(self, number: int) -> None:
        self._forget_pairs(self.by_number.pop(number, None))

    def _forget_pairs(self, cache: Cache | None) -> None:
        """Let pairs with a cache be made anew: they note which of its layers are filled."""
        self.pairs = {key: pair for key, pair in self.pairs.items() if id(cache) not in key}


def change_layers(cache: Cache, operation: str, *arguments: Any) -> None:
    """Apply a cache's method of this name to those of its layers that hold something here."""
    for layer in cache.layers:
        if _can(layer, operation):
            getattr(class_for(layer, operation), operation)(layer, *arguments)


def _can(layer: Any, operation: str) -> bool:
    """True if the operation applies to the layer.

    Layers of other ranks stay empty here, and crop() expects a window or a state in a layer.
    """
    if operation == "activate_past_recording":
        return hasattr(layer, operation)
    return is_filled(layer)
