"""Models that are named by their id on the Hub: the folder where their files are kept.

print(local_folder("Qwen/Qwen3-0.6B"))            # in the cache of huggingface_hub

Its cache, its token and HF_HUB_OFFLINE mean what they do everywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drumline.errors import CheckpointError

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
WEIGHTS, FILE = "*.safetensors", "model.safetensors"
PATTERNS = (WEIGHTS, "*.json", "*.jinja", "*.model", "*.txt", "*.py")
"""What a model is made of; other formats of the same weights stay where they are."""
COPIES = ("*/*.safetensors", "consolidated*.safetensors")
"""The same weights once more, by names that their makers' own code has: gpt-oss, Mistral."""


def is_hub_id(path: str | Path) -> bool:
    """True for `org/name` where no such folder is."""
    return bool(ID.fullmatch(str(path))) and not Path(path).exists()


def local_folder(path: str | Path, revision: str | None = None, gguf: str | None = None) -> Path:
    """The folder of a checkpoint on this machine; what the Hub alone has is downloaded first.

    revision: a branch, tag or commit of the Hub. gguf: the name of a GGUF file in it. Blocks until
    all files are there. Raises CheckpointError for what neither this machine nor the Hub has.
    """
    return _downloaded(path, revision, [gguf] if gguf else [*PATTERNS])


@contextlib.contextmanager
def folder_of_headers(
    path: str | Path, revision: str | None = None, gguf: str | None = None
) -> Iterator[Path]:
    """The folder of a checkpoint, of whose tensors only names and sizes are to be read.

    Weights that the Hub alone has are not downloaded, except a GGUF file: their files have a header
    and a hole. Arguments and errors are those of local_folder.
    """
    if gguf or not is_hub_id(path):
        yield local_folder(path, revision, gguf)
        return
    folder = _downloaded(path, revision, [name for name in PATTERNS if name != WEIGHTS])
    with _explained(path):
        index = folder / "model.safetensors.index.json"
        names = json.loads(index.read_bytes())["weight_map"].values() if index.exists() else {FILE}
        is_here = all((folder / name).exists() for name in names)
    if is_here:
        yield folder
        return
    with tempfile.TemporaryDirectory() as copy:
        for file in folder.iterdir():
            Path(copy, file.name).symlink_to(file.resolve())
        for name, tensors in _headers(str(path), folder.name).items():
            _write_header(Path(copy, name), tensors)
        yield Path(copy)


def _downloaded(path: str | Path, revision: str | None, patterns: list[str]) -> Path:
    if not is_hub_id(path):
        return Path(path)
    from huggingface_hub import snapshot_download  # not needed for a folder

    with _explained(path):
        folder = snapshot_download(
            str(path), revision=revision, allow_patterns=patterns, ignore_patterns=[*COPIES]
        )
    return Path(folder)


def _headers(path: str, commit: str) -> dict[str, dict[str, Any]]:
    """By file, what the header of a safetensors file says of each tensor."""
    from huggingface_hub import HfApi

    with _explained(path):
        files = HfApi().get_safetensors_metadata(path, revision=commit).files_metadata
    return {
        name: {tensor: dataclasses.asdict(info) for tensor, info in file.tensors.items()}
        for name, file in files.items()
    }


def _write_header(file: Path, tensors: dict[str, Any]) -> None:
    """Write a safetensors file whose tensors are a hole."""
    fields = ("dtype", "shape", "data_offsets")
    entries = {name: {field: info[field] for field in fields} for name, info in tensors.items()}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    end = max((info["data_offsets"][1] for info in entries.values()), default=0)
    with file.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        out.truncate(8 + len(header) + end)


@contextlib.contextmanager
def _explained(path: str | Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of httpx, too, for a connection that breaks
        why = textwrap.shorten(str(error), 300)
        raise CheckpointError(
            f"{path} is not a folder here, and the Hub does not give a model of this name "
            f"({type(error).__name__}: {why}); give the path of a folder, or an id that you may "
            "read (`hf auth login`), and see that HF_HUB_OFFLINE is not set."
        ) from error
