"""The profile of a transformers model on meta: its layers, their sizes and ties."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from drumline.contact.loading import models
from drumline.contact.releases import installed
from drumline.core.device_map import ModelProfile, ModulePart
from drumline.core.meta_init import init_on_meta, model_building
from drumline.core.packed_tensor import PackedTensor
from drumline.errors import CheckpointError

TensorNbytes = Callable[[str, torch.Tensor], int]
"""The bytes that a tensor of a name takes."""

KV_SHARING_FLAGS = ("is_kv_shared_layer", "store_full_length_kv")
"""Attributes in transformers of modules that take or leave other layers' keys and values."""


def model_class(config: Any) -> type[Any]:
    """The class that wrote the checkpoint, by its name in config.json; otherwise by its type.

    Raises CheckpointError where there is none, or the two contradict each other.
    """
    names = getattr(config, "architectures", None) or []
    for name in names if isinstance(names, list) else []:
        cls = models.model_class_named(str(name))
        if cls is not None and not models.is_made_for(cls, config):
            raise CheckpointError(
                f"config.json names the architecture {name} and the type {config.model_type!r}, "
                "which do not belong together, so it is unknown which model was saved; take the "
                "config.json that was saved with these files."
            )
        if cls is not None:
            return cls
    if cls := models.model_class_of(config):
        return cls
    raise CheckpointError(
        f"config.json names the architectures {names} and the type {config.model_type!r}, and "
        f"transformers {installed('transformers')} has no model for them; pass the class as cls=."
    )


def build_on_meta(cls: type[Any], config: Any, dtype: torch.dtype) -> Any:
    """The model on meta: names, shapes and ties, and no weights."""
    with model_building(cls), init_on_meta():
        return models.build(cls, config, dtype).to("meta")  # torch.FloatTensor() is never there


def build_as_kept(
    cls: type[Any], config: Any, dtype: torch.dtype, quantization_config: Any = None
) -> tuple[Any, TensorNbytes]:
    """The model on meta, and the bytes of its tensors, as transformers keeps them: quantized, where
    the config or the user's quantization_config says so and this machine can.

    Raises CheckpointError where a package for it is missing.
    """
    own = copy.deepcopy(config)
    with model_building(cls):
        quantizer, own = models.quantizer_of(own, quantization_config)
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    if quantizer is None or method == "compressed-tensors":  # which decompresses before it computes
        model = build_on_meta(cls, config, dtype)
        return model, _nbytes_as_loaded(model, dtype)
    model = build_on_meta(cls, own, quantizer.update_dtype(dtype))
    with model_building(cls), init_on_meta():
        models.quantize_empty(quantizer, model, dtype)

    def nbytes(name: str, tensor: torch.Tensor) -> int:
        return int(tensor.numel() * quantizer.param_element_size(model, name, tensor))

    return model, nbytes


def _nbytes_as_loaded(model: Any, dtype: torch.dtype) -> TensorNbytes:
    """The bytes of tensors that are loaded in `dtype`, except those that the model wants wider."""
    dtype_of = models.dtype_plan(model, dtype)

    def nbytes(name: str, tensor: torch.Tensor) -> int:
        wide = None if isinstance(tensor, PackedTensor) else dtype_of(name)
        return tensor.nbytes if wide is None else tensor.numel() * wide.itemsize

    return nbytes


def nbytes_of_tensor(name: str, tensor: torch.Tensor) -> int:
    return tensor.nbytes


