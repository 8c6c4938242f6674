"""Errors of one model over several ranks.

DrumlineError
 |- PlanError              the model does not fit, or a device map names what is not there
 |- CheckpointError        a file or tensor is missing, truncated or of another shape
 |- StageError             a layer raised on its owner, or returned what was not expected
 |- MissingPackage         a package of an extra is not installed, too old, or lacks a name
 |- RefusedUse             an option or a cache that a split model cannot take; nothing has run
 |- RemoteLayerError       assignment to a layer on another rank (pipeline/unsupported.py)
 |- ServerBusy, RequestTooLarge, ServerStopping  of a server (serving/scheduler.py)
 `- PeerLost               a rank died or left while others needed it: the Coordinator's class
"""

from __future__ import annotations

import contextlib
import functools
import logging
import traceback
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from coordinator import DrumlineError as DrumlineError
from coordinator import PeerLost as PeerLost

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger("drumline")
MAX_ERROR_CHARS = 16_000
"""Characters of an error that are sent to another rank."""


class PlanError(DrumlineError, ValueError):
    """No device map exists, or the user's does not fit; nothing was loaded."""


class CheckpointError(DrumlineError):
    """The checkpoint and the model disagree; every rank raises this before serving starts."""


class RefusedUse(DrumlineError):
    """A model over several ranks is asked for what it cannot do; no layer has run for it."""


class StageError(DrumlineError):
    """A layer raised on its owner, or returned what was not expected; with the traceback there."""


class MissingPackage(DrumlineError, ImportError):
    """A package of the extra `models` is not installed, too old, or lacks what is taken from it."""


class WorkerExit(SystemExit):
    """The end of a rank that only served the master, which has left.

    It is how `drumline.load` ends on every rank but the master: the rest of an ordinary script is
    the master's. Being a SystemExit it ends the process quietly; catch it to do something else.
    """


def short_traceback(function: Callable[P, T]) -> Callable[P, T]:
    """A public function that raises the errors of a caller's mistake as its own.

    Their traceback within drumline goes to the log, at the level DEBUG. That of other errors stays.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (PlanError, CheckpointError, RefusedUse) as error:
            if _is_unexpected(error.__cause__) or _passed_a_script(error):
                raise
            log.debug("%s", error, exc_info=error)
            raise error.with_traceback(None) from None

    return call


def _is_unexpected(cause: BaseException | None) -> bool:
    """True for a cause that is not a file, value or package that somebody gave."""
    own = (DrumlineError, OSError, ValueError, ImportError)
    return cause is not None and not (
        isinstance(cause, own) and not _is_unexpected(cause.__cause__)
    )


def _passed_a_script(error: DrumlineError) -> bool:
    """True for a use of a model within code of the caller's, such as a logits processor."""
    frames = traceback.walk_tb(error.__traceback__ if isinstance(error, RefusedUse) else None)
    names = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in frames}
    return not names <= {"drumline", "transformers", "torch"}


@contextlib.contextmanager
def blamed_on_file(describe: Callable[[Exception], DrumlineError]) -> Iterator[None]:
    """Within, what a parser of another library raises becomes the error of the file that it reads.

    For transformers and tokenizers alone, once our own bounds were checked: they have no exception
    for this. tokenizers raises `Exception` itself, strict configs have a class per check, and code
    that computes with fields raises whatever it comes to, such as ZeroDivisionError.
    """
    try:
        yield
    except (DrumlineError, MemoryError):  # which no file is to blame for, or which names it
        raise
    except Exception as error:
        raise describe(error) from error


def describe_error(error: BaseException) -> str:
    """The last line of a traceback, as text that can be sent to other ranks."""
    try:
        text = str(error)
    except Exception as second:
        text = f"(it has no text: {type(second).__name__})"
    return _sendable(f"{type(error).__name__}: {text}")


def describe_with_traceback(error: BaseException) -> str:
    """An error as text that can be sent to other ranks, with its traceback."""
    trace = "".join(traceback.format_exception(error))
    return f"{describe_error(error)}\nThe traceback on that rank:\n{_sendable(trace)}"


def _sendable(text: str) -> str:
    """The text as UTF-8, which names of files need not be, without its middle if it is long."""
    text = text.encode(errors="backslashreplace").decode()
    half, more = MAX_ERROR_CHARS // 2, len(text) - MAX_ERROR_CHARS
    return text if more <= 0 else f"{text[:half]}\n... {more} characters ...\n{text[-half:]}"


def exit_code(error: BaseException) -> int:
    """The exit code of a process that an uncaught exception ends."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1
