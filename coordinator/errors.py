"""What can go wrong among ranks.

- CoordinatorError (RuntimeError)
  - CoordinatorTimeout (also TimeoutError): a deadline passed
  - PeerLost: a rank died or left, so that the call cannot end
"""

from __future__ import annotations


class CoordinatorError(RuntimeError):
    """The ranks could not agree. The message starts with the rank that says so."""


class CoordinatorTimeout(CoordinatorError, TimeoutError):
    """A deadline passed. The message names the ranks that did not come."""


class PeerLost(CoordinatorError):
    """A rank died or left in the middle of a call. The message names it."""


KINDS: dict[str, type[CoordinatorError]] = {
    kind.__name__: kind for kind in (CoordinatorError, CoordinatorTimeout, PeerLost)
}
