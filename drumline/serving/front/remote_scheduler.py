"""The scheduler of ranks that may have to be started again, as the front sees it.

scheduler = RemoteScheduler(limits)
scheduler.resume(info, send)          # the ranks are ready: send(message) reaches rank 0
scheduler.receive(message)            # a token, from rank 0
scheduler.suspend()                   # a rank has failed: what is open waits for resume()

Messages are JSON. To rank 0: {"start": [sequence, ...]}, and {"cancel": id}, for sequences that end
here alone: at a stop string, or without a client. From it: {"id", "token", "logprob", "load",
"prompt_logprobs", "num_cached"}, the last three at times, and {"id", "error"} for what would be an
error on any ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from drumline.errors import DrumlineError
from drumline.serving.sampling import TokenLogprob
from drumline.serving.scheduler import Generation, Scheduler

Message = dict[str, Any]


class RemoteScheduler(Scheduler):
    """Keeps every open sequence with its tokens, and has the ranks of the moment continue it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._send: Callable[[Message], Any] | None = None
        self._reported = self.limits.max_running, 0.0  # num_running and pool_usage of rank 0

    @property
    def is_restarting(self) -> bool:  # type: ignore[override]
        """True while there are no ranks to continue what is open."""
        return self._send is None

    @property
    def num_running(self) -> int:  # type: ignore[override]
        return 0 if self.is_restarting else min(len(self._open), self._reported[0])

    @property
    def pool_usage(self) -> float:  # type: ignore[override]
        return self._reported[1] if self.num_running else 0.0

    def _start(self, sequences: dict[int, Generation]) -> None:
        if self._send is not None and sequences:
            self._send({"start": [_to_message(*pair) for pair in sequences.items()]})

    def _forget(self, number: int) -> None:
        super()._forget(number)
        if self._send is not None:
            self._send({"cancel": number})

    def receive(self, message: Message) -> None:
        """Take a token of a sequence, or the error that ends it."""
        with self._lock:
            item = self._open.get(message["id"])
            if item is None:  # it has ended, which rank 0 does not know yet
                return
            if "error" in message:
                item.end(DrumlineError(message["error"]))
            else:
                self._take(item, message)
            self._leave_if_over(message["id"])

    def _take(self, item: Generation, message: Message) -> None:
        if "load" in message:
            num_running, usage, largest = message["load"]
            self._reported = num_running, usage
            self.largest_batch = max(self.largest_batch, largest)
        item.sampler.logprob = (fields := message["logprob"]) and TokenLogprob(*fields)
        item.prompt_logprobs += [TokenLogprob(*each) for each in message.get("prompt_logprobs", ())]
        item.num_cached = message.get("num_cached", item.num_cached)
        self._append(item, message["token"])

    def resume(self, info: Message, send: Callable[[Message], Any]) -> None:
        """Have new ranks continue all that is open, each behind the tokens that it has.

        info: the model's vocabulary, end_tokens and device_map, and peers. send: must not block.
        """
        with self._lock:
            self.device_map, self.peers = info["device_map"], info["peers"]
            self.vocabulary, self.end_tokens = info["vocabulary"], set(info["end_tokens"])
            self._send = send
            self._start(self._open)

    def suspend(self) -> None:
        """Send no more: the ranks are gone."""
        with self._lock:
            self._send = None


def _to_message(number: int, item: Generation) -> Message:
    own = {"seed": item.sampler.seed, "stop_tokens": sorted(item.params.stop_tokens)}
    return {
        "id": number,
        "prompt": list(item.prompt),
        "inputs": item.inputs,
        "new_tokens": item.new_tokens,
        "params": {**asdict(item.params), **own},
        "grammar": getattr(item.sampler.grammar, "text", None),
    }
