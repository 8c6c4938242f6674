"""Requests of many clients, continued together: each batch is one generate(), several at a time.

batcher = Batcher(model, Limits(max_length=4096))
batcher.submit([Row(prompt, Sampling(), heard=print, ended=print)])

A batch takes all that waits when one of the threads is free. While one batch is in one stage of the
model, the next is in another. If all threads are busy and there is room for what waits, a batch
breaks off after a while, and goes on together with that: its tokens so far are then its prompt.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from drumline.errors import DrumlineError, PeerLost
from drumline.serving.sampling import Chooser, Sampling

GATHER_S = 0.003  # for requests that come together to go together
SHORTEST_RUN = 16  # tokens of each row, before a batch breaks off
COST_OF_BREAK = 1 / 32  # of a token that is read again, in tokens that are made


@dataclass(frozen=True)
class Limits:
    """Tokens of a row with its prompt; rows that run at a time, and that wait; threads."""

    max_length: int
    max_running: int = 16
    max_waiting: int = 64
    threads: int = 2


class Busy(DrumlineError):
    """So much waits already that another request had better come later."""


class RequestTooLarge(DrumlineError):
    """So much will never find room, however long it waits."""


class Row:
    """One prompt that is being continued.

    heard(token): called with each new token, from another thread; says whether to go on.
    ended(how): called once, last: "stop", "length", "cancelled" or an exception.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        heard: Callable[[int], bool],
        ended: Callable[[str | Exception], None],
    ) -> None:
        self.prompt, self.sampling, self.chooser = prompt, sampling, Chooser(sampling)
        self.new: list[int] = []
        self.is_done = False
        self.cancelled: str | Exception | None = None
        self._heard, self._ended = heard, ended

    @property
    def num_left(self) -> int:
        return self.sampling.max_tokens - len(self.new)

    def cancel(self, why: str | Exception = "cancelled") -> None:
        """It ends so with the next token, or before the first: nobody listens any more, say."""
        self.cancelled = self.cancelled or why

    def take(self, token: int, ends: set[int]) -> None:
        if self.cancelled is not None:
            return self.end(self.cancelled)
        self.new.append(token)
        try:
            goes_on = token not in ends and self._heard(token)
        except Exception as error:  # which is no matter of the other rows
            return self.end(error)
        if not goes_on:
            self.end("stop")
        elif self.num_left == 0:
            self.end("length")

    def choose(self, scores: torch.Tensor) -> int:
        """The next token; any if it is done, as it is if there is none to be chosen."""
        if not self.is_done:
            try:
                return self.chooser.choose(scores)
            except Exception as error:  # scores that are no numbers: no matter of the other rows
                self.end(error)
        return 0

    def end(self, how: str | Exception) -> None:
        if not self.is_done:
            self.is_done = True
            self._ended(how)


