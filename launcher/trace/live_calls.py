"""Counts of a rank's calls, and recordings of them, while somebody looks and only then."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from launcher.launch_info import LaunchInfo
from launcher.trace.recorder import Recorder

Names = Iterable[str] | Mapping[str, str]


class Observed(Protocol):
    """Something whose calls a viewer may look at; it may be gone, as target() tells."""

    def target(self) -> Any: ...

    def watch(self, recorder: Recorder) -> None:
        """Have the recorder note each call from now on."""
        ...

    def unwatch(self) -> None: ...


class LiveCalls:
    """The calls of a rank that a viewer may look at. While nobody looks, they are as they were.

    turn: of the thread that may watch.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self._lock = threading.RLock()  # of the following
        self._observed: list[Observed] = []
        self._counter: _Counter | None = None

    def follow(self, target: Any, names: Names, kind: str, **extra_args: Any) -> None:
        """Offer calls of these methods, as Recorder.follow does."""
        self.offer(_Followed(target, names, kind, extra_args))

    def offer(self, observed: Observed) -> None:
        """Have it watched while somebody looks, as long as its target exists."""
        with self._lock:
            alive = [other for other in self._observed if other.target() is not None]
            self._observed = [*alive, observed]
            if self._counter is not None:
                observed.watch(self._counter)

    def watch(self, info: LaunchInfo, folder: str = "") -> None:
        """Count from now on; record into the folder as long as one is named."""
        with self._lock:
            if self._counter is None:
                self._counter = _Counter(info)
                for observed in self._observed:
                    observed.watch(self._counter)
        self._counter.record_into(folder)

    def unwatch(self) -> None:
        """Give every target its own methods back."""
        if self._counter is not None:
            self._counter.record_into("")
            with self._lock:
                self._counter = None
                for observed in self._observed:
                    observed.unwatch()

    def counts(self) -> dict[str, list[int]]:
        """Calls, bytes and tokens of each operation since somebody began to look."""
        return {} if self._counter is None else dict(self._counter.counts)

    def pending(self) -> list[Any]:
        """The call that the rank is in for longest: name, number, where, since; or nothing."""
        targets = [observed.target() for observed in self._observed]
        looks = [getattr(target, "pending_call", lambda: None) for target in targets]
        calls = [call for look in looks if (call := look()) is not None]
        return list(min(calls, key=lambda call: call.since, default=()))[:4]


class _Followed:
    """Methods of an object that a recorder replaces while somebody looks."""

    def __init__(self, target: Any, names: Names, kind: str, extra_args: dict[str, Any]) -> None:
        self.target = weakref.ref(target)
        self._names, self._kind, self._extra_args = names, kind, extra_args
        self._before: dict[str, Any] = {}  # attributes of the target

    def watch(self, recorder: Recorder) -> None:
        target = self.target()
        if target is not None and not self._before:  # offered as somebody begins to look
            self._before = {name: vars(target).get(name) for name in self._names}
            recorder.follow(target, self._names, self._kind, **self._extra_args)

    def unwatch(self) -> None:
        """Give the target back its own methods."""
        target, before, self._before = self.target(), self._before, {}
        for name, attribute in before.items() if target is not None else ():
            if attribute is None:
                delattr(target, name)
            else:  # at once: the rank calls it meanwhile
                setattr(target, name, attribute)


class _Counter(Recorder):
    """A recorder that counts, and writes only while there is a folder for it."""

    def __init__(self, info: LaunchInfo) -> None:
        self._info, self._calls = info, {}
        self.counts: dict[str, list[int]] = {}
        self._folder = ""
        self._file_recorder: Recorder | None = None

    def record_into(self, folder: str) -> None:
        """Record into a folder from now on; "" for none."""
        if folder == self._folder:
            return
        self._folder, previous = folder, self._file_recorder
        self._file_recorder = None
        if folder:
            with contextlib.suppress(OSError):  # the viewer has gone, and its folder with it
                self._file_recorder = Recorder(Path(folder), self._info)
        if previous is not None:
            previous.close()

    def _add_span(self, name: str, kind: str, start: int, end: int, args: dict[str, Any]) -> None:
        num_calls, nbytes, num_tokens = self.counts.get(name, (0, 0, 0))
        sizes = (nbytes + args.get("bytes", 0), num_tokens + args.get("tokens", 0))
        self.counts[name] = [num_calls + 1, *sizes]
        if (recorder := self._file_recorder) is not None:
            recorder._add_span(name, kind, start, end, args)
