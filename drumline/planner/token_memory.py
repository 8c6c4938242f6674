"""The memory that tokens take beside the weights, seen in passes of the model on meta.

memory = token_memory(LlamaForCausalLM, config, torch.bfloat16, parts, batch=1, length=4096)
print(memory.kept["model.layers.0"])    # bytes of the cache of one layer
parts = with_tokens(parts, memory)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from coordinator import Coordinator, torch_private
from drumline.contact import caches
from drumline.contact.cache_layers import window_tokens
from drumline.contact.loading.configs import implementations_of, without_quantization
from drumline.contact.passes import text_inputs
from drumline.core.consistency import run_and_share
from drumline.core.device_map import ModelProfile, ModulePart
from drumline.core.meta_pass import LiveMemory, MetaPass, TooManyCalls
from drumline.errors import CheckpointError
from drumline.planner.model_profile import build_on_meta

log = logging.getLogger("drumline")

SHORT, LONGER = 8, 16
"""Tokens of two passes, by which a model that loops over its tokens is judged."""

GROWTH = 2
"""A pass with more calls of torch than this many times those of one of SHORT tokens has a loop."""


@dataclass(frozen=True)
class TokenMemory:
    """Bytes by part of a model, for a number of sequences with a number of tokens each.

    kept: from pass to pass, as keys and values, latents or states. active: at most, while the part
        runs over all of these tokens at once, with its result and what those before have left.
    error: why nothing is known.
    num_calls, prompt_calls: no bytes, but of functions of torch, in the pass of one token that
        follows them, and in theirs.
    """

    kept: dict[str, int] = field(default_factory=dict)
    active: dict[str, int] = field(default_factory=dict)
    num_calls: dict[str, int] = field(default_factory=dict)
    prompt_calls: dict[str, int] = field(default_factory=dict)
    error: str = ""

    def of_batch(self, batch: int, measured: int) -> TokenMemory:
        """With what `batch` sequences keep, of which `measured` are in a pass at a time."""
        kept = {name: -(-nbytes * batch // measured) for name, nbytes in self.kept.items()}
        return dataclasses.replace(self, kept=kept)

    def warning(self, kind: type[Any]) -> str:
        return (
            f"a pass of {kind.__name__} without weights failed ({self.error}), so the plan keeps "
            "no memory for its tokens; leave room for them with max_memory."
        )


@dataclass(frozen=True)
class _Key:
    """A class of models and a config, equal to others that build the same model."""

    kind: type[Any]
    text: str
    config: Any = field(compare=False)


def token_memory(
    kind: type[Any],
    config: Any,
    dtype: torch.dtype,
    parts: ModelProfile,
    batch: int,
    length: int,
    whole_on: str = "",
) -> TokenMemory:
    """The memory that `batch` times `length` tokens take in each part of a model.

    whole_on: the kind of device where a prompt is one pass; none if it is several over parts of it,
    whose masks and scores are small.

    A quantized model keeps what it keeps with plain weights. A model that loops over tokens runs
    over fewer of them, and what it needs is taken to grow by as much from token to token.
    """
    if not length:
        return TokenMemory()
    config = without_quantization(config)
    key = _Key(kind, config.to_json_string() + implementations_of(config), config)
    return _remembered(key, dtype, parts, batch, length, whole_on)


@functools.lru_cache(maxsize=8)
def _remembered(
    key: _Key,
    dtype: torch.dtype,
    parts: ModelProfile,
    batch: int,
    length: int,
    whole_on: str,
) -> TokenMemory:
    try:
        model = build_on_meta(key.kind, key.config, dtype).eval()
    except CheckpointError as error:
        return TokenMemory(error=str(error))
    return memory_of_model(model, parts, batch, length, whole_on)


def shared_token_memory(
    coor: Coordinator, kind: type[Any], measure: Callable[[], TokenMemory]
) -> TokenMemory:
    """The memory of tokens, which rank 0 alone measures, on every rank. Collective.

    Ranks of one host would wait for each other.
    """
    of_ranks = run_and_share(
        coor, lambda: measure() if coor.is_master() else TokenMemory(), dataclasses.asdict
    )[1]
    memory = TokenMemory(**of_ranks[0])
    if memory.error and coor.is_master():
        log.warning("rank 0: %s", memory.warning(kind))
    return memory


def memory_of_model(
    model: nn.Module, parts: ModelProfile, batch: int, length: int, whole_on: str
) -> TokenMemory:
    """As token_memory, for a model that is on meta already, which may be a shard of one."""
    try:
        return _run(_Passes(model, parts, batch, whole_on), length)
    except Exception as error:  # of the model's own code, which has nothing to compute with
        return TokenMemory(error=f"{type(error).__name__}: {error!s:.300}")


def with_tokens(parts: ModelProfile, memory: TokenMemory) -> ModelProfile:
    """The profile with what a pass takes: caches, logits in the part that makes them, and for each
    place the workspace of a layer."""

    def active(part: ModulePart) -> int:
        return memory.active.get(part.name, 0) + part.unpacked_nbytes

    workspace = max(map(active, parts.layers), default=0)

    def around(part: ModulePart) -> ModulePart:
        extra = max(0, active(part) - workspace)
        kept = memory.kept.get(part.name, 0)
        nbytes, unread = part.nbytes + extra + kept, part.unread_nbytes + extra
        return dataclasses.replace(
            part, nbytes=nbytes, unread_nbytes=unread, kept_nbytes=kept, unpacked_nbytes=0
        )

    def layer(part: ModulePart) -> ModulePart:
        kept = memory.kept.get(part.name, 0)
        return dataclasses.replace(part, nbytes=part.nbytes + kept, kept_nbytes=kept)

    parts = with_calls(parts, memory.num_calls)
    layers = tuple(map(layer, parts.layers))
    others = tuple(map(around, parts.others))
    return dataclasses.replace(parts, layers=layers, others=others, workspace_nbytes=workspace)


def with_calls(parts: ModelProfile, num_calls: Mapping[str, int]) -> ModelProfile:
    """The profile with the calls of functions that the code of each part makes in a pass."""

    def called(part: ModulePart) -> ModulePart:
        return dataclasses.replace(part, num_calls=num_calls.get(part.name, 0))

    layers, others = (tuple(map(called, each)) for each in (parts.layers, parts.others))
    return dataclasses.replace(parts, layers=layers, others=others)


def _run(passes: _Passes, length: int) -> TokenMemory:
    short = passes.run(SHORT)
    num_calls = passes.calls_of_next(short)
    try:
        last = passes.run(length, limit=GROWTH * short.shapes.num_calls)
        return TokenMemory(last.kept, last.active, num_calls, last.num_calls)
    except TooManyCalls:
        longer = passes.run(LONGER)
    kept, active, calls = {}, {}, {}
    for name in passes.names:
        num_kept = int(min(length, longer.windows.get(name, math.inf)))
        kept[name] = _grown(short.kept[name], longer.kept[name], num_kept)
        active[name] = _grown(short.active[name], longer.active[name], length)
        calls[name] = _grown(short.num_calls[name], longer.num_calls[name], length)
    return TokenMemory(kept, active, num_calls, calls)


def _grown(short: int, longer: int, num_tokens: int) -> int:
    """The bytes of a number of tokens, from those of SHORT and of LONGER ones."""
    return short + (longer - short) * (num_tokens - SHORT) // (LONGER - SHORT)


class _Passes:
    """Passes of a model, whose parts are watched."""

    def __init__(self, model: nn.Module, parts: ModelProfile, batch: int, whole_on: str):
        self.model, self.batch, self.whole_on = model, batch, whole_on
        self.layers = [part.name for part in parts.layers]
        self.names = [*self.layers, *(part.name for part in parts.others)]
        modules = dict(model.named_modules())
        self.modules = {name: modules[name] for name in self.names if name in modules}
        self.own_before = {name: _own_nbytes(module) for name, module in self.modules.items()}

    def calls_of_next(self, first: _WatchedPass) -> dict[str, int]:
        """The calls of each part for one more token, of which a loop has one turn; those of the
        first pass if the model takes its states in another way."""
        try:
            return self.run(1, states=first.states).num_calls
        except Exception:  # of the model's own code
            return first.num_calls

    def run(
        self, length: int, limit: float = math.inf, states: Mapping[str, Any] | None = None
    ) -> _WatchedPass:
        """One pass over `length` tokens. Raises TooManyCalls after `limit` calls of torch.

        states: of the pass before it.
        """
        inputs = {**text_inputs(self.model, self.batch, length), **(states or {})}
        watch = _WatchedPass(self.names, self.own_before, limit, self.whole_on)
        with contextlib.ExitStack() as stack:
            for name, module in self.modules.items():
                watch.hook(name, module, stack)
            stack.enter_context(torch.no_grad())
            stack.enter_context(watch.live)
            stack.enter_context(watch.shapes)
            output = self.model(**inputs)
        states = {n: value for n, value in output.items() if not isinstance(value, torch.Tensor)}
        watch.states = states
        rest = max(0, _nbytes(states) - sum(watch.nbytes_by_layer.values()))
        for name in self.layers if rest else ():
            watch.kept[name] += -(-rest // len(self.layers))
        return watch


class _WatchedPass:
    """One pass, in which it is seen by how much each part lets caches grow, and what is live.

    own_nbytes: of tensors that each part has as attributes. windows: the tokens that a part keeps
        at most, where it keeps a window of them. states: what the model is given for the next pass.
    """

    def __init__(
        self, names: Sequence[str], own_nbytes: Mapping[str, int], limit: float, whole_on: str
    ):
        self.shapes, self.live = MetaPass(limit, whole_on), LiveMemory()
        self.kept, self.active, self.num_calls = (dict.fromkeys(names, 0) for _ in range(3))
        self.own_nbytes, self.is_whole = dict(own_nbytes), bool(whole_on)
        self.windows: dict[str, float] = {}
        self.states: dict[str, Any] = {}
        self.nbytes_by_layer: dict[int, int] = {}
        self._live_before = self._kept_before = self._calls_before = 0

    def hook(self, name: str, module: nn.Module, stack: contextlib.ExitStack) -> None:
        def before(*_: Any) -> None:
            self._live_before = self.live.peak_nbytes = self.live.nbytes
            self._kept_before = sum(self.kept.values())
            self._calls_before = self.shapes.num_calls

        def after(_: Any, args: Any, options: dict[str, Any], __: Any) -> None:
            self.num_calls[name] += self.shapes.num_calls - self._calls_before
            beside = self._kept_before
            if not self.is_whole:  # a model may hold masks for other parts, too
                beside = self._live_before - _given_nbytes([args, options])
            self.active[name] = max(self.active[name], self.live.peak_nbytes - beside)
            own_nbytes = _own_nbytes(module)
            self.kept[name] += own_nbytes - self.own_nbytes[name]
            self.own_nbytes[name] = own_nbytes
            for cache in caches.iter_caches([args, options]):
                self._look(name, cache)

        stack.callback(module.register_forward_pre_hook(before).remove)
        stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)

    def _look(self, name: str, cache: Any) -> None:
        """Count what the part `name` has put into a cache."""
        own = {id(tensor) for layer in cache.layers for tensor in caches.held_tensors(layer)}
        beside = [tensor for tensor in caches.held_tensors(cache) if id(tensor) not in own]
        for layer in (*cache.layers, beside):
            key = id(cache) if layer is beside else id(layer)
            more = _nbytes(layer) - self.nbytes_by_layer.get(key, 0)
            if more:
                self.nbytes_by_layer[key] = self.nbytes_by_layer.get(key, 0) + more
                self.kept[name] += more
                self.windows[name] = max(self.windows.get(name, 0), window_tokens(layer))


def _given_nbytes(values: Any) -> int:
    """The bytes of what a part is given, except masks."""
    tensors = [leaf for leaf in torch_private.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    storages = {
        tensor.untyped_storage()
        for tensor in tensors
        if tensor.dim() != 4 or tensor.shape[-1] != tensor.shape[-2]
    }
    return sum(storage.nbytes() for storage in storages)


def _nbytes(state: Any) -> int:
    tensors = {id(tensor): tensor for tensor in caches.held_tensors(state)}
    return sum(tensor.nbytes for tensor in tensors.values() if tensor.dim())


def _own_nbytes(module: nn.Module) -> int:
    """The bytes of tensors that modules keep as attributes, as some do with states."""
    values = [value for each in module.modules() for value in vars(each).values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
