"""Verbs over the tables by which transformers makes its weights of those in a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from drumline.contact import transformers_api as api


def weight_processor(architecture: str, fields: Mapping[str, Any]) -> Any:
    """The object that lays weights of a GGUF architecture out anew. fields: of the config."""
    kind = api.TENSOR_PROCESSORS.get(architecture, api.TensorProcessor)
    return kind(config=fields)


def names_by_stored(model: nn.Module, processor: Any) -> dict[str, str]:
    """The names of a model's tensors by those in the file; NotImplementedError if unknown."""
    return dict(api.get_gguf_hf_weights_map(model, processor))
