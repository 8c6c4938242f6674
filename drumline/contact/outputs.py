"""Outputs of transformers' models, as drumline takes them apart and builds them again."""

from __future__ import annotations

from typing import Any, TypeAlias

from drumline.contact import transformers_api as api

Output: TypeAlias = api.ModelOutput
"""A dict of a model's outputs, each with a field of its own."""


def is_output(value: Any) -> bool:
    return isinstance(value, api.ModelOutput)
