"""Models that are named by their id on the Hub: the folder where their files are kept.

print(local_folder("Qwen/Qwen3-0.6B"))            # in the cache of huggingface_hub

Its cache, its token and HF_HUB_OFFLINE mean what they do everywhere.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from drumline.errors import CheckpointError

ID = re.compile(
    r"[A-Za-z0-9][\w.-]*/[\w.-]+|(?!.*\.(gguf|safetensors|json|bin)$)[A-Za-z0-9][\w.-]*"
)
WEIGHTS = "*.safetensors"
PATTERNS = (WEIGHTS, "*.json", "*.jinja", "*.model", "*.txt", "*.py")
"""What a model is made of; other formats of the same weights stay where they are."""
COPIES = ("*/*.safetensors", "consolidated*.safetensors")
"""The same weights once more, by names that their makers' own code has: gpt-oss, Mistral."""
DOWNLOAD_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token")
"""Those of from_pretrained that say how files come from the Hub."""
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


def is_hub_id(path: str | Path) -> bool:
    """True for `org/name`, or a name alone, such as gpt2, where no such folder is."""
    return bool(ID.fullmatch(str(path))) and not _is_there(path)


def is_in_cache(folder: Path) -> bool:
    """True for a folder in the cache of huggingface_hub, which may have a part of a model."""
    return folder.match("models--*/snapshots/*")


def _is_there(path: str | Path) -> bool:
    try:
        os.stat(path)
    except OSError as error:  # a folder that may not be looked into is one
        return error.errno not in ABSENT
    return True


def local_folder(
    path: str | Path,
    revision: str | None = None,
    gguf: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Path:
    """The folder of a checkpoint on this machine; what the Hub alone has is downloaded first.

    revision: a branch, tag or commit of the Hub. gguf: the name of a GGUF file in it. options: of
    from_pretrained, of which DOWNLOAD_OPTIONS hold. Blocks until all files are there. Raises
    CheckpointError for what neither this machine nor the Hub has.
    """
    folder = _downloaded(path, revision, [gguf] if gguf else [*PATTERNS], options)
    return folder if gguf else _with_weights(path, folder)


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
    absent = _absent_weights(str(path), folder.name)
    if not absent:
        yield local_folder(path, revision) if absent is None else _with_weights(path, folder)
        return
    with tempfile.TemporaryDirectory() as parent:
        copy = Path(parent, path)  # whose name is the model's, as code of its own is kept by it
        copy.mkdir(parents=True)
        for file in folder.iterdir():
            (copy / file.name).symlink_to(file.resolve())
        with _explained(path), ThreadPoolExecutor() as pool:
            write = functools.partial(_write_header, copy, str(path), folder.name)
            list(pool.map(write, absent))
        yield copy


def _downloaded(
    path: str | Path,
    revision: str | None,
    patterns: list[str],
    options: Mapping[str, Any] | None = None,
) -> Path:
    if not is_hub_id(path):
        return Path(path)
    from huggingface_hub import snapshot_download  # not needed for a folder

    settings = {name: value for name, value in (options or {}).items() if name in DOWNLOAD_OPTIONS}
    with _explained(path):
        folder = snapshot_download(
            str(path),
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=[*COPIES],
            **settings,
        )
    return Path(folder)


def _with_weights(path: str | Path, folder: Path) -> Path:
    """The folder. Raises CheckpointError if it came from the Hub without weights."""
    if is_hub_id(path) and not any(folder.glob(WEIGHTS)):
        raise CheckpointError(
            f"the model {path} of the Hub has no .safetensors file, or none is in the cache and "
            "the Hub is out of reach, so there is nothing to load; give the name of its GGUF file "
            "as gguf_file=, if it has one, or, where you trust its pickles, a folder into which "
            "save_pretrained() of transformers has written it."
        )
    return folder


def _absent_weights(path: str, commit: str) -> list[str] | None:
    """The files of weights that local_folder would download; None if the Hub is out of reach."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    with _explained(path), contextlib.suppress(DryRunError):
        files = snapshot_download(
            path, revision=commit, allow_patterns=WEIGHTS, ignore_patterns=[*COPIES], dry_run=True
        )
        return [file.filename for file in files if file.will_download]
    return None


def _write_header(folder: Path, path: str, commit: str, name: str) -> None:
    """Write a safetensors file with the header of the Hub's, and a hole in place of its tensors."""
    from huggingface_hub import HfApi

    tensors = HfApi().parse_safetensors_file_metadata(path, name, revision=commit).tensors
    fields = ("dtype", "shape", "data_offsets")
    entries = {key: {f: getattr(info, f) for f in fields} for key, info in tensors.items()}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    end = max((info.data_offsets[1] for info in tensors.values()), default=0)
    with (folder / name).open("xb") as out:  # never what the cache holds
        out.write(len(header).to_bytes(8, "little") + header)
        out.truncate(8 + len(header) + end)


@contextlib.contextmanager
def _explained(path: str | Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of httpx, too, for a connection that breaks
        why = textwrap.shorten(str(error), 300)
        if isinstance(error, OSError) and error.errno in UNWRITABLE:
            raise CheckpointError(
                f"{path} cannot be kept in the cache of huggingface_hub ({why}); make room there, "
                "or set HF_HOME to a folder that has it and that you may write."
            ) from error
        raise CheckpointError(
            f"{path} is not a folder here, and the Hub does not give a model of this name "
            f"({type(error).__name__}: {why}); give the path of a folder, or an id that you may "
            "read (`hf auth login`), and see that HF_HUB_OFFLINE is not set."
        ) from error
