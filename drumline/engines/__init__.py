"""Adapters by which inference engines work on the lower layers, unchanged."""

from __future__ import annotations

import re

from communicator import Unsupported

Version = tuple[int, ...]


def check_version(engine: str, version: str, first: Version, after_last: Version) -> None:
    """Raise Unsupported for an engine whose interface the adapter was not written for."""
    numbers = re.match(r"\d+(\.\d+)+", version)
    if numbers is not None and first <= tuple(map(int, numbers[0].split("."))) < after_last:
        return
    variable = f"DRUMLINE_{engine.upper()}"
    low, high = (".".join(map(str, numbers)) for numbers in (first, after_last))
    raise Unsupported(
        f"{variable}=1 with {engine} {version}: this drumline works with {engine} >= {low}, "
        f"< {high}. Install such a version, or unset {variable} to run {engine} without drumline."
    )
