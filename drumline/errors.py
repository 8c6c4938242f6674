"""What can go wrong in one model over several ranks.

DrumlineError
 |- PlanError              the model does not fit, or a device map names what is not there
 |- CheckpointError        a file or tensor is missing, surplus, truncated or of another shape
 |- StageError             a layer raised on the rank that owns it
 |- RemoteLayerError       assignment to a layer on another rank (pipeline/unsupported.py)
 |- ServerBusy, RequestTooLarge  the queue of a server is full (serving/scheduler.py)
 `- PeerLost               a rank died or left while others needed it: the Coordinator's class
"""

from __future__ import annotations

import traceback

from coordinator import DrumlineError, PeerLost

__all__ = [
    "CheckpointError",
    "DrumlineError",
    "PeerLost",
    "PlanError",
    "StageError",
    "WorkerExit",
    "exit_code",
    "said",
    "story",
]

MOST_TOLD = 16_000
"""Characters of a text about an exception that go to another rank."""


class PlanError(DrumlineError, ValueError):
    """No device map exists, or the one given cannot hold; nothing was loaded."""


class CheckpointError(DrumlineError):
    """The checkpoint and the model disagree; every rank raises this before serving starts."""


class StageError(DrumlineError):
    """A layer raised on its owner; the message carries the remote traceback."""


class WorkerExit(SystemExit):
    """The master has left, so this rank, which only served it, has nothing more to do.

    It is how `drumline.load` ends on every rank but the master: the rest of an ordinary script is
    the master's. Being a SystemExit it ends the process quietly; catch it to do something else.
    """


def said(error: BaseException) -> str:
    """The last line of a traceback, to be told to other ranks."""
    try:
        text = str(error)
    except Exception as second:
        text = f"(its own text cannot be had: {type(second).__name__})"
    return _told(f"{type(error).__name__}: {text}")


def story(error: BaseException) -> str:
    """The same, and where it was raised."""
    trace = "".join(traceback.format_exception(error))
    return f"{said(error)}\nThe traceback over there:\n{_told(trace)}"


def _told(text: str) -> str:
    """The text if it is UTF-8, which names of files need not be, and not endless."""
    text = text.encode(errors="backslashreplace").decode()
    half, more = MOST_TOLD // 2, len(text) - MOST_TOLD
    return text if more <= 0 else f"{text[:half]}\n... {more} characters ...\n{text[-half:]}"


def exit_code(error: BaseException) -> int:
    """With which code an exception that nobody catches ends a process."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1
