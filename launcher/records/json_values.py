"""Values that may travel between processes: JSON, and bytes."""

from __future__ import annotations

import base64
import json
from typing import Any

BYTES = "__bytes__"


def dumps(value: Any) -> str:
    """value as one line of JSON; tuples arrive as lists.

    Raises TypeError, naming the type, for what JSON has not.
    """
    return json.dumps(_plain(value, "the value"))


def loads(text: str | bytes) -> Any:
    """The inverse of dumps."""
    return json.loads(text, object_hook=_bytes_back)


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {BYTES: base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {_key(key, where): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise TypeError(
        f"{where} is a {kind}: between processes travel None, bool, int, float, str, bytes, and "
        "lists and dicts of those, nothing that would need pickle. Convert it first (a tensor "
        "with .tolist())."
    )


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str) or key == BYTES:
        raise TypeError(
            f"{where} has the key {key!r}: keys that travel are strings other than {BYTES!r}"
        )
    return key


def _bytes_back(found: dict[str, Any]) -> Any:
    return base64.b64decode(found[BYTES]) if found.keys() == {BYTES} else found
