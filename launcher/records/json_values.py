"""JSON with bytes: the values that travel between processes."""

from __future__ import annotations

import base64
import json
from typing import Any

BYTES = "__bytes__"


def dumps(value: Any) -> str:
    """One line of JSON; tuples arrive as lists. Raises TypeError, naming the type, for the rest."""
    return json.dumps(_encoded(value, "the value"))


def loads(text: str | bytes) -> Any:
    """The inverse of dumps."""
    return json.loads(text, object_hook=_decoded)


def _encoded(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {BYTES: base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)):
        return [_encoded(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key == BYTES:
                raise TypeError(
                    f"{where} has the key {key!r}: keys that travel are strings other than "
                    f"{BYTES!r}"
                )
        return {key: _encoded(item, f"{where}[{key!r}]") for key, item in value.items()}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise TypeError(
        f"{where} is a {kind}: only None, bool, int, float, str, bytes, and lists and dicts of "
        "those travel between processes, nothing that would need pickle. Convert it first (a "
        "tensor with .tolist())."
    )


def _decoded(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[BYTES]) if value.keys() == {BYTES} else value
