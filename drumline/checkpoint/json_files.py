"""The files of a checkpoint, which anyone may have written: nothing they say is relied upon."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.checkpoint.headers.file_bounds import JSON, Bound, FieldError
from drumline.errors import CheckpointError

MERGE_ADAPTER = (
    "merge the adapter into a checkpoint and load that: AutoPeftModelForCausalLM.from_pretrained("
    "adapter).merge_and_unload().save_pretrained(directory)"
)


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
MAX_DESCRIPTION_NBYTES = 256 << 20
"""Of a file that is read whole; the largest tokenizers have 40 MB."""
DESCRIPTION = re.compile(
    r".*\.(jinja|model)|(vocab|merges|dict)\.txt|(tokenizer.*|.*(config|index|vocab|tokens|maps?)|"
    r"chat_template|vocab-.*|word_.*|emoji|normalizer)\.json"
)
"""The names of files that transformers may open by itself."""
MAX_DEPTH = 32
"""Of JSON: transformers copies a config by recursion, in which each list costs as much as ten."""


def gguf_path(path: str | Path, name: str | None) -> Path | None:
    """The GGUF file that is meant by a path, or by its name in a folder; None if none is."""
    if name is not None:
        return Path(path, name)
    return Path(path) if Path(path).suffix == ".gguf" else None


def check_regular_file(file: Path) -> None:
    """Raise unless it is an ordinary file, or a link to one: opening a pipe waits for a writer.

    OSError if there is nothing at all.
    """
    mode = file.stat().st_mode
    if not stat.S_ISREG(mode):
        raise CheckpointError(
            f"{file} is not an ordinary file ({stat.filemode(mode)}), so reading it might never "
            "end; put the file of the checkpoint there."
        )


def _check_size(file: Path) -> int:
    """The bytes of an ordinary file. Raises FieldError for more than a description has."""
    check_regular_file(file)
    if (nbytes := file.stat().st_size) > MAX_DESCRIPTION_NBYTES:
        raise FieldError(f"{nbytes} bytes, more than any description of a model")
    return nbytes


def check_regular_files(folder: Path) -> None:
    """Raise for a pipe, socket or device, and what is too large where transformers opens it."""
    for pattern in ("*", "additional_chat_templates/*") if os.path.isdir(folder) else ():
        for file in sorted(folder.glob(pattern)):
            if file.exists() and not file.is_dir():
                check_regular_file(file)
                if DESCRIPTION.fullmatch(file.name):
                    _check_description(file)


def _check_description(file: Path) -> None:
    bound = _values_bound(file)
    try:
        if _check_size(file) > bound.most and file.suffix == ".json":
            _check_num_values(file.read_bytes(), bound)
    except FieldError as error:
        raise CheckpointError(
            f"{file} has {error}, and would take hours and fill the memory; copy it again."
        ) from error


def _may_be_read(folder: Path) -> bool:
    """False for a folder that is closed to this user, or in one that is."""
    try:
        is_folder = stat.S_ISDIR(os.stat(folder).st_mode)
    except OSError as error:
        return error.errno != errno.EACCES
    except ValueError:  # no name of a file
        return True
    return not is_folder or os.access(folder, os.R_OK | os.X_OK)


def check_has_config(folder: Path, adapter: str | Path | None = None) -> None:
    """Raise CheckpointError if a folder holds no model, or may not be read.

    Also for an adapter beside the model, which from_pretrained would apply, and nobody gave.
    """
    if not _may_be_read(folder):
        raise CheckpointError(
            f"{folder} may not be read by this user; run `chmod -R u+rX` on it as its owner."
        )
    has_config = os.path.isfile(folder / "config.json")
    has_adapter = os.path.isfile(folder / ADAPTER_CONFIG)
    if has_adapter and not has_config:
        raise CheckpointError(
            f"{folder} holds an adapter and no model; give load() the model that it belongs to, "
            f"and adapter={str(folder)!r}."
        )
    if has_adapter and adapter is None:
        raise CheckpointError(
            f"{folder} holds an adapter beside the model ({ADAPTER_CONFIG}), and without it the "
            f"model may be another one; pass adapter={str(folder)!r} to apply it, or move it away."
        )
    if not has_config:
        files = folder.glob("*.gguf") if os.path.isdir(folder) else ()
        names = ", ".join(sorted(file.name for file in files))
        raise CheckpointError(
            f"{folder} holds no config.json, so there is no model in it; give the directory that "
            "save_pretrained() wrote, or that a download of the model ended in"
            + (f", or the path of its GGUF file ({names})." if names else ".")
        )


def check_has_adapter(folder: Path) -> None:
    """Raise CheckpointError if a folder holds no adapter."""
    for name in (ADAPTER_CONFIG, ADAPTER_FILE):
        if not os.path.isfile(folder / name):
            raise CheckpointError(
                f"{folder} holds no {name}, so there is no adapter in it; give, as adapter=, the "
                "directory that save_pretrained() of peft wrote."
            )


def distinct_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, in which no name has two values: readers differ in which one they take."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        for name, value in pairs:
            if fields[name] != value:
                raise ValueError(f"{name:.99} appears twice in it")
    return fields


def _values_bound(file: Path) -> Bound:
    """Of the values in a file of this name."""
    return JSON.get(
        "index.json" if file.name.endswith(".index.json") else file.name, JSON["others"]
    )


def _check_num_values(data: bytes, bound: Bound) -> None:
    """Raise FieldError for more values than a file has, before they take memory.

    Each is behind a comma or a bracket. Those within texts are counted, too.
    """
    replace(bound, name="number of values").check(sum(map(data.count, (b",", b"[", b"{"))))


def json_object(
    data: bytes,
    bound: Bound,
    make: Callable[[list[tuple[str, Any]]], Any] = distinct_fields,
) -> dict[str, Any]:
    """The JSON object that is all of a text. Raises ValueError or FieldError unless it is one.

    make: an object within it, of its names and values.
    """
    _check_num_values(data, bound)
    content = json.loads(data.decode(), object_pairs_hook=make)
    if not isinstance(content, dict):
        raise ValueError(f"it is a {type(content).__name__}")
    return content


def _check_depth(content: dict[str, Any]) -> None:
    """Raise FieldError for lists and objects within more others than those of a file are."""
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        lists = (item.values() if isinstance(item, dict) else item for item in level)
        level = [value for values in lists for value in values if isinstance(value, dict | list)]
    if level:
        raise FieldError(f"a list or object is within {MAX_DEPTH} others")


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object that is all of a file."""
    try:
        _check_size(file)
        content = json_object(file.read_bytes(), _values_bound(file))
        _check_depth(content)
        return content
    except (OSError, FieldError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} holds no JSON object ({error}), so what it describes is unknown; copy it "
            "again."
        ) from error
