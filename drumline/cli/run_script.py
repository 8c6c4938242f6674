"""A transformers script that knows nothing of ranks, run over all of them.

python -m drumline run -n 2 script.py
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from drumline.core.meta_init import no_code_prompt
from drumline.errors import DrumlineError, exit_code
from drumline.strategies.load import load

PLANS = ("auto", "balanced", "sequential", "fastest")


def run_script(script: str, arguments: list[str]) -> None:
    """Run a script of the user, with a model over all ranks where it asks for a device map.

    What ends the script on the master ends the other ranks with the same exit code.
    """
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    with no_code_prompt(), models_over_all_ranks():
        runpy.run_path(script, run_name="__main__")


@contextlib.contextmanager
def models_over_all_ranks() -> Iterator[None]:
    """Within this block from_pretrained(device_map="auto") loads over every rank.

    For a process that runs one script: it changes transformers for the whole process.
    """
    original = PreTrainedModel.__dict__["from_pretrained"]
    loaded: list[Any] = []

    def from_pretrained(cls: Any, path: Any, *args: Any, **options: Any) -> Any:
        if options.get("device_map") not in PLANS:
            return original.__func__(cls, path, *args, **options)
        _refuse_second(loaded, path)
        loaded.append(load_everywhere(cls, path, options))
        return loaded[0]

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    code = 0
    try:
        yield
    except BaseException as error:
        code = exit_code(error)
        raise
    finally:
        PreTrainedModel.from_pretrained = original
        for model in loaded:
            model.close(code)


def _refuse_second(loaded: list[Any], path: Any) -> None:
    if loaded and loaded[0].traffic is not None:
        raise DrumlineError(
            f"rank 0: the script loads {str(path)!r} with a device_map, but the other ranks serve "
            "its first model until the script ends; load the second without a device_map, here, "
            "or in a script of its own."
        )


def load_everywhere(cls: Any, path: Any, options: dict[str, Any]) -> Any:
    """What from_pretrained with these options gives, over all ranks.

    Some of them are the config's, as attn_implementation is, and AutoModel has put them there.
    """
    folder = Path(path, options.pop("subfolder", None) or "")
    config = options.pop("config", None)
    dtype = options.pop("dtype", options.pop("torch_dtype", None))
    known = {key: options.pop(key) for key in ("device_map", "max_memory") if key in options}
    if not isinstance(config, PreTrainedConfig) and (folder / "config.json").is_file():
        read = cls.config_class.from_pretrained
        config, options = read(config or folder, return_unused_kwargs=True, **options)
    return load(folder, cls=cls, dtype=dtype, config=config, **known, **options)