def profile_model(
    model: nn.Module,
    no_split_module_classes: Collection[str] | str | None = None,
    names: Collection[str] | None = None,
    tensor_nbytes: TensorNbytes = nbytes_of_tensor,
    stored: Collection[str] = (),
) -> ModelProfile:
    """The profile of a model, which may be on meta.

    no_split_module_classes: names of classes whose modules stay whole; those that the model names
        if not given. A model that names none is split between the entries of its lists of modules,
        or its children.
    names: of the modules that are to stay whole, instead.
    tensor_nbytes: how much memory a tensor takes, where that is not its size on meta.
    stored: the names of tensors in the files. Tied ones that are both there are loaded both.
    """
    layers = list(layer_names(model, no_split_module_classes) if names is None else names)
    others = list(_around(model, "", set(layers)))
    sizes = _sizes(model, [*others, *layers], tensor_nbytes, stored)
    counts = _sizes(model, [*others, *layers], lambda _, tensor: tensor.numel(), stored)
    tensors = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    ties = tuple(_ties(model, [*others, *layers]))
    bound = {name for tie in ties if not {*layers}.issuperset(tie) for name in tie}
    others += [name for name in layers if name in bound]  # such as embeddings, tied to a head
    layers = [name for name in layers if name not in bound]
    modules = dict(model.named_modules())

    def part(name: str, unread_nbytes: int, unread_share: float = 1) -> ModulePart:
        return ModulePart(
            name,
            sizes[name],
            unread_nbytes,
            unpacked_nbytes=_unpacked_nbytes(modules[name]) if name in modules else 0,
            unread_share=unread_share,
            weights_a_byte=counts[name] / max(1, sizes[name]),
        )

    return ModelProfile(
        layers=tuple(part(name, *_unread_experts(model, name)) for name in layers),
        others=tuple(part(name, _unread(model, modules.get(name))) for name in others),
        ties=ties,
        kv_sharing=tuple(_sharers(model, layers)),
        root_tensors=tuple(name for name in others if name in tensors),
    )


def _unpacked_nbytes(module: nn.Module) -> int:
    """The bytes that a part needs for a moment to unpack the largest of its weights, if it does."""
    sizes = [0]
    for owner in module.modules():
        for tensor in owner.parameters(recurse=False):
            if isinstance(tensor, PackedTensor) and not isinstance(owner, nn.Embedding):
                is_taken_singly = tensor.dim() == 3 and models.runs_experts_singly(owner)
                num_elements = tensor.numel() // (len(tensor) if is_taken_singly else 1)
                sizes.append(num_elements * tensor.element_size())
    return max(sizes)


def layer_names(
    model: nn.Module, no_split_module_classes: Collection[str] | str | None = None
) -> Iterator[str]:
    """The outermost modules that must not be split, in the order they were registered."""
    classes = no_split_module_classes or models.whole_classes(model)
    kinds = {classes} if isinstance(classes, str) else set(classes)
    if not kinds:
        yield from _entries(model)
        return
    names = [n for n, m in model.named_modules() if type(m).__name__ in kinds and _has_weights(m)]
    if not names and no_split_module_classes:  # of another kind of model
        yield from layer_names(model)
        return
    entries = {
        f"{name}.{key}"
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for key in range(len(module))
    }
    whole = dict.fromkeys(_entry_around(name, entries) for name in names)
    yield from (name for name in whole if not is_inside(name, whole))


def _entry_around(name: str, entries: Collection[str]) -> str:
    """The innermost entry of a list of modules that holds the module, otherwise itself.

    Some models name only the attention of a layer; splitting there would double the hops.
    """
    around = name
    while around and around not in entries:
        around = around.rpartition(".")[0]
    return around or name


def is_inside(name: str, others: Collection[str]) -> bool:
    """True if the module is a part of one of the others."""
    return any(name.startswith(f"{outer}.") for outer in others if outer)


