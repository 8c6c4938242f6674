"""Loads one rank's part of a checkpoint, through transformers' own reading and renaming of keys.

A loader that matched key prefixes would be wrong wherever transformers renames, splits or fuses
tensors (the experts of Mixtral, for one), so the reading stays with `from_pretrained`; it is only
told that everything which belongs to another rank is to stay on meta.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import CheckpointError

_building = threading.Lock()
"""transformers sets torch's default dtype and replaces functions of torch while it builds a model,
for the whole process: ranks that are threads take turns."""


def load_shard(
    cls: type[Any], path: str | Path, places: Mapping[str, str], dtype: torch.dtype, **options: Any
) -> Any:
    """A model with the modules in `places` loaded on their devices, and all others on meta."""
    _refuse_pickles(Path(path))
    with _building:
        model, report = _sharded(cls, dict(places)).from_pretrained(
            path, dtype=dtype, device_map={"": "cpu"}, output_loading_info=True, **options
        )
    _check(path, report)
    model.__class__ = cls
    return model


def _sharded(cls: type[Any], places: dict[str, Any]) -> type[Any]:
    """`cls`, reading with the device map `places` where it believes that it reads everything.

    A subclass rather than a replaced function: nothing outside this call sees it. It keeps the name
    of `cls`, which transformers uses to look things up.
    """

    def own(config: Any) -> Any:
        return dataclasses.replace(config, device_map=places)

    def read(model: Any, state_dict: Any, files: Any, config: Any, *rest: Any) -> Any:
        return cls._load_pretrained_model(model, state_dict, files, own(config), *rest)

    def finish(model: Any, config: Any, report: Any) -> Any:
        return cls._finalize_model_loading(model, own(config), report)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    methods = {
        "_load_pretrained_model": staticmethod(read),
        "_finalize_model_loading": staticmethod(finish),
    }
    return type(cls.__name__, (cls,), {**names, **methods})


def device_map_of(model: nn.Module, own: Mapping[str, str]) -> dict[str, str]:
    """`own` completed so that it covers the whole model, with meta for what other ranks hold."""
    return {"": "meta", **own}


def _refuse_pickles(path: Path) -> None:
    if any(path.glob("*.safetensors")) or not path.is_dir():
        return
    pickles = sorted(file.name for file in path.glob("*.bin"))
    if pickles:
        raise CheckpointError(
            f"{path} holds {', '.join(pickles)}, pickles that would run whatever code is in them; "
            "convert once, "
            f'where you trust the file: python -c "from transformers import AutoModel as A; '
            f"A.from_pretrained('{path}').save_pretrained('{path}')\""
        )
    raise CheckpointError(
        f"{path} holds no .safetensors file, so there is nothing to load; check the path."
    )


def _check(path: str | Path, report: Mapping[str, Any]) -> None:
    for kind in ("missing", "unexpected", "mismatched"):
        keys = report.get(f"{kind}_keys")
        if keys:
            names = ", ".join(sorted(str(key) for key in keys)[:5])
            raise CheckpointError(
                f"{path}: {len(keys)} tensors are {kind} ({names}), so the model would not be the "
                "one that was "
                "saved; load the checkpoint that belongs to its config.json."
            )
