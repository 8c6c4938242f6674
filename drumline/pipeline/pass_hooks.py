"""The checks before, and the fetching after, each pass of a model with layers on other ranks.

install_hooks(model, {"model.layers.1": 1}, context)
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from coordinator import torch_private
from drumline.contact.cache_layers import is_filled
from drumline.contact.caches import Cache, iter_caches
from drumline.contact.loading.configs import attention_of, is_config
from drumline.contact.model_parts import is_model, may_return
from drumline.errors import DrumlineError, RefusedUse
from drumline.kv_cache.proxy import CacheProxy, is_own
from drumline.pipeline.lazy_tensor import LazyTensor, fetch_all, fetch_input

NO_PASS: Any = (lambda: None), ()

UnrecordedOutputs = list[tuple[str, str, int]]
"""The name of an output, and a part, with its rank, where transformers would record it."""


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
            filled = filter(_came_filled, iter_caches((args, kwargs)))
            self._pass = weakref.ref(model), tuple(map(weakref.ref, filled))
            self.loses_gradient = False
        if "output_hidden_states" in kwargs:
            self.wants_hidden_states = bool(kwargs["output_hidden_states"])
        for tensor in (*args[:1], kwargs.get("inputs_embeds"), kwargs.get("input_ids")):
            if isinstance(tensor, torch.Tensor) and tensor.dim() in (2, 3):
                self.shape = tensor.shape[0], tensor.shape[1]

    def end(self, model: Any) -> None:
        if self._pass[0]() is model:
            self._pass = NO_PASS

    def __deepcopy__(self, memo: Any) -> PassContext:
        return self

    def came_empty(self, cache: Cache) -> bool:
        """True if this thread is in a pass, and the cache was empty when that began."""
        outermost, filled = self._pass
        return outermost() is not None and all(cache is not reference() for reference in filled)


def _came_filled(cache: Cache) -> bool:
    """True if a cache that is not known to other ranks yet holds tokens, or a state."""
    if isinstance(cache, CacheProxy):
        return False
    return (is_own(cache) and len(cache) > 0) or any(map(is_filled, cache.layers))


class PassChecks:
    """Checks of each pass of a model with remote layers, before it begins.

    The attention implementations of these layers cannot change after loading: masks are made here
    in the form that an implementation takes, so a mixture would be wrong.
    """

    half_changed: DrumlineError | None = None
    """Why a pass was refused that had begun to change the layers."""

    def __init__(self, layers: Mapping[str, nn.Module]):
        self._loaded: dict[int, tuple[Any, str | None, str]] = {}
        for name, layer in layers.items():
            for part in layer.modules():
                config = getattr(part, "config", None)
                if is_config(config):
                    self._loaded.setdefault(id(config), (config, attention_of(config), name))

    def __deepcopy__(self, memo: Any) -> PassChecks:
        return self

    def accept(self) -> None:
        """Take what they are now for what they were: the ranks know of it."""
        self._loaded = {
            key: (config, attention_of(config), name)
            for key, (config, _, name) in self._loaded.items()
        }

    def check(self, module: nn.Module, kwargs: Mapping[str, Any]) -> None:
        """Raise DrumlineError for a pass of a model whose results would be wrong."""
        if self.half_changed is not None:
            raise DrumlineError(
                f"{self.half_changed} A pass that began with it has changed the layers before "
                "this one already, so load the model again."
            )
        for output in ("attentions", "router_logits"):
            name = f"output_{output}"
            if is_requested(name, module, kwargs) and may_return(module, output):
                raise RefusedUse(
                    f"rank 0: {name}=True, but these are made inside the layers and do not leave "
                    f"their ranks, so some would be missing; pass {name}=False or set it so in "
                    "model.config, or load the model on one rank."
                )
        for config, loaded, name in self._loaded.values():
            now = attention_of(config)
            if now != loaded:
                raise RefusedUse(
                    f"rank 0: the attention of {name} was changed from {loaded} to {now} after "
                    "loading, of which the rank that runs it knows nothing, so masks would not be "
                    f"those that it takes; load the model with attn_implementation={now!r}, or "
                    f"set it back to {loaded!r}."
                )


def is_requested(name: str, module: Any, kwargs: Any) -> bool:
    """True if a pass of a model is asked for an output, by an argument or its config."""
    setting = kwargs.get(name)
    config = getattr(module, "config", None)
    return bool(getattr(config, name, False) if setting is None else setting)


def install_hooks(
    model: nn.Module,
    remote: Mapping[str, int],
    context: PassContext,
    unrecorded: UnrecordedOutputs,
) -> None:
    """Have the models around remote layers return plain tensors to the user.

    Local modules with weights, such as a norm behind remote layers, are given plain ones: an
    operation on a lazy tensor takes longer. Modules without weights may hand it on as it is, and
    tables of embeddings come before remote layers."""
    checks = PassChecks({name: model.get_submodule(name) for name in remote})
    model._pass_checks = checks  # type: ignore[assignment]

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        checks.check(module, kwargs)
        context.begin(module, args, kwargs)

    def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        context.end(module)
        if output is None:  # the pass failed
            return None
        fetched = _fetch_output(output, context.loses_gradient)
        _refuse_unrecorded(unrecorded, model, module, kwargs)
        return fetched

    dotted = {name[:at] for name in remote for at, letter in enumerate(name) if letter == "."}
    around = dotted | {""} if remote else dotted
    for name, module in model.named_modules():
        if name in remote or isinstance(module, nn.Embedding):
            continue
        if name in around:
            module.register_forward_pre_hook(begin, with_kwargs=True)
            module.register_forward_hook(end, with_kwargs=True, always_call=True)
        elif name.rpartition(".")[0] in around and any(True for _ in module.parameters()):
            module.register_forward_pre_hook(fetch_input)


def _refuse_unrecorded(
    unrecorded: UnrecordedOutputs, model: nn.Module, module: nn.Module, kwargs: Any
) -> None:
    """Raise for outputs that transformers records in a part of a layer, as hidden states of Zamba.

    After the pass, for it says where it records in the first one that is asked for any.
    """
    keys = dict.fromkeys(key for key, _, _ in unrecorded)
    requested = [key for key in keys if is_requested(f"output_{key}", module, kwargs)]
    for key, part, rank in unrecorded if requested else ():
        if key in requested and _recorder(model, part) is module:
            raise DrumlineError(
                f"rank 0: output_{key}=True, but this model makes them inside of layers, as in "
                f"{part} on rank {rank}, so some would be missing; pass output_{key}=False, or "
                "load the model on one rank."
            )


def _recorder(model: nn.Module, part: str) -> nn.Module:
    """The innermost model around a part, whose output it would go into."""
    while part:
        part = part.rpartition(".")[0]
        if is_model(model.get_submodule(part)):
            break
    return model.get_submodule(part)


def _fetch_output(output: Any, loses_gradient: bool) -> Any:
    if torch.is_grad_enabled():
        forbid = functools.partial(_forbid_gradient, is_due=loses_gradient)
        return torch_private.tree_map(forbid, fetch_all(output))
    return fetch_all(output) if _has_lazy(output) else None


def _has_lazy(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_has_lazy(item) for item in value)
    if isinstance(value, dict):
        return any(_has_lazy(item) for item in value.values())
    return isinstance(value, LazyTensor)


def _forbid_gradient(value: Any, is_due: bool) -> Any:
    """A tensor whose gradient, if one is asked for, is an error rather than half of the truth.

    is_due: on one rank it would have one even if it requires none here.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if is_due and value.is_floating_point() and not value.requires_grad:
        value = value.detach().requires_grad_()
    return _NoGradient.apply(value) if value.requires_grad else value  # type: ignore[no-untyped-call]


class _NoGradient(torch.autograd.Function):
    """Not a hook on a view, which what is written into that later would leave aside."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise DrumlineError(
            "rank 0: no gradient comes back from layers on other ranks, so this one would be "
            "wrong; use the distributed model for inference only, under torch.no_grad()."
        )
