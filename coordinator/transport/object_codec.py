"""Values as bytes: None, bool, int, float, str, bytes, and lists and dicts of them (msgpack).

What cannot be sent travels as a note saying so. Its rank takes part in the call all the same, so
that nobody waits for it in vain.
"""

from __future__ import annotations

from typing import Any

import msgpack

from coordinator.control.framing import pack, unpack
from coordinator.errors import CoordinatorError

UNSENDABLE = b"\xc1"  # the byte that no msgpack message begins with, then why
ERRORS = (TypeError, ValueError, OverflowError, msgpack.PackException)


def packed(value: Any, rank: int) -> bytes:
    """The value, or the note; rank: of the launch, for the note to name it."""
    try:
        return pack(value)
    except ERRORS as error:
        why = f"rank {rank} gave a {type(value).__name__} that cannot be sent ({error})"
        return UNSENDABLE + why.encode()


def why_unsendable(data: bytes) -> str:
    """Why there is no value in it; nothing if there is one."""
    is_note = data[:1] == UNSENDABLE
    return data[1:].decode() if is_note else ""


def unpacked(data: bytes, rank: int) -> Any:
    """The value. Raises CoordinatorError if it is a note, or has what cannot be read again."""
    why = why_unsendable(data)
    if why:
        raise CoordinatorError(
            f"rank {rank}: {why}. Give None, bool, int, float, str, bytes, lists or dicts of them, "
            "or send bytes of your own making."
        )
    try:
        return unpack(data)
    except (TypeError, ValueError) as error:  # of a tuple as a key, which arrives as a list
        raise CoordinatorError(
            f"rank {rank}: a value cannot be read ({error}). Give dicts other keys than tuples."
        ) from error
