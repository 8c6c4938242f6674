"""The kinds of values that fields of generation_config.json have.

misfit({"num_beams": "2"})                 # "num_beams='2', which is not an integer of 32 bits"
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MAX_INTEGER = (1 << 31) - 1
MAX_INT64 = (1 << 63) - 1


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) <= MAX_INTEGER


def _is_number(value: Any) -> bool:
    """True for what torch can multiply with."""
    is_integer = type(value) is int and abs(value) <= MAX_INT64
    return is_integer or (type(value) is float and math.isfinite(value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list_of(accepts: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, list) and all(map(accepts, value))


def _or_list_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def is_one_or_list(value: Any) -> bool:
        return accepts(value) or (value != [] and _is_list_of(accepts, value))

    return is_one_or_list


def _is_list_of_integers(value: Any) -> bool:
    return _is_list_of(_is_integer, value)


def _is_decay(value: Any) -> bool:
    return _is_list_of(_is_number, value) and len(value) == 2


def _is_bias(value: Any) -> bool:
    """True for the tokens of a sequence with a number, which is finite in 32 bits, too."""
    is_pair = isinstance(value, list) and len(value) == 2 and _is_number(value[1])
    return is_pair and bool(value[0]) and _is_list_of_integers(value[0]) and abs(value[1]) <= 1e30


KINDS: Mapping[str, Callable[[Any], bool]] = {
    "true or false": lambda value: isinstance(value, bool),
    "true, false or a text": lambda value: isinstance(value, bool | str),
    "an integer of 32 bits": _is_integer,
    "an integer of 32 bits, or a list of at least one": _or_list_of(_is_integer),
    "a list of integers of 32 bits": _is_list_of_integers,
    "a positive integer of 32 bits": lambda value: _is_integer(value) and value > 0,
    "a finite number of 64 bits": _is_number,
    "a finite number, 0 or at least 1e-30": lambda v: _is_number(v) and not 0 < abs(v) < 1e-30,
    "a text": _is_text,
    "a text, or a list of at least one": _or_list_of(_is_text),
    "a list of two numbers": _is_decay,
    "a list": lambda value: isinstance(value, list),
    "a list of pairs of tokens and a bias up to 1e30": lambda value: _is_list_of(_is_bias, value),
    "an object": lambda value: isinstance(value, dict),
}

OPTIONS: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("generation_options.json").read_text()
)
"""The options of generate() that are known. kind: of the value that generation_config.json may have
for it; null is none. usual: its values that leave the rows of a batch apart, where others may
couple them; without it, it concerns each row by itself, or all in the same way."""


def misfit(content: Mapping[str, Any]) -> str:
    """A field of generation_config.json that is not of its kind, in words; "" if all are.

    generate() reads them one by one, and comes to whatever their values do there.
    """
    for name, option in OPTIONS.items():
        kind, value = option.get("kind"), content.get(name)
        if kind is not None and value is not None and not KINDS[kind](value):
            return f"{name}={value!r:.60}, which is not {kind}"
    return ""
