"""What a communicator raises.

DrumlineError
 |- CommunicatorError          the library, the system or the ranks' agreement failed
 |   |- CommunicatorTimeout    a rank did not arrive in time (also a TimeoutError)
 |   `- Unsupported            this backend cannot do that (also a NotImplementedError)
 `- PeerLost                   a rank died, closed or gave up: the Coordinator's class

A caller's mistake that is found before anything moves is a ValueError or TypeError.
"""

from coordinator import DrumlineError, PeerLost

__all__ = ["CommunicatorError", "CommunicatorTimeout", "DrumlineError", "PeerLost", "Unsupported"]


class CommunicatorError(DrumlineError):
    """A communicator could not do what was asked of it."""


class CommunicatorTimeout(CommunicatorError, TimeoutError):
    """Somebody did not arrive within `timeout_s`; the text says who and in which call."""


class Unsupported(CommunicatorError, NotImplementedError):
    """The backend does not offer this operation, dtype or placement."""
