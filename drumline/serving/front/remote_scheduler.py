"""The scheduler of ranks that may have to be started again, as the front sees it.

scheduler = RemoteScheduler(limits)
scheduler.resume(info, send)          # the ranks are ready: send(message) reaches rank 0
scheduler.receive(message)            # a token, from rank 0
scheduler.suspend()                   # a rank has failed: what is open waits for resume()

Messages are JSON. To rank 0: {"start": [sequence, ...]}, and {"cancel": id}, for sequences that end
here alone: at a stop string, or without a client. From it: {"id", "token", "logprob", "batch"}, and
{"id", "error"} for what would be an error on any ranks.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from drumline.errors import DrumlineError, PeerLost
from drumline.serving.sampling import TokenLogprob
from drumline.serving.scheduler import (
    BatchScheduler,
    Generation,
    ServerStopping,
    ServingLimits,
    check_queue,
)

Message = dict[str, Any]


class RemoteScheduler:
    """Keeps every open sequence with its tokens, and has the ranks of the moment continue it.

    on_loss(error): called once if no ranks will come any longer.
    """

    def __init__(self, limits: ServingLimits, on_loss: Callable[[PeerLost], Any]) -> None:
        self.limits, self._on_loss = limits, on_loss
        self.end_tokens: set[int] = set()
        self.vocabulary = self.largest_batch = self.num_new_tokens = 0
        self.num_restarts = self.num_missing_ranks = 0
        self._lock = threading.RLock()
        self._open: dict[int, Generation] = {}
        self._ids = itertools.count()
        self._send: Callable[[Message], Any] | None = None
        self._closed_by: DrumlineError | None = None

    @property
    def is_restarting(self) -> bool:
        """True while there are no ranks to continue what is open."""
        return self._send is None

    @property
    def num_running(self) -> int:
        return 0 if self.is_restarting else min(len(self._open), self.limits.max_running)

    @property
    def num_waiting(self) -> int:
        return len(self._open) - self.num_running

    def unfinished(self) -> list[tuple[Generation, bool]]:
        """The open sequences; each with whether it runs, if the ranks take them in order."""
        with self._lock:
            items, num_running = list(self._open.values()), self.num_running
        return [(item, place < num_running) for place, item in enumerate(items)]

    def check_capacity(self, num_sequences: int) -> None:
        """Raise ServerBusy or RequestTooLarge if the queue cannot take that many now."""
        if self._closed_by is not None:
            raise self._closed_by
        num_waiting = max(len(self._open) - self.limits.max_running, 0)
        check_queue(self.limits, num_waiting, num_sequences)

    def submit(self, generations: Sequence[Generation]) -> None:
        """Open all, or none. Raises as check_capacity does."""
        with self._lock:
            self.check_capacity(len(generations))
            new = dict(zip(self._ids, generations, strict=False))
            self._open |= new
            self._start(new)

    def _start(self, sequences: dict[int, Generation]) -> None:
        if self._send is not None and sequences:
            self._send({"start": [_to_message(*pair) for pair in sequences.items()]})

    def receive(self, message: Message) -> None:
        """Take a token of a sequence, or the error that ends it."""
        with self._lock:
            item = self._open.get(message["id"])
            if item is None:  # it has ended, which rank 0 does not know yet
                return
            if "error" in message:
                item.end(DrumlineError(message["error"]))
            else:
                self._append(item, message)
            if item.is_done:
                del self._open[message["id"]]
                if self._send is not None:
                    self._send({"cancel": message["id"]})

    def _append(self, item: Generation, message: Message) -> None:
        self.num_new_tokens += 1
        self.largest_batch = max(self.largest_batch, message["batch"])
        if message["logprob"] is not None:
            token, logprob, top = message["logprob"]
            item.sampler.logprob = TokenLogprob(token, logprob, tuple((n, p) for n, p in top))
        item.append(message["token"])

    def resume(self, info: Message, send: Callable[[Message], Any]) -> None:
        """Have new ranks continue all that is open, each behind the tokens that it has.

        info: the model's vocabulary and end_tokens. send: must not block.
        """
        with self._lock:
            self.vocabulary, self.end_tokens = info["vocabulary"], set(info["end_tokens"])
            self._send = send
            for number, item in list(self._open.items()):
                if item.cancel_reason is not None:
                    self._open.pop(number).end(item.cancel_reason)
            self._start(self._open)

    def suspend(self) -> None:
        """Send no more: the ranks are gone."""
        with self._lock:
            self._send = None

    def fail(self, error: PeerLost) -> None:
        """End every sequence, and all that come, with this error: no ranks will come any longer."""
        if self._end_all(error):
            self._on_loss(error)

    def close(self) -> None:
        """End every sequence with an error."""
        self._end_all(ServerStopping("the server is being stopped; ask another one."))

    def _end_all(self, error: DrumlineError) -> bool:
        """True unless that was done before."""
        with self._lock:
            is_first = self._closed_by is None
            self._closed_by = self._closed_by or error
            while self._open:
                self._open.popitem()[1].end(error)
        return is_first


Scheduler = BatchScheduler | RemoteScheduler


def _to_message(number: int, item: Generation) -> Message:
    params = asdict(item.params) | {"seed": item.sampler.seed}
    params["stop_tokens"] = sorted(item.params.stop_tokens)
    return {
        "id": number,
        "prompt": list(item.prompt),
        "new_tokens": item.new_tokens,
        "params": params,
        "schema": getattr(item.sampler.grammar, "schema", None),
    }
