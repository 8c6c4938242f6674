"""The Layout of a transformers model on meta: its layers, their sizes, what is tied."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn

from inference.errors import CheckpointError
from inference.plan import Layout, Part


def model_class(config: Any) -> type[Any]:
    """The class that wrote the checkpoint, by its name in config.json."""
    names = getattr(config, "architectures", None) or []
    for name in names:
        found = getattr(transformers, name, None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    raise CheckpointError(
        f"config.json names the architectures {names}, none of which transformers "
        f"{transformers.__version__} has, so no model can be built; pass the class as cls=."
    )


def skeleton(cls: type[Any], config: Any, dtype: torch.dtype) -> Any:
    """The model on meta: names, shapes and ties, and no weights."""
    with torch.device("meta"):
        return cls._from_config(config, dtype=dtype)


def layout(model: nn.Module) -> Layout:
    layers = list(layer_names(model))
    others = list(_around(model, "", set(layers)))
    sizes = _sizes(model, [*others, *layers])
    return Layout(
        layers=tuple(Part(name, sizes[name]) for name in layers),
        others=tuple(Part(name, sizes[name]) for name in others),
        ties=tuple(_ties(model, [*others, *layers])),
        sharers=tuple(_sharers(model, layers)),
    )


def layer_names(model: nn.Module) -> Iterator[str]:
    """The outermost modules that must not be cut, in the order they were registered."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    taken: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in taken)
        if (
            type(module).__name__ in kinds
            and not inside
            and next(module.parameters(), None) is not None
        ):
            taken.append(name)
            yield name


def _around(module: nn.Module, prefix: str, layers: set[str]) -> Iterator[str]:
    """The largest modules, and loose tensors, that hold no layer."""
    for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        yield f"{prefix}{name}"
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if full in layers:
            continue
        if any(layer.startswith(f"{full}.") for layer in layers):
            yield from _around(child, f"{full}.", layers)
        else:
            yield full


def owner_of(tensor_name: str, parts: set[str]) -> str:
    """The part that a parameter or buffer belongs to."""
    prefix = tensor_name
    while prefix and prefix not in parts:
        prefix = prefix.rpartition(".")[0]
    return prefix


def _sizes(model: nn.Module, parts: list[str]) -> dict[str, int]:
    sizes = dict.fromkeys(parts, 0)
    known = set(parts)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in tied:
            sizes[owner_of(name, known)] += tensor.numel() * tensor.element_size()
    return sizes


def _sharers(model: nn.Module, layers: list[str]) -> Iterator[tuple[str, ...]]:
    """Layers that hand keys and values to each other, which would cross with every token."""
    stacks: dict[str, list[str]] = {}
    for name in layers:
        if any(_shares(module) for module in model.get_submodule(name).modules()):
            stacks.setdefault(name.rpartition(".")[0], []).append(name)
    yield from (tuple(names) for names in stacks.values() if len(names) > 1)


def _shares(module: nn.Module) -> bool:
    flags = ("is_kv_shared_layer", "store_full_length_kv")
    return any(getattr(module, flag, False) is True for flag in flags)


def _ties(model: nn.Module, parts: list[str]) -> Iterator[tuple[str, ...]]:
    """Groups of parts that share a parameter, each group once."""
    known = set(parts)
    groups: list[set[str]] = []
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        pair = {owner_of(target, known), owner_of(source, known)}
        for group in [group for group in groups if group & pair]:
            groups.remove(group)
            pair |= group
        groups.append(pair)
    for group in groups:
        if len(group) > 1:
            yield tuple(part for part in parts if part in group)


def cache_nbytes(config: Any, dtype: torch.dtype, batch: int, length: int) -> int:
    """What the keys and values of one layer take at most, for `batch` times `length` tokens."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * batch * length * heads * width * dtype.itemsize)


def with_cache(model: Layout, nbytes: int) -> Layout:
    """The same layout with room for so many bytes of cache beside each layer."""
    layers = tuple(Part(part.name, part.nbytes + nbytes) for part in model.layers)
    return dataclasses.replace(model, layers=layers)
