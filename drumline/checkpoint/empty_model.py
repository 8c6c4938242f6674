"""One rank's model: empty for its weights to be streamed in, or read by transformers itself.

Keys are renamed, split and fused by transformers' own tables (a loader that matched key prefixes
would be wrong for the experts of Mixtral, for one). Where those only say where a tensor lies, the
model is made empty here and filled block by block; where they compute, transformers reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import dynamic_module_utils
from transformers.modeling_utils import LoadStateDictInfo

from drumline.checkpoint.json_files import (
    check_has_config,
    read_json,
    refuse_special_entries,
)
from drumline.checkpoint.safetensors_index import Index, read_index
from drumline.checkpoint.shard_loader import named_tensors
from drumline.checkpoint.shard_plan import fills_exactly
from drumline.checkpoint.weight_map import WeightMap, map_weights
from drumline.errors import CheckpointError

SHARED_LAYERS = 1000
"""More layers than any model has that uses the tensors of one layer for many, as ALBERT does."""
COUNTS = ("num_layers", "hidden_layers", "coder_layers", "n_layer", "n_layers", "depth")
"""How the names of fields end that say how many layers a model has."""

_turn = threading.Lock()


@contextlib.contextmanager
def model_build_lock() -> Iterator[None]:
    """Take the turn to build a model, and ask nobody on stdin whether foreign code may run.

    transformers sets torch's default dtype and replaces functions of torch while it builds a model,
    for the whole process: ranks that are threads take turns.
    """
    with _turn, unasked():
        yield


@contextlib.contextmanager
def unasked() -> Iterator[None]:
    """Let transformers refuse the code of a checkpoint at once, where it would ask on stdin.

    For one thread at a time. It is a ValueError, and trust_remote_code=True runs the code as ever.
    """
    patience_s = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = patience_s


def empty_model(
    cls: type[Any],
    path: str | Path,
    config: Any,
    index: Index,
    places: Mapping[str, str],
    dtype: torch.dtype,
    **options: Any,
) -> tuple[Any, WeightMap]:
    """A model with its weights on meta, and what each of them is made of.

    Tied weights are tied, and the buffers that modules compute are real where `places` has a device
    for them. Raises Computed for a model whose weights cannot be streamed, and CheckpointError for
    tensors that are missing, surplus or of another shape or kind.
    """
    found: list[WeightMap] = []

    def read(model: Any, *unused: Any) -> tuple[Any, None]:
        found.append(map_weights(model, index))
        _refuse_mismatches(path, dict(named_tensors(model)), found[0], index)
        for _, tensor in named_tensors(model):
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # it will be
        return _report(found[0]), None

    with model_build_lock():
        model, report = _reading(cls, dict(places), read).from_pretrained(
            None,
            config=config,
            state_dict={},
            dtype=dtype,
            device_map={"": "cpu"},
            output_loading_info=True,
            **options,
        )
    _check(path, report, index, found[0].stored_as)
    model.__class__ = cls
    return model, found[0]


def load_shard(
    cls: type[Any], path: str | Path, places: Mapping[str, str], dtype: torch.dtype, **options: Any
) -> Any:
    """A model with the modules in `places` loaded on their devices, and all others on meta.

    Read by transformers, which maps the files into memory: what it converts is there twice for a
    while.
    """
    with model_build_lock():
        try:
            model, report = _reading(cls, dict(places), None).from_pretrained(
                path,
                dtype=dtype,
                device_map={"": "cpu"},
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report, and an error below
                **options,
            )
        except ImportError as error:  # such as what computes a quantisation
            raise CheckpointError(
                f"{path} takes a package that is not here ({error}), so its weights cannot be "
                "computed; install that, or save the model once in the dtype it is to run in."
            ) from error
    _check(path, report, read_index(path), {})
    model.__class__ = cls
    return model


def _reading(
    cls: type[Any], places: dict[str, Any], instead: Callable[..., Any] | None
) -> type[Any]:
    """`cls`, reading with the device map `places` where it believes that it reads everything.

    instead: what reads, in place of transformers' own. A subclass rather than a replaced function:
    nothing outside this call sees it. It keeps the name of `cls`, by which transformers looks
    things up.
    """

    def own(config: Any) -> Any:
        return dataclasses.replace(config, device_map=places)

    def read(model: Any, state_dict: Any, files: Any, config: Any, *rest: Any) -> Any:
        reader = instead or cls._load_pretrained_model
        return reader(model, state_dict, files, own(config), *rest)

    def finish(model: Any, config: Any, report: Any) -> Any:
        return cls._finalize_model_loading(model, own(config), report)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    methods = {
        "_load_pretrained_model": staticmethod(read),
        "_finalize_model_loading": staticmethod(finish),
    }
    return type(cls.__name__, (cls,), {**names, **methods})


def _report(found: WeightMap) -> Any:
    """What transformers would say of a checkpoint after loading it."""
    kinds = {"error_msgs": list, "conversion_errors": dict}
    names = [field.name for field in dataclasses.fields(LoadStateDictInfo)]
    report = LoadStateDictInfo(**{name: kinds.get(name, set)() for name in names})
    report.missing_keys, report.unexpected_keys = set(found.missing), set(found.surplus)
    return report


def _refuse_mismatches(
    path: str | Path, state: Mapping[str, torch.Tensor], found: WeightMap, index: Index
) -> None:
    """Raise for tensors of another shape, and for numbers in place of whole ones or the reverse."""
    wrong = [
        f"{piece.key} in {stored.file} is {stored.dtype} {list(stored.shape)} where {name} is "
        f"{str(state[name].dtype).removeprefix('torch.')} {list(state[name].shape)}"
        for name, pieces in found.pieces.items()
        for piece, stored in [(piece, index[piece.key]) for piece in pieces]
        if not fills_exactly(pieces, state[name].shape)
        or stored.torch_dtype.is_floating_point != state[name].dtype.is_floating_point
    ]
    if wrong:
        raise CheckpointError(
            f"{path}: {len(wrong)} tensors are mismatched ({'; '.join(wrong[:3])}), so the model "
            "would not be the one that was saved; give the checkpoint that belongs to its "
            "config.json."
        )


def read_config(path: str | Path) -> Any:
    """The config of a checkpoint, once its files are seen to be whole."""
    folder = Path(path)
    refuse_special_entries(folder)
    check_has_config(folder)
    content = read_json(folder / "config.json")
    _refuse_pickles(folder, content)
    _refuse_layers(folder, content, read_index(folder))
    try:
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # each kind of config checks its fields in a way of its own
        is_known = str(content.get("model_type")) in transformers.CONFIG_MAPPING
        if "auto_map" in content and not is_known:
            raise _foreign(folder, "config.json", content) from error
        why = textwrap.shorten(str(error), 300)
        raise CheckpointError(
            f"{folder}/config.json describes no model that transformers "
            f"{transformers.__version__} knows ({why}); copy it again, or install the version that "
            "wrote it."
        ) from error


def read_tokenizer(path: str | Path) -> Any:
    """What turns text into the tokens of a checkpoint."""
    folder = Path(path)
    refuse_special_entries(folder)
    settings = folder / "tokenizer_config.json"
    content = read_json(settings) if settings.exists() else {}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            raise ValueError("its vocabulary is empty")  # as transformers makes one of no files
        return tokenizer
    except Exception as error:  # what the files lack is whatever error it comes to
        if "auto_map" in content:
            raise _foreign(folder, settings.name, content) from error
        files = ", ".join(sorted(file.name for file in folder.glob("tokenizer*"))) or "no such file"
        line = str(error).strip().partition("\n")[0]
        why = f"{files}: {type(error).__name__}: {line}"
        raise CheckpointError(
            f"{path} holds no tokenizer that can be read ({why}), so text cannot become tokens; "
            "save the tokenizer of the model there, or call generate() with tokens in a script."
        ) from error


def _foreign(folder: Path, file: str, content: Mapping[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"{folder} brings Python code of its own ({file} has auto_map={content['auto_map']!r:.200}"
        f"), which is not run, and transformers {transformers.__version__} has none for it; give a "
        "checkpoint that transformers itself can read, or install the version that can."
    )


def read_generation_config(path: str | Path) -> Any:
    """How the checkpoint wants to be generated with; what its config.json says, in older ones."""
    older = {"config_file_name": "config.json", "_from_model_config": True}
    file = Path(path, "generation_config.json")
    try:
        options = {} if file.exists() else older
        return transformers.GenerationConfig.from_pretrained(path, **options)
    except Exception as error:  # its fields are checked in many ways
        why = textwrap.shorten(str(error), 300)
        raise CheckpointError(
            f"{file if file.exists() else path} says nothing that a model can be generated with "
            f"({why}); copy it again."
        ) from error


def _refuse_layers(folder: Path, content: Mapping[str, Any], index: Index) -> None:
    """Raise for more layers than there are tensors, which would take hours to build for nothing."""
    most = max(len(index), SHARED_LAYERS)
    for name, count in _fields(content):
        if name.endswith(COUNTS) and type(count) is int and count > most:
            raise CheckpointError(
                f"{folder}/config.json has {name}={count!r:.20}, but the files hold {len(index)} "
                "tensors, so most layers would have none; give the config.json that they belong to."
            )


def _fields(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a config and of the configs in it."""
    todo = [content]
    while todo:
        for name, value in todo.pop().items():
            yield name, value
            if isinstance(value, dict):
                todo.append(value)


