"""The descriptions in a checkpoint: config.json, tokenizer and generation config, checked first."""

from __future__ import annotations

import functools
import hashlib
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.checkpoint.headers.file_bounds import (
    CONFIG,
    MAX_LAYERS,
    OF_TYPE,
    PER_LAYER,
    Bound,
    FieldError,
)
from drumline.checkpoint.headers.gguf_header import check_padding, read_gguf_header
from drumline.checkpoint.json_files import check_has_config, check_regular_files, read_json
from drumline.checkpoint.safetensors_index import read_index
from drumline.contact.loading import configs
from drumline.contact.loading.generation_fields import misfit
from drumline.contact.loading.models import ANY_MODEL, causal_class_reference, class_from_code
from drumline.contact.releases import installed
from drumline.errors import CheckpointError, blamed_on_file

LAYER_COUNTS = (
    "_num_layers",
    "hidden_layers",
    "coder_layers",
    "_n_layer",
    "_n_layers",
    "_depth",
)
"""Endings of the names, with _ before them, of fields that hold a number of layers."""
PICKLED_WEIGHTS = ("pytorch_model*.bin", "model*.bin")
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
FREE_NAMES = ("label2id", "id2label", "task_specific_params")
"""Fields that hold values by names of the user's own."""
LAYERS_OF_MODEL = ("num_hidden_layers", "n_layer")
"""Fields that no model has as 0: transformers would make one without any layer."""


def read_config(
    path: str | Path, adapter: str | Path | None = None, trust_remote_code: bool = False
) -> Any:
    """The config of a checkpoint. Raises CheckpointError unless its descriptions are complete.

    adapter: the folder of one that is to be applied; without it, there must be none beside.
    trust_remote_code: run the Python files of the checkpoint, if it has a config of its own.
    """
    folder = Path(path)
    check_regular_files(folder)
    check_has_config(folder, adapter)
    content = read_json(folder / "config.json")
    _check_no_pickles(folder, content)
    _check_numbers(folder, content)

    def describe(error: Exception) -> CheckpointError:
        is_known = configs.knows_model_type(str(content.get("model_type")))
        if "auto_map" in content and not is_known and not trust_remote_code:
            return _remote_code_error(folder, "config.json", content)
        why = textwrap.shorten(str(error), 300)
        return CheckpointError(
            f"{folder}/config.json describes no model that transformers "
            f"{installed('transformers')} knows ({why}); copy it again, or install the version "
            "that wrote it."
        )

    with blamed_on_file(describe):
        config = configs.read_config(folder, trust_remote_code=trust_remote_code)
        if configs.lacks_window(config):
            raise FieldError("sliding_window is null, and layer_types has layers with a window")
        return config


