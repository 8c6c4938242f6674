"""A checkpoint as all ranks see it: the ranks that have the files, their index, and the config.

files, extra = share_index(coor, "checkpoint", lambda: range(coor.world_size))
print(files.readers)                            # by rank, the rank that reads the files for it
"""

from __future__ import annotations

import copy
import hashlib
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from coordinator import Coordinator
from drumline.checkpoint import safetensors_index
from drumline.checkpoint.config_files import code_digest, read_config, remote_class
from drumline.checkpoint.copy_check import CopyCheck, file_identity, group_by_copy
from drumline.checkpoint.model_tensors import WeightSources
from drumline.checkpoint.safetensors_index import Index
from drumline.contact.loading.configs import (
    config_from_fields,
    hoist_quantization,
    knows_model_type,
)
from drumline.contact.releases import installed
from drumline.core.consistency import check_same_on_all_ranks, run_and_share, run_on_all_ranks
from drumline.errors import CheckpointError, DrumlineError

log = logging.getLogger("drumline")


@dataclass(frozen=True)
class CheckpointFiles:
    """A folder, its index and config.

    readers: by rank, the rank that reads for it.
    copy_checks: compare the copies of all ranks in full; for as long as the model is in use.
    maps: let weights be pages of the files, where nothing has to be done to them.
    """

    path: Path
    index: Index
    readers: Sequence[int]
    config: Any = None
    copy_checks: tuple[CopyCheck, ...] = ()
    maps: bool = False

    @property
    def blind(self) -> list[int]:
        """The ranks that have no files."""
        return [rank for rank, reader in enumerate(self.readers) if reader != rank]

    def compared_by(self, rank: int) -> Path | None:
        """The path, on the one rank that compares tensors within the files for all."""
        return self.path if rank == self.readers[0] else None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it is to be loaded, the same on every rank.

    kind: the class of the model. generation: the settings beside it, None if there are none.
    adapter: the one that is merged into the weights while they are read, if any.
    """

    files: CheckpointFiles
    kind: type[Any]
    dtype: torch.dtype
    generation: Any = None
    adapter: Any = None

    @property
    def config(self) -> Any:
        return self.files.config

    def with_adapter(
        self, model: Any, sources: WeightSources
    ) -> tuple[WeightSources, CheckpointFiles]:
        """The pieces of the model's tensors, and the files they lie in, with the adapter's."""
        if self.adapter is None:
            return sources, self.files
        sources, index = self.adapter.merged(model, sources, self.files.index, self.dtype)
        return sources, replace(self.files, index=index)


def allow_code(coor: Coordinator, folder: Path) -> None:
    """Say which code of a checkpoint is going to run. Collective.

    Raises unless it is the same on every rank. The first rank of each node runs it first, for
    transformers copies it into a folder that the ranks of a node share.
    """
    files = ", ".join(file.name for file in sorted(folder.glob("*.py"))) or "no Python file"
    log.warning("rank %d: trust_remote_code=True runs the code of %s: %s", coor.rank, folder, files)
    check_same_on_all_ranks(coor, {"the code of the checkpoint": code_digest(folder)})
    run_on_all_ranks(coor, lambda: _run_code(folder) if coor.is_local_master() else None)


def _run_code(folder: Path) -> None:
    remote_class(folder, read_config(folder, adapter="", trust_remote_code=True))


def share_index(
    coor: Coordinator,
    path: str | Path,
    choose_readers: Callable[[], Sequence[int]],
    extra: Callable[[], Any] = lambda: None,
    read_index: Callable[[Path], Index] = safetensors_index.read_index,
) -> tuple[CheckpointFiles, Any]:
    """Share what rank 0 reads in the files, and the plain value that its `extra` makes. Collective.

    It takes one exchange, and one more where ranks do not open the very same files. Raises
    CheckpointError if a rank that reads finds other files, and on every rank the error that either
    function or the files raise on any.
    """
    folder, boot_id = Path(path), coor.peers[coor.rank].boot_id

    def read() -> tuple[Sequence[int], Index | None]:
        readers = choose_readers()
        return readers, read_index(folder) if readers[coor.rank] == coor.rank else None

    def summarize(result: tuple[Sequence[int], Index | None]) -> Any:
        readers, index = result
        text = None if index is None else safetensors_index.index_to_json(index)
        digest = None if text is None else hashlib.sha256(text).hexdigest()
        identity = None if index is None else file_identity(folder, index, boot_id)
        if coor.rank:
            return [digest, identity]
        is_needed = any(reader != rank for rank, reader in enumerate(readers))
        return [digest, identity, extra(), text if is_needed else None, uuid.uuid4().hex]

    (readers, index), summaries = run_and_share(coor, read, summarize)
    digest, _, extra_value, text, key = summaries[0]
    digests = [summary[0] for summary in summaries]
    if text is None and None in digests[1:]:
        raise DrumlineError(
            f"{coor.rank_name()}: {coor.rank_name(digests.index(None))} counts on the files "
            f"of {coor.rank_name(0)}, which plans that every rank reads its own; give "
            "every rank the same model, mesh and reader."
        )
    differ = [coor.ranks[n] for n, other in enumerate(digests) if other not in (None, digest)]
    if differ:
        raise CheckpointError(
            f"{coor.rank_name()}: ranks {differ} find other files in {path} than "
            f"{coor.rank_name(0)}, so the parts would not make one model; give every rank "
            'the same checkpoint, or read on one: reader="rank0".'
        )
    shared = safetensors_index.index_from_json(text) if index is None else index
    copies = group_by_copy([summary[1] for summary in summaries])
    copy_check = CopyCheck(coor, folder, shared, copies, f"copies {key}")
    copy_check.compare_at_once()
    return CheckpointFiles(folder, shared, readers, copy_checks=(copy_check,)), extra_value


def choose_config(stored: Any, user_config: Any) -> Any:
    """The config to build with: a copy of the user's if there is one, otherwise the stored one.

    The class and the dtype that the user's leaves open are those of the stored one.
    """
    if user_config is None:
        return hoist_quantization(stored)
    config = copy.deepcopy(user_config)
    for name in ("architectures", "dtype"):
        if getattr(config, name, None) is None:
            setattr(config, name, getattr(stored, name, None))
    return hoist_quantization(config)


def config_from_json(fields: Mapping[str, Any]) -> Any:
    """The config that another rank wrote as JSON."""
    model_type = fields["model_type"]
    if not knows_model_type(model_type):
        raise CheckpointError(
            f"transformers {installed('transformers')} does not know the model type {model_type!r},"
            " and this rank has no files with its code; copy the checkpoint to this rank too."
        )
    return config_from_fields(fields)