def _entries(model: nn.Module) -> Iterator[str]:
    """The modules in the lists of a model that names no layers; its children without a list."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    outer: dict[str, nn.Module] = {n: m for n, m in lists.items() if not is_inside(n, lists)}
    for name, module in (outer or {"": model}).items():
        yield from _called(module, f"{name}." if name else "")


def _called(module: nn.Module, prefix: str) -> Iterator[str]:
    """The children with weights; in place of a list, whose entries are called, its entries."""
    for key, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called(child, f"{prefix}{key}.")
        elif _has_weights(child):
            yield f"{prefix}{key}"


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _around(module: nn.Module, prefix: str, layers: set[str]) -> Iterator[str]:
    """The largest modules, and tensors outside of modules, that hold no layer."""
    for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        yield f"{prefix}{name}"
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if full in layers:
            continue
        is_list = type(child) in (nn.ModuleList, nn.ModuleDict)  # whose entries are called
        if is_list or any(layer.startswith(f"{full}.") for layer in layers):
            yield from _around(child, f"{full}.", layers)
        else:
            yield full


def part_of_tensor(tensor_name: str, parts: set[str]) -> str:
    """The part that a parameter or buffer belongs to."""
    prefix = tensor_name
    while prefix and prefix not in parts:
        prefix = prefix.rpartition(".")[0]
    return prefix


def _sizes(
    model: nn.Module, parts: list[str], tensor_nbytes: TensorNbytes, stored: Collection[str]
) -> dict[str, int]:
    sizes = dict.fromkeys(parts, 0)
    part_names = set(parts)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    both = {name for name, source in tied.items() if name in stored and source in stored}
    every_name = model.named_parameters(remove_duplicate=False)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    tensors |= {name: tensor for name, tensor in every_name if name in both}
    for name, tensor in tensors.items():
        if name in both or name not in tied:
            sizes[part_of_tensor(name, part_names)] += tensor_nbytes(name, tensor)
    return sizes


def _unread(model: nn.Module, module: nn.Module | None) -> int:
    """The bytes of a table of embeddings, unless a head multiplies with it too."""
    heads = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    if not isinstance(module, nn.Embedding) or id(module.weight) in heads:
        return 0
    return module.weight.nbytes


def _unread_experts(model: nn.Module, name: str) -> tuple[int, float]:
    """The bytes of the experts that a token does not go to, and their share of all; transformers
    stacks a layer's."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else None
    num_active = getattr(text, "num_experts_per_tok", None)
    if not isinstance(num_active, int):
        return 0, 1
    unread_nbytes = experts_nbytes = 0
    for module in model.get_submodule(name).modules():
        num_experts = getattr(module, "num_experts", 0)
        for tensor in module.parameters(recurse=False):
            if tensor.dim() == 3 and tensor.shape[0] == num_experts > num_active:
                num_unread = num_experts - num_active
                unread_nbytes += tensor.nbytes * num_unread // num_experts
                experts_nbytes += tensor.nbytes
    return unread_nbytes, unread_nbytes / max(1, experts_nbytes)


def _sharers(model: nn.Module, layers: list[str]) -> Iterator[tuple[str, ...]]:
    """Groups of layers that pass keys and values to each other with every token."""
    stacks: dict[str, list[str]] = {}
    for name in layers:
        modules = model.get_submodule(name).modules()
        if any(getattr(m, flag, None) is True for m in modules for flag in KV_SHARING_FLAGS):
            stacks.setdefault(name.rpartition(".")[0], []).append(name)
    yield from (tuple(names) for names in stacks.values() if len(names) > 1)


def _ties(model: nn.Module, parts: list[str]) -> Iterator[tuple[str, ...]]:
    """Groups of parts that share a parameter, each group once."""
    names = set(parts)
    groups: list[set[str]] = []
    for target, source in _tied_names(model):
        pair = {part_of_tensor(target, names), part_of_tensor(source, names)}
        for group in [group for group in groups if group & pair]:
            groups.remove(group)
            pair |= group
        groups.append(pair)
    for group in groups:
        if len(group) > 1:
            yield tuple(part for part in parts if part in group)


def _tied_names(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Pairs of names of one parameter, as transformers declares them or as the module has them."""
    yield from (getattr(model, "all_tied_weights_keys", None) or {}).items()
    first: dict[int, str] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(tensor), name) != name:
            yield name, first[id(tensor)]


def hidden_width(config: Any) -> int:
    """The elements of a token's hidden state."""
    return int(getattr(config.get_text_config(decoder=True), "hidden_size", 0))


def decode_profile(model: Any, parts: ModelProfile) -> ModelProfile:
    """The profile of the parts that each new token passes, without those for prompts: encoders."""
    if not model.can_generate():
        return parts
    passed = {*(model.get_decoder() or model).modules(), model.get_output_embeddings()}
    names = {n for n, m in model.named_modules() if not passed.isdisjoint(m.modules())}
    layers = tuple(part for part in parts.layers if part.name in names)
    if not layers:  # what some models name so is their head
        return parts
    others = tuple(part for part in parts.others if part.name in names)
    return dataclasses.replace(parts, layers=layers, others=others)
