"""Verbs over weights: which stored tensors a model's own are made of, and who reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from drumline.contact import transformers_api as api

OPERATIONS = {"MergeModulelist": "stack", "Concatenate": "concatenate", "Chunk": "chunk"}
"""Classes of transformers whose operations only say where a tensor lies, and our verb for each.

All others compute, or are not known, and no subclass counts: what a tensor becomes is unknown.
"""

CPU = {"": "cpu"}
"""Whole models, as quantizers are told: a map with "meta" in it is refused by some."""


@dataclass(frozen=True)
class Operation:
    """A step from stored tensors to a model's. verb: None if it computes; kind: to name it."""

    verb: str | None
    kind: str
    dim: int = 0


@dataclass(frozen=True)
class Conversion:
    """The steps from the stored tensors of some patterns to the model's of others."""

    sources: Sequence[str]
    targets: Sequence[str]
    operations: Sequence[Operation]


class KeyMapping:
    """The names in a model of stored keys, by the tables that transformers has for its kind.

    state: the model's tensors by name.
    """

    def __init__(self, model: Any, state: Mapping[str, torch.Tensor]) -> None:
        self._prefix, self._state = model.base_model_prefix, state
        transforms = api.get_model_conversion_mapping(model)
        self._converters = [t for t in transforms if hasattr(t, "operations")]
        self._renamings = [t for t in transforms if not hasattr(t, "operations")]
        self._conversions = [
            Conversion(c.source_patterns, c.target_patterns, [*map(operation_of, c.operations)])
            for c in self._converters
        ]

    def rename(self, key: str) -> tuple[str, str | None]:
        """The name that a stored key has in the model, and the pattern of what converts it."""
        name, pattern = self._renamed(key, self._renamings, self._converters)
        if name not in self._state and key in self._state:
            return self._renamed(key, [], [])
        return name, pattern

    def _renamed(
        self, key: str, renamings: Sequence[Any], converters: Sequence[Any]
    ) -> tuple[str, str | None]:
        name, pattern = api.rename_source_key(key, renamings, converters, self._prefix, self._state)
        return name, pattern

    def conversion(self, patterns: Iterable[str]) -> Conversion:
        """The conversion of stored tensors that were renamed by these patterns."""
        return next(c for c in self._conversions if set(patterns) <= set(c.sources))


def operation_of(operation: Any) -> Operation:
    """Describe an operation of transformers, as far as it is one of OPERATIONS."""
    kind = type(operation).__name__
    verb, dim = OPERATIONS.get(kind), getattr(operation, "dim", 0)
    is_counted = getattr(operation, "num_shards_attribute", None) is not None
    if (verb == "stack" and dim != 0) or (verb == "chunk" and is_counted):
        verb = None
    return Operation(verb, kind, dim)


def natural_key(key: str) -> list[tuple[Any, ...]]:
    """A key for sorting the names of tensors by their numbers, as a list of modules has them."""
    parts: list[tuple[Any, ...]] = []
    for part in key.split("."):
        stem = part.rstrip("0123456789")
        number = part[len(stem) :]
        if number and not stem:
            parts.append((0, int(number)))
        else:
            parts.append((1, stem, *map(int, [number] if number else ())))
    return parts


def build_unfilled(
    cls: type[Any],
    config: Any,
    dtype: torch.dtype,
    match: Callable[[Any], tuple[Iterable[str], Iterable[str]]],
    **options: Any,
) -> tuple[Any, Mapping[str, Any]]:
    """A model with its weights on meta and computed buffers on the CPU, and a report.

    match(model): the names of tensors that nothing stored is for, which are made, and those of
        stored ones that are for nothing; the report has what transformers does not ignore of them.
    """

    def read(model: Any, *args: Any) -> Any:
        report = _empty_report()
        report.missing_keys, report.unexpected_keys = map(set, match(model))
        for tensor in model.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = True  # it will be
        return report, None

    return _load(cls, read, None, config=config, state_dict={}, dtype=dtype, **options)


def _empty_report() -> Any:
    """The report of transformers on a checkpoint that holds what the model has."""
    kinds = {"error_msgs": list, "conversion_errors": dict}
    names = [field.name for field in dataclasses.fields(api.LoadStateDictInfo)]
    return api.LoadStateDictInfo(**{name: kinds.get(name, set)() for name in names})


def load_placed(
    cls: type[Any],
    path: Any,
    stored: Mapping[str, Any],
    places: Mapping[str, str],
    dtype: torch.dtype,
    warns: bool,
    **options: Any,
) -> tuple[Any, Mapping[str, Any]]:
    """A model whose weights transformers reads to the device of their module, and a report.

    stored: by name, what it reads in place of all that is in the files.
    places: devices by module, the innermost of which counts, and "meta" for none. What is not
    stored is on the CPU. A shape that is another is in the report.
    warns: let transformers say which of the stored ones it did not use.
    """

    def read(model: Any, _: Any, files: Any, how: Any) -> Any:
        how = dataclasses.replace(how, device_map=dict(places))
        report, offloaded = cls._load_pretrained_model(model, dict(stored), files, how)
        if not warns:
            report.unexpected_keys = set()
        return report, offloaded

    return _load(cls, read, path, dtype=dtype, ignore_mismatched_sizes=True, **options)


def _load(
    cls: type[Any], read: Callable[..., Any], path: Any, **options: Any
) -> tuple[Any, Mapping[str, Any]]:
    """A model and the report on it, where `read` reads in place of transformers' own method.

    A subclass rather than a replaced method: nothing outside this call sees it. It keeps the name
    of `cls`, by which transformers looks things up.
    """
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    reading: Any = type(
        cls.__name__, (cls,), {**names, "_load_pretrained_model": staticmethod(read)}
    )
    model, report = reading.from_pretrained(
        path, device_map=dict(CPU), output_loading_info=True, **options
    )
    model.__class__ = cls
    return model, report


def _innermost(places: Mapping[str, str], name: str) -> str:
    """The device of the innermost module around a tensor that has one."""
    while name and name not in places:
        name = name.rpartition(".")[0]
    return places[name]


def place_buffers(model: nn.Module, places: Mapping[str, str]) -> None:
    """Move the buffers that were computed on the CPU to the device of their module."""
    moved: dict[int, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "cpu":
                device = _innermost(places, f"{prefix}.{key}" if prefix else key)
                module._buffers[key] = moved.setdefault(id(buffer), buffer.to(device))
