"""The kinds of a model's layers: what one layer returns shows what all of its kind return.

Rank 0 goes by that in the first pass of the others, and their ranks compare: a layer that differs
from its kind ends the pass with an error, and is asked itself from then on.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import nn

from drumline.contact.model_parts import number_attribute
from drumline.core.pytree import TreeSpec, iter_nodes

PLAIN = (bool, int, float, str, torch.dtype, type(None))
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
NO_CHANGE: TreeSpec = ("dict",)
"""What layers have put into a dict that they share."""


class KindOutput(NamedTuple):
    """Of layers of one kind: what they return for arguments of one form.

    filled: places, among the layers of the cache that a layer says are its own, of those it fills.
    counts_by_pass: see `proxy.grew_by_pass`; None if it filled none.
    """

    output: TreeSpec
    filled: tuple[int, ...]
    counts_by_pass: bool | None


class LayerKind:
    """Layers that differ in the values of their weights and in their number only."""

    def __init__(self) -> None:
        self.outputs: dict[Hashable, KindOutput] = {}  # by the form of the arguments

    def note(self, arguments: Hashable, output: KindOutput) -> None:
        """Take what one layer returned for that of all, unless a layer may say its own in it."""
        _, value, *changes = output.output
        may_differ = any(node[0] == "value" and node[1] is not None for node in iter_nodes(value))
        if not may_differ and {*changes} <= {NO_CHANGE}:
            self.outputs[arguments] = output


def kinds_of(modules: dict[str, nn.Module]) -> dict[str, LayerKind]:
    """The kind of each module, by its name. To be called before anything is put into them."""
    kinds: dict[Any, LayerKind] = {}
    return {
        name: kinds.setdefault(_description(module), LayerKind())
        for name, module in modules.items()
    }


def _description(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules of one kind: all that they are made of except the values of weights."""
    return tuple(
        (name, type(part), _settings(part), _weights(part)) for name, part in module.named_modules()
    )


def _settings(module: nn.Module) -> tuple[Any, ...]:
    own = vars(module)
    return tuple(
        (name, _setting(own[name]))
        for name in sorted(own.keys() - OF_EVERY_MODULE)
        if name != number_attribute()
    )


def _setting(value: Any) -> Any:
    """A setting, to be compared: an object is equal to itself only, such as the model's config."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return tuple(map(_setting, value))
    if type(value) is dict:
        return tuple((key, _setting(item)) for key, item in value.items())
    if isinstance(value, functools.partial):
        return (id(value.func), _setting(value.args), _setting(value.keywords))
    if isinstance(value, types.MethodType):
        return id(value.__func__)
    return (type(value), value.shape) if isinstance(value, torch.Tensor) else id(value)


def _weights(module: nn.Module) -> tuple[Any, ...]:
    named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return tuple((name, type(weight), weight.dtype, weight.shape) for name, weight in named)
