"""Errors of a communicator.

DrumlineError
 |- CommunicatorError          the library, the system or the ranks' agreement failed
 |   |- CommunicatorTimeout    a rank did not arrive in time (also a TimeoutError)
 |   `- Unsupported            this backend cannot do that (also a NotImplementedError)
 `- PeerLost                   a rank died, closed or gave up: the Coordinator's class

A caller's mistake that is found before anything moves is a ValueError or TypeError.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

from coordinator import DrumlineError, PeerLost

__all__ = ["CommunicatorError", "CommunicatorTimeout", "DrumlineError", "PeerLost", "Unsupported"]


class CommunicatorError(DrumlineError):
    """A call of a communicator failed."""


class CommunicatorTimeout(CommunicatorError, TimeoutError):
    """A rank did not arrive within `timeout_s`; the text names the call, and the rank if known."""


class Unsupported(CommunicatorError, NotImplementedError):
    """The backend does not offer this operation, dtype or placement.

    reasons: where no backend can be selected, each reason that a rank gave.
    """

    def __init__(self, text: str = "", reasons: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.reasons = tuple(reasons)


WORK_ERRORS = (CommunicatorError, Unsupported)
"""The errors of ranks of which another failed, see `Coordinator.run_on_all_ranks`."""

AnyError = TypeVar("AnyError", bound=Exception)


def with_text(error: AnyError, text: str) -> AnyError:
    """A copy of the error with another text, and the same class and data."""
    changed = copy.copy(error)
    changed.args = (text,)
    return changed
