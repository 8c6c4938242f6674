"""The one way into a checkpoint: its files, config, class and dtype, for whole layers and shards.

checkpoint = open_checkpoint(coor, "checkpoint", options)     # the same answer on every rank
print(checkpoint.kind, checkpoint.dtype, checkpoint.files.readers)
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from coordinator import Coordinator
from drumline import timings
from drumline.checkpoint.config_files import read_config, read_generation_config, remote_class
from drumline.checkpoint.copy_check import are_equal
from drumline.checkpoint.json_files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    check_has_adapter,
    gguf_path,
    read_json,
)
from drumline.checkpoint.safetensors_index import Index, TensorReader, read_index
from drumline.checkpoint.shard_plan import reader_ranks
from drumline.checkpoint.source import (
    Checkpoint,
    CheckpointFiles,
    allow_code,
    choose_config,
    config_from_json,
    share_index,
)
from drumline.checkpoint.weight_map import stored_ties
from drumline.contact.loading.configs import generation_settings
from drumline.contact.loading.hub import is_hub_id, is_in_cache, local_folder
from drumline.contact.loading.models import why_not_quantized
from drumline.core.consistency import check_same, run_and_share
from drumline.errors import CheckpointError, DrumlineError, PlanError
from drumline.planner.load_options import LoadOptions
from drumline.planner.model_profile import build_on_meta, model_class

T = TypeVar("T")

log = logging.getLogger("drumline")


def open_checkpoint(coor: Coordinator, path: str | Path, options: LoadOptions) -> Checkpoint:
    """Open the checkpoint at `path`; ranks that read must have the same files. Collective.

    What rank 0 has to fetch from the Hub, it fetches for all. Each rank with the files reads them,
    and rank 0 for the others; where layers are sharded, the ranks that `reader` says.

    Raises CheckpointError on every rank if rank 0 has no files, or any file is incomplete, and
    PlanError for options that the model does not have.
    """
    fields, generation, adapter, code = None, None, None, options.trust_remote_code
    own: list[Any] = []
    path, readers = _find_files(coor, path, options)
    if file := gguf_path(path, options.gguf_file):
        files: CheckpointFiles = weight_format("gguf_file").find_gguf(coor, file, readers)
        own.append(files.config)
    else:
        if code:
            allow_code(coor, path)

        def choose_readers() -> Sequence[int]:
            is_sharded, reader = options.shards_layers, options.reader or "each"
            return reader_ranks(reader, coor.nodes) if is_sharded else readers

        def read_files(folder: Path) -> Index:
            own.append(read_config(folder, options.adapter, code))
            return read_index(folder, warns=coor.is_master())

        files, text = share_index(
            coor, path, choose_readers, lambda: read_descriptions(path, own[0]), read_files
        )
        fields, generation = json.loads(text)
    if options.adapter is not None:
        adapter, files = weight_format("lora_adapter").find_adapter(coor, options.adapter, files)
    config, texts = run_and_share(
        coor,
        lambda: choose_config(own[0] if own else _config_of(path, fields, code), options.config),
        lambda config: {"config": config.to_json_string()},
    )
    check_same(coor, texts)
    maps = not (options.disable_mmap or options.shards_layers)  # shards are read, as documented
    files = replace(files, config=config, maps=maps)
    if file and coor.is_master():
        weight_format("gguf_file").warn_of_factors(files)
    computes = options.dequantize or _has_to_keep(coor, files, options)
    checkpoint, copies = run_and_share(
        coor,
        lambda: _described(files, generation, adapter, options, computes),
        lambda described: _tied_copies(described) if files.compared_by(coor.rank) else [],
        timings.TIMINGS.load_s,
    )
    return _without(checkpoint, copies[files.readers[0]])


def _has_to_keep(coor: Coordinator, files: CheckpointFiles, options: LoadOptions) -> bool:
    """True for quantized weights that only we can keep so. Collective where there are such.

    transformers needs the format's own library, and the files, on every rank; and on some devices
    it computes plain weights, so that ranks would plan with other sizes.
    """
    if not _is_quantized(files, options):
        return False
    _, answers = run_and_share(coor, lambda: why_not_quantized(files.config), list)
    reasons = [f"rank {rank} has no files" for rank in files.blind]
    reasons += [reason for reason, _ in answers if reason]
    plain = [coor.ranks[n] for n, (_, is_plain) in enumerate(answers) if is_plain]
    if 0 < len(plain) < coor.world_size:
        reasons.append(f"on ranks {plain} alone it would compute plain weights of them")
    if reasons and coor.is_master():
        log.warning(
            "rank 0: transformers cannot load the quantized weights of %s on every rank: %s.",
            files.path,
            reasons[0],
        )
    return bool(reasons)


def _is_quantized(files: CheckpointFiles, options: LoadOptions) -> bool:
    """True for whole layers of quantized weights in a format that we can compute."""
    is_stored = getattr(files.config, "quantization_config", None) is not None
    if not is_stored or options.shards_layers or options.rest.get("quantization_config"):
        return False
    return bool(weight_format("dequantized").is_known(files))


def folder_on_all_ranks(
    coor: Coordinator, path: str | Path, options: Mapping[str, Any], use: Callable[[Path], T]
) -> tuple[Path, T | None]:
    """The folder of a checkpoint, and on rank 0 what `use` makes of it. Collective.

    It is that of rank 0 if it was fetched from the Hub, for as long as it takes, and other machines
    may lack it. options: of `load`. Raises what local_folder and `use` raise, on every rank.
    """

    def fetch() -> tuple[Path | None, T | None]:
        if not coor.is_master():
            return None, None
        folder = local_folder(path, options.get("revision"), options.get("gguf_file"), options)
        return folder if is_hub_id(path) else None, use(folder)

    (_, result), folders = run_and_share(
        coor, fetch, lambda pair: pair[0] and str(pair[0]), timeout_s=timings.TIMINGS.load_s
    )
    return Path(folders[0] or path), result


def _find_files(
    coor: Coordinator, path: str | Path, options: LoadOptions
) -> tuple[Path, list[int]]:
    """The folder of a checkpoint, and by rank which rank reads for it: itself if it has the files,
    else rank 0. Collective."""
    fetches = coor.is_master() and is_hub_id(path)

    def look() -> tuple[str, bool]:
        where = path, options.revision, options.gguf_file, options.rest
        folder = local_folder(*where) if fetches else Path(path)
        return str(folder) if fetches else "", _has_files(folder, options)

    _, looks = run_and_share(coor, look, list, timeout_s=timings.TIMINGS.load_s)
    folder, has_files = Path(looks[0][0] or path), [has for _, has in looks]
    if looks[0][0]:  # which the others did not look into
        has_files = coor.allgather_object(_has_files(folder, options))
    return folder, [rank if has else 0 for rank, has in enumerate(has_files)]


def weight_format(name: str) -> Any:
    """The module that reads weights of a format beside plain safetensors. It may be left out."""
    try:
        return importlib.import_module(f"drumline.weight_formats.{name}")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("drumline.weight_formats"):
            raise
        raise CheckpointError(
            f"this installation has no drumline.weight_formats.{name}, which reads such weights; "
            "install drumline whole, or give the model as plain safetensors."
        ) from error


def read_descriptions(path: str | Path, config: Any) -> bytes:
    """config.json and generation_config.json in one line, for ranks that may have no file.

    config: the one that is in the files.
    """
    folder, generation = Path(path), None
    fields = {**read_json(folder / "config.json"), "model_type": config.model_type}
    if (folder / "generation_config.json").exists():
        read_generation_config(folder)
        generation = read_json(folder / "generation_config.json")
    return json.dumps([fields, generation]).encode()


def describe_checkpoint(
    path: str | Path, options: LoadOptions, compares: bool = True
) -> Checkpoint:
    """The checkpoint as open_checkpoint finds it, for this process alone.

    compares: read tied weights that are stored twice, to leave out the copies.
    """
    if options.adapter is not None:
        check_has_adapter(Path(options.adapter))
    if file := gguf_path(path, options.gguf_file):
        files: CheckpointFiles = weight_format("gguf_file").open_gguf(file)
    else:
        stored = read_config(path, options.adapter, options.trust_remote_code)
        config = choose_config(stored, None)
        files = CheckpointFiles(Path(path), read_index(path), (0,), config)
    has_to_keep = _is_quantized(files, options) and bool(why_not_quantized(files.config)[0])
    checkpoint = _described(files, None, None, options, options.dequantize or has_to_keep)
    return _without(checkpoint, _tied_copies(checkpoint) if compares else [])


def _tied_copies(checkpoint: Checkpoint) -> list[str]:
    """The stored matrices that equal those that the model ties them to, as transformers ties them.

    Only the bytes tell them from a head that was trained apart, which is kept.
    """
    index, same = checkpoint.files.index, dict[str, str]()
    distinct = defaultdict[tuple[str, tuple[int, ...]], list[str]](list)
    with TensorReader(checkpoint.files.path) as reader:
        for name, stored in index.items():
            if len(stored.shape) > 1 and not any(map(str.isdigit, name.split("."))):  # no layer's
                others = distinct[stored.dtype, stored.shape]
                equal = (one for one in others if are_equal(reader, stored, index[one]))
                if one := next(equal, None):
                    same[name] = one
                else:
                    others.append(name)
    if not same:
        return []
    model = build_on_meta(checkpoint.kind, checkpoint.config, checkpoint.dtype)
    keys = stored_ties(model, index)
    firsts = {name: same.get(key, key) for name, key in keys.items()}
    ties = model.all_tied_weights_keys.items() if keys else ()
    return [keys[n] for n, source in ties if n in keys and firsts[n] == firsts.get(source)]


def _without(checkpoint: Checkpoint, names: Sequence[str]) -> Checkpoint:
    """The checkpoint without these of its tensors."""
    index = {name: stored for name, stored in checkpoint.files.index.items() if name not in names}
    return replace(checkpoint, files=replace(checkpoint.files, index=index))


def checkpoint_dtype(
    dtype: torch.dtype | str | None, config: Any, index: Index | None = None
) -> torch.dtype:
    """The dtype that is asked for, otherwise that of the checkpoint: of its config, or, as in
    transformers, of its first weights in a floating dtype that models can have."""
    kind: type[DrumlineError] = PlanError
    source = ""
    if dtype in (None, "auto"):
        items = sorted((index or {}).items(), key=lambda item: (item[1].file, item[0]))
        stored = (tensor.torch_dtype for _, tensor in items)
        floats = (one for one in stored if one.is_floating_point and one.itemsize > 1)
        dtype = getattr(config, "dtype", None) or next(floats, torch.float32)
        kind, source = CheckpointError, "config.json: "
    resolved = getattr(torch, str(dtype).removeprefix("torch."), None)
    usual = resolved in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    if not isinstance(resolved, torch.dtype) or not usual:
        raise kind(
            f"{source}dtype={dtype!r} is not one that weights of a model can have, so nothing was "
            "loaded; give float32, bfloat16 or float16."
        )
    return resolved


def _has_files(folder: Path, options: LoadOptions) -> bool:
    """False for a part of what is fetched from the Hub, too, as where a plan was made of it."""
    with contextlib.suppress(OSError, CheckpointError):  # of a folder that is closed to this user
        if file := gguf_path(folder, options.gguf_file):
            weights, needed = [file], [file]
        else:
            weights = [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]
            needed = [folder / "config.json"]
            if is_in_cache(folder):
                read_index(folder)
        if options.adapter is not None:
            needed += [Path(options.adapter, name) for name in (ADAPTER_CONFIG, ADAPTER_FILE)]
        return bool(weights) and all(file.is_file() for file in needed)
    return False


def _config_of(path: str | Path, fields: Any, code: bool) -> Any:
    """The config that rank 0 has read, on a rank that need only have their code.

    fields: of its config.json.
    """
    return (
        read_config(path, adapter="", trust_remote_code=True) if code else config_from_json(fields)
    )


def _described(
    files: CheckpointFiles, generation: Any, adapter: Any, options: LoadOptions, computes: bool
) -> Checkpoint:
    """The checkpoint with the class and the dtype that its config and the options come to.

    computes: quantized weights are ours to compute.
    """
    own = remote_class(files.path, files.config) if options.trust_remote_code else None
    kind = options.cls or own or model_class(files.config)
    options.check_rest(kind)
    dtype = checkpoint_dtype(options.dtype, files.config, files.index)
    if computes:
        files = weight_format("dequantized").read_dequantized(files, dtype)
    settings = None if generation is None else generation_settings(**generation)
    return Checkpoint(files, kind, dtype, settings, adapter)