def read_tokenizer(path: str | Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint, or of a GGUF file."""
    folder, options = Path(path), {}
    if folder.suffix == ".gguf":
        header = read_gguf_header(folder)  # which names a field that lies
        folder, options = folder.parent, {"gguf_file": folder.name}
    check_regular_files(folder)
    settings = folder / "tokenizer_config.json"
    content = read_json(settings) if settings.exists() else {}

    def describe(error: Exception) -> CheckpointError:
        if "auto_map" in content and not trust_remote_code:
            return _remote_code_error(folder, settings.name, content)
        files = ", ".join(sorted(file.name for file in folder.glob("tokenizer*"))) or "no such file"
        line = str(error).strip().partition("\n")[0]
        why = f"{files}: {type(error).__name__}: {line}"
        return CheckpointError(
            f"{path} holds no tokenizer that can be read ({why}), so text cannot become tokens; "
            "save the tokenizer of the model there, or call generate() with tokens in a script."
        )

    with blamed_on_file(describe):
        if "gguf_file" in options and not {"auto_map", "tokenizer_class"} & {*content}:
            check_padding(header.fields)
            options["config"] = configs.config_of_gguf(header.summary, folder)
        tokenizer = configs.read_tokenizer(folder, trust_remote_code=trust_remote_code, **options)
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            raise ValueError("its vocabulary is empty")  # as transformers makes one of no files
        return tokenizer


def read_processor(path: str | Path, trust_remote_code: bool = False) -> Any:
    """The processor of a checkpoint, for images beside text; None if it has none for them."""
    folder = Path(path)
    if not any((folder / name).exists() for name in PROCESSOR_FILES):
        return None

    def describe(error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{folder} has files of a processor that cannot be used "
            f"({textwrap.shorten(str(error), 300)}), so images cannot be read; install what it "
            "names, or copy the files again."
        )

    with blamed_on_file(describe):
        processor = configs.read_processor(folder, trust_remote_code=trust_remote_code)
    return processor if hasattr(processor, "image_processor") else None


def _remote_code_error(folder: Path, file: str, content: Mapping[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"{folder} brings Python code of its own ({file} has auto_map={content['auto_map']!r:.200}"
        f"), which is not run, and transformers {installed('transformers')} has none for it; if "
        "you trust it, load the model with trust_remote_code=True, or install a version that can "
        "read the checkpoint itself."
    )


def remote_class(folder: Path, config: Any) -> type[Any] | None:
    """The class that the checkpoint's own code has for its model; None if it has none.

    It runs that code.
    """
    auto_map, names = getattr(config, "auto_map", None) or {}, config.architectures or ()
    references = {key: str(value) for key, value in auto_map.items() if key != "AutoConfig"}
    named = [ref for ref in references.values() if ref.rpartition(".")[2] in names]
    reference = next(iter(named), None if names else causal_class_reference(references))
    return class_from_code(reference, folder) if reference else None


def code_digest(folder: Path) -> str:
    """Equal for equal Python files."""
    files = sorted(folder.glob("*.py"))
    texts = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def read_generation_config(path: str | Path) -> Any:
    """The generation settings of a checkpoint; in older ones, those in its config.json."""
    file = Path(path, "generation_config.json")
    is_there = file.exists()
    file = file if is_there else Path(path, "config.json")
    content = read_json(file)

    def describe(error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{file} says nothing that a model can be generated with "
            f"({textwrap.shorten(str(error), 300)}); copy it again."
        )

    with blamed_on_file(describe):
        if problem := misfit(content):
            raise FieldError(problem)
        return configs.read_generation_settings(path, is_in_config=not is_there)


def _check_numbers(folder: Path, content: Mapping[str, Any]) -> None:
    """Raise for numbers that no model has, and for more layers than there are tensors.

    To make them all would take hours and all memory, for nothing.
    """
    num_tensors = functools.cache(lambda: len(read_index(folder)))
    try:
        for name, value in _all_fields(content):
            is_number, is_count = type(value) in (int, float), f"_{name}".endswith(LAYER_COUNTS)
            least = int(name in LAYERS_OF_MODEL)
            is_usual = not (is_number and is_count) or least <= value <= MAX_LAYERS
            if not is_usual and not least <= value <= num_tensors():
                raise FieldError(
                    f"{name}={value!r:.20}, but the files hold {num_tensors()} tensors"
                )
            is_flag = isinstance(value, bool) and name not in CONFIG
            bound = _bound(name) or OF_TYPE.get(type(value))
            if value is None or is_flag or bound is None:
                continue  # nothing, or what transformers checks
            if not bound.holds(value):
                replace(bound, name=name).check(value)
    except FieldError as error:
        raise CheckpointError(
            f"{folder}/config.json has {error}. Take the config.json that was saved with these "
            "files."
        ) from error


def _last_word(name: str) -> str:
    return name.rpartition("_")[2]


def _bound(name: str) -> Bound | None:
    return CONFIG.get(name, CONFIG.get(_last_word(name)))


def _all_fields(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values of a config, and of the configs and lists in it, by the names of the fields;
    nothing of FREE_NAMES.

    A list whose field has a bound is one value, or one for each layer.
    """
    todo: list[tuple[str, Any]] = [("", content)]
    while todo:
        name, value = todo.pop()
        if isinstance(value, dict) and name not in FREE_NAMES:
            todo += value.items()
        if not isinstance(value, list):
            yield name, value
        elif _bound(name) is None:
            todo += [(name, element) for element in value]
        elif name in PER_LAYER or _last_word(name) in PER_LAYER:
            yield from ((name, element) for element in value)
        else:
            yield name, value


def _check_no_pickles(folder: Path, content: Mapping[str, Any]) -> None:
    pickles = sorted(file.name for glob in PICKLED_WEIGHTS for file in folder.glob(glob))
    if pickles and not any(folder.glob("*.safetensors")):
        names = content.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        kind = name if isinstance(name, str) and name.isidentifier() else ANY_MODEL
        code = (
            f"from transformers import {kind} as M; "
            f"M.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
        raise CheckpointError(
            f"{folder} holds {', '.join(pickles)}, pickles that would run whatever code is in "
            f"them; convert once, where you trust the file: python -c {shlex.quote(code)}"
        )
