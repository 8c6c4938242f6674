"""What a communicator raises.

CommunicatorError         the library, the system or the ranks' agreement failed
|-- CommunicatorTimeout   somebody did not arrive in time (also a TimeoutError)
|-- PeerLost              somebody died, closed or gave up
`-- Unsupported           this backend cannot do that (also a NotImplementedError)

A caller's mistake that is found before anything moves is a ValueError or TypeError.
"""


class CommunicatorError(RuntimeError):
    """A communicator could not do what was asked of it."""


class CommunicatorTimeout(CommunicatorError, TimeoutError):
    """Somebody did not arrive within `timeout_s`; the text says who and in which call."""


class PeerLost(CommunicatorError):
    """A peer died, closed its communicator or gave up; the text says which."""


class Unsupported(CommunicatorError, NotImplementedError):
    """The backend does not offer this operation, dtype or placement."""
