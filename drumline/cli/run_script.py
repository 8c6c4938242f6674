"""An unmodified transformers script, run with its model over all ranks.

drumline auto -n 2 script.py
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launcher
from drumline.contact.loading.configs import is_config
from drumline.contact.loading.models import loading_replaced, no_code_prompt
from drumline.core.device_map import DeviceMap
from drumline.errors import DrumlineError, exit_code
from drumline.planner.plan import KINDS
from drumline.strategies.load import load
from launcher.cli import forget_torchrun

log = logging.getLogger(__name__)


def run_script(script: str, arguments: list[str]) -> None:
    """Run a script whose from_pretrained(device_map="auto") loads over all ranks. Collective.

    The script runs on rank 0; when it ends, the other ranks end with its exit code.
    """
    forget_torchrun()
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    with no_code_prompt(), models_over_all_ranks():
        runpy.run_path(script, run_name="__main__")


@contextlib.contextmanager
def models_over_all_ranks() -> Iterator[None]:
    """Within, from_pretrained(device_map="auto") loads over every rank.

    It patches transformers for the whole process, which is to run this script alone.
    """
    loaded: list[str] = []  # by all ranks
    served: list[Any] = []  # by other ranks, which end with the script's code

    def load_model(
        cls: Any, plain: Any, pretrained_model_name_or_path: Any, *args: Any, **options: Any
    ) -> Any:
        path = pretrained_model_name_or_path
        if options.get("device_map") not in KINDS:
            return plain(cls, path, *args, **options)
        _check_single(served, path)
        names = [*inspect.signature(cls).parameters][1:]  # of its constructor, after the config
        model = load_over_all_ranks(cls, path, {**options, **dict(zip(names, args, strict=False))})
        model.hf_device_map = devices_by_module(model.device_map)
        loaded.append(str(path))
        if model.traffic is not None:
            served.append(model)
        return model

    code = 0
    try:
        with loading_replaced(load_model):
            yield
    except BaseException as error:
        code = exit_code(error)
        raise
    finally:
        for model in served:
            model.close(code)
        if not loaded and code == 0:
            _warn_of_repeats(launcher.current())


def _warn_of_repeats(info: launcher.LaunchInfo) -> None:
    if info.rank == 0 and info.world_size > 1:
        log.warning(
            "rank 0: the script loaded no model by from_pretrained(device_map='auto'), so each of "
            "%d ranks has run the whole of it.",
            info.world_size,
        )


def _check_single(served: list[Any], path: Any) -> None:
    if served:
        raise DrumlineError(
            f"rank 0: the script loads {str(path)!r} with a device_map, but the other ranks serve "
            "its first model until the script ends; load the second model without a device_map, "
            "or in another script."
        )


def devices_by_module(device_map: DeviceMap) -> dict[str, str]:
    """The device of each module as transformers writes it, those of rank 0 first: a pipeline takes
    the first one. For rank 1 it is "cpu:1", whatever its device: torch takes that for the CPU here,
    from where tensors reach all ranks, and a Trainer for a device of its own, which it is.
    """
    places = sorted(device_map.places.items(), key=lambda item: item[1][0])
    return {name: f"cpu:{rank}" if rank else device for name, (rank, device) in places}


def load_over_all_ranks(cls: Any, path: Any, options: dict[str, Any]) -> Any:
    """The model that from_pretrained returns with these options, over all ranks.

    Some options belong to the config, such as attn_implementation; AutoModel has moved them there.
    """
    folder = Path(path, options.pop("subfolder", None) or "")
    config = options.pop("config", None)
    dtype = options.pop("dtype", options.pop("torch_dtype", None))
    placement = {key: options.pop(key) for key in ("device_map", "max_memory") if key in options}
    if not is_config(config) and os.path.isfile(folder / "config.json"):
        read_config = cls.config_class.from_pretrained
        config, options = read_config(config or folder, return_unused_kwargs=True, **options)
    return load(folder, cls=cls, dtype=dtype, config=config, **placement, **options)
