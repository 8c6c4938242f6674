"""One use of a model over all ranks, and what it took of each rank's memory.

tokens, peaks = with_model("checkpoint", lambda model: model.generate(prompt))
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from coordinator import Coordinator
from drumline.checkpoint.config_files import read_processor, read_tokenizer
from drumline.checkpoint.json_files import gguf_path
from drumline.core.device_map import format_nbytes
from drumline.errors import DrumlineError, WorkerExit
from drumline.planner.load_options import LoadOptions
from drumline.planner.memory import local_accelerators
from drumline.strategies.load import Memory, load
from drumline.strategies.opening import describe_checkpoint, folder_on_all_ranks

T = TypeVar("T")
Peaks = list[dict[str, int]]
"""By rank: the most bytes of each of its devices that it held at a time."""


def read_generator(path: str | Path, num_tokens: int = 0, **options: Any) -> Any:
    """The config of a model that generates text, num_tokens with the prompt.

    options: of `load`.

    Raises DrumlineError for one that does not, or has fewer positions.
    """
    checkpoint = describe_checkpoint(path, LoadOptions(**options), compares=False)
    config, kind = checkpoint.config, checkpoint.kind
    if not kind.can_generate():
        raise DrumlineError(
            f"rank 0: {path} holds a {kind.__name__}, which does not generate text; give one that "
            "does, or call this one in a script of your own."
        )
    most = num_positions(config)
    if num_tokens > most and not config.is_encoder_decoder:
        raise DrumlineError(
            f"rank 0: {num_tokens} tokens were asked for, prompt and new ones, but {path} has "
            f"positions for {most}; ask for fewer."
        )
    return config


def read_model_tokenizer(path: str | Path, **options: Any) -> Any:
    """The tokenizer of a model. options: of `load`."""
    request = LoadOptions(**options)
    return read_tokenizer(gguf_path(path, request.gguf_file) or path, request.trust_remote_code)


def read_model_processor(path: str | Path, **options: Any) -> Any:
    """The processor of a model for images; None if it takes none. options: of `load`."""
    return read_processor(path, LoadOptions(**options).trust_remote_code)


def num_positions(config: Any) -> int:
    """The most tokens of a row; a config may say in several ways that there is no limit."""
    count: int = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    return count if count > 0 else sys.maxsize  # XLNet's is -1


def with_model(
    path: str,
    work: Callable[[Any], T],
    memory: Memory | None = None,
    before: Callable[[Path], Any] = lambda folder: None,
    **options: Any,
) -> tuple[T, Peaks]:
    """The result of work(model) on the master, and the peaks of all ranks. Collective.

    The other ranks serve, and end with WorkerExit as they do in load, which takes the options.
    before: called on the master with the folder of the model, before anything is loaded.
    """
    with Coordinator() as coor:
        folder, _ = folder_on_all_ranks(coor, path, options, before)
        try:
            with load(folder, coor=coor, max_memory=memory, **options) as model:
                result = work(model)
        except WorkerExit as served:
            if not served.code:
                coor.gather_object(_peak())
            raise
        return result, coor.gather_object(_peak()) or []


def _peak() -> dict[str, int]:
    """Of this process: resident memory (getrusage(2) has it in KiB), and that of accelerators."""
    nbytes_by_device = {"cpu": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    for device in local_accelerators():
        if nbytes := torch.accelerator.max_memory_allocated(device):
            nbytes_by_device[str(device)] = nbytes
    return nbytes_by_device


def describe_peaks(peaks: Peaks) -> list[str]:
    """For each rank, such as "310 MiB" or "1.2 GiB, cuda:0 14 GiB"."""
    return [
        ", ".join(
            (f"{device} " if device != "cpu" else "") + format_nbytes(n) for device, n in of.items()
        )
        for of in peaks
    ]


def describe_traffic(traffic: tuple[int, int] | None) -> str:
    """The bytes of a hop from the master; "-" where nothing is sent."""
    if traffic is None or not traffic[0]:
        return "-"
    return format_nbytes(traffic[1] // traffic[0])