class Batcher:
    """Threads that run what waits.

    on_loss is called if a rank of the model is lost, so that nothing will ever run again.
    """

    def __init__(
        self, model: Any, limits: Limits, on_loss: Callable[[PeerLost], None] = lambda _: None
    ) -> None:
        self.model, self.limits, self.on_loss = model, limits, on_loss
        self.largest_batch = self.num_new = 0
        self._ends = _as_set(model.generation_config.eos_token_id)
        pad = model.generation_config.pad_token_id
        self._pad = pad if pad is not None else min(self._ends, default=0)
        self._waiting: deque[Row] = deque()
        self._running: list[list[Row]] = []  # batches
        self._changed = threading.Condition()
        self._over: DrumlineError | None = None
        self._is_breaking = False  # a batch, so that no other does
        self._threads = [threading.Thread(target=self._serve) for _ in range(limits.threads)]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        with self._changed:
            return sum(not row.is_done for batch in self._running for row in batch)

    def submit(self, rows: Sequence[Row]) -> None:
        """Run them when there is room. Raises as check_room does, and takes none then."""
        with self._changed:
            self.check_room(len(rows))
            self._waiting.extend(rows)
            self._changed.notify_all()

    def check_room(self, num_rows: int) -> None:
        """Raise Busy or RequestTooLarge if so many rows may not wait now."""
        if self._over is not None:
            raise self._over
        if num_rows > self.limits.max_waiting:
            raise RequestTooLarge(
                f"rank 0: {num_rows} prompts at a time are more than the "
                f"{self.limits.max_waiting} that may wait here; ask for fewer."
            )
        if len(self._waiting) + num_rows > self.limits.max_waiting:
            raise Busy(
                f"rank 0: {len(self._waiting)} requests wait already, and {num_rows} more "
                f"would exceed the limit of {self.limits.max_waiting}; try again later."
            )

    def close(self) -> None:
        """Return when what waits has been told that it ends, and what runs has, which it does with
        its next token: whether a client reads its last ones or not."""
        why = DrumlineError("rank 0: the server is being stopped; ask another one.")
        self._end(why)
        with self._changed:
            running = [row for batch in self._running for row in batch]
        for row in running:
            row.cancel(why)
        for thread in self._threads:
            thread.join()

    def _end(self, why: DrumlineError) -> None:
        with self._changed:
            self._over = self._over or why
            waiting, self._waiting = list(self._waiting), deque()
            self._changed.notify_all()
        for row in waiting:
            row.end(why)

    def _serve(self) -> None:
        torch.set_grad_enabled(False)  # of this thread
        while batch := self._gather():
            try:
                self._run(batch)
            except Exception as error:
                for row in batch:
                    row.end(error)
                if isinstance(error, PeerLost):
                    self._end(error)
                    self.on_loss(error)
            self._put_back(batch)

    def _put_back(self, batch: list[Row]) -> None:
        """What has run; if it broke off, its rows are the next in line."""
        left = [row for row in batch if not row.is_done]
        with self._changed:
            self._running.remove(batch)
            if self._over is None:
                self._waiting.extendleft(reversed(left))
            self._changed.notify_all()
        if self._over is not None:
            for row in left:
                row.end(self._over)

    def _gather(self) -> list[Row]:
        """The rows to run next, once there are any; none if it is over."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over is not None or self._next())
                if self._over is not None:
                    return []
            time.sleep(GATHER_S)
            with self._changed:
                batch = self._next()
                for _ in batch:
                    self._waiting.popleft()
                if batch:
                    self._running.append(batch)
                self.largest_batch = max(self.largest_batch, len(batch))
                self._is_breaking = self._is_breaking and not batch
            if batch:
                return batch

    def count(self, num_new: int) -> None:
        with self._changed:
            self.num_new += num_new

    def breaks_off(self, rows: list[Row], num_new: int, length: int) -> bool:
        """Whether a batch that has made so many tokens a row, of length by now, had better go on
        together with what waits. True for one batch at a time.
        """
        if not self._waiting or num_new < max(SHORTEST_RUN, length * COST_OF_BREAK):
            return False
        with self._changed:
            should = not self._is_breaking and bool(self._next(rows))
            self._is_breaking = self._is_breaking or should
            return should

    def _next(self, batch: Sequence[Row] = ()) -> list[Row]:
        """Those first in line that fit beside what runs, and into one batch with this one.

        A row that is done takes room as long as its batch runs, but not longer.
        """
        beside = [row for row in batch if not row.is_done]
        room = self.limits.max_running - sum(map(len, self._running)) + len(batch) - len(beside)
        together = list(beside)
        for row in islice(self._waiting, max(room, 0)):
            together.append(row)
            prompt = max(len(each.prompt) + len(each.new) for each in together)
            new = max(each.num_left for each in together)
            if len(together) > 1 and prompt + new > self.limits.max_length:
                together.pop()
                break
        return together[len(beside) :]

    def _run(self, rows: list[Row]) -> None:
        tokens, mask = self._padded([[*row.prompt, *row.new] for row in rows])
        how = GenerationConfig(
            max_new_tokens=max(row.num_left for row in rows),
            do_sample=False,  # _Choice leaves one token to choose
            pad_token_id=self._pad,
            eos_token_id=sorted(self._ends) or None,
        )
        self.model.generate(
            tokens.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            generation_config=how,
            logits_processor=LogitsProcessorList([_Choice(rows)]),
            stopping_criteria=StoppingCriteriaList([_Delivery(rows, self._ends, self)]),
        )

    def _padded(self, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and mask, each row at the right."""
        longest = max(map(len, prompts))
        tokens = torch.full((len(prompts), longest), self._pad)
        mask = torch.zeros_like(tokens)
        for number, prompt in enumerate(prompts):
            tokens[number, longest - len(prompt) :] = torch.tensor(prompt)
            mask[number, longest - len(prompt) :] = 1
        return tokens, mask


class _Choice(LogitsProcessor):  # type: ignore[misc]
    """Leaves to each row the token that it has chosen."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if all(row.is_done or row.chooser.is_plain for row in self.rows):
            return scores
        left = torch.full_like(scores, -torch.inf)
        for number, row in enumerate(self.rows):
            left[number, row.choose(scores[number])] = 0
        return left


class _Delivery(StoppingCriteria):  # type: ignore[misc]
    """Gives each row its new token, and says which rows are done."""

    def __init__(self, rows: list[Row], ends: set[int], batcher: Batcher) -> None:
        self.rows, self.ends, self.batcher = rows, ends, batcher
        self.num_new = 0

    def __call__(self, tokens: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        left = [
            (row, token)
            for row, token in zip(self.rows, tokens[:, -1].tolist(), strict=True)
            if not row.is_done
        ]
        self.num_new += 1
        self.batcher.count(len(left))
        for row, token in left:
            row.take(token, self.ends)
        ends_all = self.batcher.breaks_off(self.rows, self.num_new, tokens.shape[1])
        return torch.tensor([ends_all or row.is_done for row in self.rows], device=tokens.device)


def _as_set(tokens: int | list[int] | None) -> set[int]:
    return set() if tokens is None else {tokens} if isinstance(tokens, int) else set(tokens)
