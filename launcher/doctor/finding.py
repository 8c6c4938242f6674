"""One thing that the doctor found, and what to type if it is wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """ok: None says that it is not there, and need not be. remedy: a line to type, or to do."""

    area: str
    name: str
    ok: bool | None
    found: str
    remedy: str = ""


def unless(wrong: bool, remedy: str) -> str:
    """The remedy, if there is something to be remedied."""
    return remedy if wrong else ""
