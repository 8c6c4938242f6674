"""Which cases of a test `make test` runs, and which only `make soak` does."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def soak(*values: Any) -> Any:
    """A case that only `make soak` runs: another one of the test covers nearly as much."""
    return pytest.param(*values, marks=pytest.mark.soak)


def soak_all(cases: Iterable[Any], but: Collection[Any] = ()) -> list[Any]:
    """Cases that only `make soak` runs, except those that are named."""
    return [case if case in but else soak(case) for case in cases]
