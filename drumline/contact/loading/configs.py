"""Verbs over configs, generation settings and tokenizers, as transformers reads and uses them."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drumline.contact import transformers_api as api

FLOAT_TAG = "__float__"
"""The only key of the object that transformers writes into JSON for a number such as infinity."""


def read_config(path: str | Path, **options: Any) -> Any:
    """The config of a folder with a config.json; raises whatever its kind of config does."""
    return api.AutoConfig.from_pretrained(path, **options)


def config_of_gguf(summary: bytes, folder: Path) -> Any:
    """The config of a file of that folder, of its summary, which is a GGUF file in memory."""
    with open(os.memfd_create("summary.gguf"), "wb") as file:
        file.write(summary)
        file.flush()
        config = read_config("/dev/fd", gguf_file=str(file.fileno()))
    config.name_or_path = str(folder)
    return config


def is_config(value: Any) -> bool:
    return isinstance(value, api.PreTrainedConfig)


def knows_model_type(model_type: str) -> bool:
    """True if transformers itself has a config of this type."""
    return model_type in api.CONFIG_MAPPING


def config_from_fields(fields: Mapping[str, Any]) -> Any:
    """The config with the fields of a config.json, of a type that transformers knows."""
    plain = json.loads(json.dumps(fields), object_hook=_special_float)
    return api.CONFIG_MAPPING[plain["model_type"]].from_dict(plain)


def _special_float(fields: dict[str, Any]) -> Any:
    """JSON has no infinity; float() reads "Infinity", "-Infinity" and "NaN"."""
    value = fields.get(FLOAT_TAG)
    return float(value) if len(fields) == 1 and isinstance(value, str) else fields


def attention_of(config: Any) -> str | None:
    """The name in transformers of the attention that models of this config compute."""
    name: str | None = config._attn_implementation
    return name


def experts_of(config: Any) -> str:
    """The name in transformers of the way in which experts are run."""
    return str(getattr(config, "_experts_implementation", None) or "eager")


def with_implementations(config: Any, options: Mapping[str, Any]) -> Any:
    """A copy of the config with the attention and experts that options of from_pretrained name."""
    own = copy.deepcopy(config)
    for name in ("attn_implementation", "experts_implementation"):
        if options.get(name) is not None:
            setattr(own, f"_{name}", options[name])
    return own


def implementations_of(config: Any) -> str:
    """The attention and experts of the config and of those in it, which its JSON leaves out."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    return str([(attention_of(part), experts_of(part)) for part in parts if part is not None])


def read_generation_settings(path: str | Path, is_in_config: bool = False) -> Any:
    """The generation settings of a folder; is_in_config: those of older ones, in config.json."""
    older = {"config_file_name": "config.json", "_from_model_config": True}
    return api.GenerationConfig.from_pretrained(path, **(older if is_in_config else {}))


def generation_settings(**fields: Any) -> Any:
    """Generation settings by name, such as max_new_tokens, as generate() and files have them."""
    return api.GenerationConfig(**fields)


@contextlib.contextmanager
def without_recommended_settings(model: Any) -> Iterator[None]:
    """Let generate() use what it is given alone, and nothing that the checkpoint recommends."""
    recommended, model.generation_config = model.generation_config, generation_settings()
    try:
        yield
    finally:
        model.generation_config = recommended


def read_tokenizer(folder: str | Path, config: Any = None, **options: Any) -> Any:
    """The tokenizer of a folder; raises whatever its files come to.

    config: of the model in a GGUF file, of whose words it would otherwise be made as well.
    """
    if config is not None:
        own = {"tokenizer_type": config.model_type, **options}
        with contextlib.suppress(ValueError):  # of a type that has no tokenizer of its own
            return api.AutoTokenizer.from_pretrained(folder, **own)
    return api.AutoTokenizer.from_pretrained(folder, **options)


def read_processor(folder: str | Path, **options: Any) -> Any:
    """The processor of a folder; raises whatever its files come to, or ImportError."""
    return api.processor_class().from_pretrained(folder, **options)


def response_template(tokenizer: Any, model_type: str) -> dict[str, Any] | None:
    """The template that tells calls and reasoning apart: the tokenizer's, or the usual one of
    this type of model; None if there is none."""
    model = types.SimpleNamespace(config=types.SimpleNamespace(model_type=model_type))
    template: dict[str, Any] | None = api.response_template(tokenizer, model)
    return template


def lacks_window(config: Any) -> bool:
    """True if layers of a decoder are to keep a window of tokens, and no size of it is given."""
    decoder = config.get_text_config(decoder=True)
    has_windows = "sliding_attention" in (getattr(decoder, "layer_types", None) or ())
    return has_windows and getattr(decoder, "sliding_window", 0) is None


def hoist_quantization(config: Any) -> Any:
    """The config, which itself says how the weights of its decoder are quantized, as transformers
    takes it."""
    decoder = config.get_text_config(decoder=True)
    fields = decoder if isinstance(decoder, dict) else getattr(decoder, "__dict__", {})
    own = fields.pop("quantization_config", None)
    if own is not None and getattr(config, "quantization_config", None) is None:
        config.quantization_config = own
    return config


def without_quantization(config: Any) -> Any:
    """The config of the same model with plain weights."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain
