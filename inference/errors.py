"""What can go wrong in one model over several ranks.

InferenceError
 |- PlanError       the model does not fit, or a device map names what is not there
 |- CheckpointError a file or tensor is missing, surplus, truncated or of another shape
 |- StageError      a layer raised on the rank that owns it
 `- PeerLost        a rank died or left while others needed it
"""


class InferenceError(RuntimeError):
    """The distributed model could not do what was asked; the message starts with the rank."""


class PlanError(InferenceError, ValueError):
    """No device map exists, or the one given cannot hold; nothing was loaded."""


class CheckpointError(InferenceError):
    """The checkpoint and the model disagree; every rank raises this before serving starts."""


class StageError(InferenceError):
    """A layer raised on its owner; the message carries the remote traceback."""


class PeerLost(InferenceError):
    """A rank is gone, so the model that it held a part of is gone too."""


class Served(SystemExit):
    """The master has left, so this rank, which only served it, has nothing more to do.

    It is how `inference.load` ends on every rank but the master: the rest of an ordinary script is
    the master's. Being a SystemExit it ends the process quietly; catch it to do something else.
    """


def exit_code(error: BaseException) -> int:
    """With which code an exception that nobody catches ends a process."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1
