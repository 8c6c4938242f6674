"""Which call a rank is in, and where in the user's code it was made."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_HERE = str(Path(__file__).parent)


class Call(NamedTuple):
    """The number-th collective call of this rank on this Coordinator."""

    name: str
    number: int
    where: str

    def __str__(self) -> str:
        return f"{self.name} #{self.number} ({self.where})"


def caller() -> str:
    """file.py:line of the nearest frame outside this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def _is_ours(filename: str) -> bool:
    """Frames between the user's call and ours are not the user's either."""
    return filename.startswith(_HERE) or filename.endswith(("contextlib.py", "launcher/tracing.py"))
