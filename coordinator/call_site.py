"""The call that a rank is in: its name and number, its line in the user's code, its deadline."""

from __future__ import annotations

import os
import sys
import time
import traceback
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_new = tuple.__new__
_HERE = f"{Path(__file__).parent}/"


class CallSite(NamedTuple):
    """The number-th call of this rank on this Coordinator."""

    name: str
    number: int
    where: str

    def __str__(self) -> str:
        return f"{self.name} #{self.number} ({self.where})"


class CallStatus(NamedTuple):
    """The call that a rank was last seen in, and how long ago it entered or left it."""

    name: str
    number: int
    where: str
    ago_s: float

    @property
    def call(self) -> str:
        return str(CallSite(*self[:3]))

    def __str__(self) -> str:
        ago = f"{self.ago_s:.1f}" if self.ago_s < 10 else f"{self.ago_s:.0f}"
        return f"last seen {ago} s ago in {self.name} #{self.number}, {self.where}"


class PendingCall(NamedTuple):
    """A call that this rank is in, and its one deadline."""

    name: str
    number: int
    where: str
    since: float
    timeout_s: float

    @property
    def call(self) -> CallSite:
        return CallSite(self.name, self.number, self.where)

    @property
    def deadline(self) -> float:
        return self.since + self.timeout_s

    @property
    def left_s(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.since

    def restarted(self, timeout_s: float | None = None) -> PendingCall:
        """This call with all its time, or another time, from now on."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        return self._replace(since=time.monotonic(), timeout_s=limit_s)


def begin_call(name: str, number: int, timeout_s: float) -> PendingCall:
    """A call that begins now, where the user made it."""
    # As PendingCall(...), in half the time: every call begins here.
    return _new(PendingCall, (name, number, caller(depth=3), time.monotonic(), timeout_s))


def caller(depth: int = 1) -> str:
    """file.py:line of the nearest frame outside this package; depth: frames that are not asked."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        if name := _outside_name(frame.f_code.co_filename):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


@lru_cache(maxsize=1024)
def _outside_name(filename: str) -> str:
    """The name without its folder; "" for a file of ours.

    In Unicode: a name on disk may have other bytes, which cannot be sent.
    """
    basename = os.fsencode(filename.rpartition("/")[2]).decode(errors="replace")
    return "" if _is_ours(filename) else basename


def _is_ours(filename: str) -> bool:
    """True for a file of this package, or between the user's call and it."""
    return filename.startswith(_HERE) or filename.endswith(
        ("/contextlib.py", "/launcher/trace/recorder.py")
    )


def traceback_of(error: BaseException) -> str:
    """The traceback of an error and its causes, without the frames of this package."""
    whole = traceback.TracebackException.from_exception(error)
    left: list[traceback.TracebackException | None] = [whole]
    while left:
        part = left.pop()
        if part is not None:
            frames = [frame for frame in part.stack if not _is_ours(frame.filename)]
            part.stack = traceback.StackSummary.from_list(frames)
            left += [part.__cause__, part.__context__]
    return "".join(whole.format())
