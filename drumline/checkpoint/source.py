"""A checkpoint as all ranks see it: who has the files, what is in them, and the config.

source = find(coor, "checkpoint")       # the same answer on every rank, or one error on all
print(source.readers)                   # by rank, the rank that reads the files for it
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from coordinator import Coordinator
from drumline.checkpoint.empty_model import read_config
from drumline.checkpoint.safetensors_index import Index
from drumline.checkpoint.shard_loader import share_index, together
from drumline.errors import CheckpointError


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint. `readers`: by rank, the rank that reads for it: itself, or the master."""

    path: Path
    config: Any
    index: Index
    readers: Sequence[int]

    @property
    def blind(self) -> list[int]:
        """The ranks that have no files."""
        return [rank for rank, reader in enumerate(self.readers) if reader != rank]


def find_checkpoint(coor: Coordinator, path: str | Path) -> CheckpointSource:
    """The checkpoint at `path`, where all ranks that have the files must have the same. Collective.

    Ranks without files are served by the master. Raises CheckpointError on every rank if the master
    has none, or if any file is not whole.
    """
    folder = Path(path)
    has_files = coor.allgather(b"yes" if _holds_weights(folder) else b"")
    readers = [rank if has else 0 for rank, has in enumerate(has_files)]
    reads = readers[coor.rank] == coor.rank
    config = together(coor, lambda: read_config(folder) if reads else None)
    told = coor.broadcast(_to_json(config) if coor.is_master() else None)
    config = together(coor, lambda: config or config_from_json(json.loads(told)))
    files, _ = share_index(coor, folder, lambda: readers)
    return CheckpointSource(folder, config, files.index, readers)


def choose_config(found: Any, given: Any) -> Any:
    """The config to build with: a copy of the one the user gives, or the one that was found. What
    the given one leaves open, which class and which dtype, is as found."""
    if given is None:
        return found
    config = copy.deepcopy(given)
    for name in ("architectures", "dtype"):
        if getattr(config, name, None) is None:
            setattr(config, name, getattr(found, name, None))
    return config


def _holds_weights(folder: Path) -> bool:
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]
    return bool(weights) and (folder / "config.json").is_file()


def _to_json(config: Any) -> bytes:
    return str(config.to_json_string(use_diff=False)).encode()


def config_from_json(found: Mapping[str, Any]) -> Any:
    """The config that another rank wrote as JSON, which has no infinity of its own."""
    kind = found["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"transformers {transformers.__version__} does not know the model type {kind!r}, and "
            "this rank has no files with the code of it; copy the checkpoint to this rank too."
        )
    plain = transformers.PreTrainedConfig._decode_special_floats(found)
    return transformers.CONFIG_MAPPING[kind].from_dict(plain)