def _refuse_pickles(folder: Path, content: Mapping[str, Any]) -> None:
    pickles = sorted(file.name for file in folder.glob("*.bin"))
    if pickles and not any(folder.glob("*.safetensors")):
        names = content.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        kind = name if isinstance(name, str) and name.isidentifier() else "AutoModel"
        code = (
            f"from transformers import {kind} as M; "
            f"M.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
        raise CheckpointError(
            f"{folder} holds {', '.join(pickles)}, pickles that would run whatever code is in "
            f"them; convert once, where you trust the file: python -c {shlex.quote(code)}"
        )


def _check(
    path: str | Path, report: Mapping[str, Any], index: Index, stored_as: Mapping[str, str]
) -> None:
    """Raise unless checkpoint and model have the same tensors."""
    for kind in ("missing", "unexpected", "mismatched"):
        keys = [key if isinstance(key, str) else key[0] for key in report[f"{kind}_keys"] or ()]
        if keys:
            known = [(key, index.get(stored_as.get(key, key))) for key in sorted(keys)[:5]]
            places = [f"{key} in {stored.file}" if stored else key for key, stored in known]
            raise CheckpointError(
                f"{path}: {len(keys)} tensors are {kind} ({', '.join(places)}), so the model would "
                "not be the one that was saved; give the checkpoint that belongs to its "
                "config.json."
            )
