"""Errors of the ranks, and the base of those of the layers above.

DrumlineError (RuntimeError)  every error of the layers above the launcher
 |- CoordinatorError          the ranks could not agree
 |   |- CoordinatorTimeout    a deadline passed (also a TimeoutError)
 |   `- PeerLost              a rank died, left or closed; the one class of it in all layers
 |- CommunicatorError         communicator/errors.py
 `- PlanError, ...            drumline/errors.py
"""

from __future__ import annotations


class DrumlineError(RuntimeError):
    """The base of every error of the layers above the launcher; its text starts with the rank."""


class CoordinatorError(DrumlineError):
    """The ranks could not agree. The message starts with the rank that says so."""


class CoordinatorTimeout(CoordinatorError, TimeoutError):
    """A deadline passed. The message names the ranks that did not come."""


class PeerLost(CoordinatorError):
    """A rank died or left in the middle of a call. The message names it."""


KINDS: dict[str, type[CoordinatorError]] = {
    kind.__name__: kind for kind in (CoordinatorError, CoordinatorTimeout, PeerLost)
}
