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
import transformers

from inference.errors import CheckpointError
from inference.safetensors_index import read_index

_building = threading.Lock()
"""transformers sets torch's default dtype and replaces functions of torch while it builds a model,
for the whole process: ranks that are threads take turns."""


def load_shard(
    cls: type[Any], path: str | Path, places: Mapping[str, str], dtype: torch.dtype, **options: Any
) -> Any:
    """A model with the modules in `places` loaded on their devices, and all others on meta."""
    with _building:
        model, report = _sharded(cls, dict(places)).from_pretrained(
            path,
            dtype=dtype,
            device_map={"": "cpu"},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, and an error below
            **options,
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


def read_config(path: str | Path) -> Any:
    """The config of a checkpoint, once its files are seen to be whole."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} holds no config.json, so there is no model in it; give the directory that "
            "save_pretrained() wrote, or that a download of the model ended in."
        )
    _refuse_pickles(folder)
    read_index(folder)
    return transformers.AutoConfig.from_pretrained(folder)


def _refuse_pickles(folder: Path) -> None:
    pickles = sorted(file.name for file in folder.glob("*.bin"))
    if pickles and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} holds {', '.join(pickles)}, pickles that would run whatever code is in "
            "them; convert once, where you trust the file: "
            'python -c "from transformers import AutoModel as A; '
            f"A.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )


def _check(path: str | Path, report: Mapping[str, Any]) -> None:
    """Raise unless checkpoint and model have the same tensors."""
    for kind in ("missing", "unexpected", "mismatched"):
        keys = [key if isinstance(key, str) else key[0] for key in report.get(f"{kind}_keys") or ()]
        if keys:
            index = read_index(path)
            places = [f"{key} in {index[key].file}" if key in index else key for key in keys]
            raise CheckpointError(
                f"{path}: {len(keys)} tensors are {kind} ({', '.join(sorted(places)[:5])}), so "
                "the model would not be the one that was saved; give the checkpoint that belongs "
                "to its config.json."
            )
