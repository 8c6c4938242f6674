"""Continuous batching: sequences of many requests, generated together in several batches.

scheduler = BatchScheduler(model, ServingLimits(max_length=4096))
scheduler.submit([Generation(prompt, SamplingParams(), on_token=print, on_end=print)])

A batch is one generate(). A free thread starts a batch with everything that waits; while one batch
is in one stage of the model, the next is in another. If all threads are busy and the queue would
fit, a batch preempts itself after a while and restarts together with the queue: the tokens that it
has generated are then part of its prompts.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from drumline import timings
from drumline.contact.loading.configs import generation_settings
from drumline.errors import DrumlineError, PeerLost
from drumline.serving.sampling import Grammar, SamplingParams, TokenSampler

MIN_TOKENS_BEFORE_PREEMPTION = 16  # per sequence
PREFILL_COST = 1 / 32  # of a token that is computed again, in generated tokens


@dataclass(frozen=True)
class ServingLimits:
    """Sizes that the server accepts."""

    max_length: int
    """Tokens of a prompt together with its completion."""
    max_running: int = 16
    """Sequences that run at a time, in all batches."""
    max_waiting: int = 64
    """Sequences in the queue."""
    num_threads: int = 2
    """Batches that run at a time."""
    max_body_nbytes: int = 4 << 20
    """Bytes of the body of a request."""


class ServerBusy(DrumlineError):
    """The queue is full; a later request may succeed."""


class ServerStopping(DrumlineError):
    """This server is being stopped; another one may answer."""


class RequestTooLarge(DrumlineError):
    """The request exceeds the size of the queue and can never be scheduled."""


class Generation:
    """One prompt, and the tokens generated for it so far.

    end_tokens: the model's; the last new token, unless the parameters ignore them.
    on_token(token): called with each new token by a thread of the scheduler; returns whether to
    continue. sampler.logprob is then that token's.
    on_end(reason): called once, last: "stop", "length", "cancelled" or an exception.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        on_token: Callable[[int], bool],
        on_end: Callable[[str | Exception], None],
        end_tokens: Iterable[int] = (),
        grammar: Grammar | None = None,
    ) -> None:
        self.prompt, self.params = prompt, params
        self.end_tokens = params.stop_tokens | (set() if params.ignore_eos else set(end_tokens))
        self.sampler = TokenSampler(params, prompt, self.end_tokens, grammar)
        self.new_tokens: list[int] = []
        self.is_done = False
        self.cancel_reason: str | Exception | None = None
        self._on_token, self._on_end = on_token, on_end

    @property
    def tokens(self) -> list[int]:
        """The prompt with the new tokens."""
        return [*self.prompt, *self.new_tokens]

    @property
    def num_remaining(self) -> int:
        """The most tokens that are still to be generated."""
        return self.params.max_tokens - len(self.new_tokens)

    def resume(self, new_tokens: Sequence[int]) -> None:
        """Go on behind tokens that were generated elsewhere."""
        self.new_tokens += new_tokens
        self.sampler.replay(new_tokens)

    def cancel(self, reason: str | Exception = "cancelled") -> None:
        """End with this reason at the next token, or before the first one."""
        self.cancel_reason = self.cancel_reason or reason

    def append(self, token: int) -> None:
        """Take a new token, which may be the last."""
        if self.cancel_reason is not None:
            return self.end(self.cancel_reason)
        self.new_tokens.append(token)
        try:
            should_continue = token not in self.end_tokens and self._on_token(token)
        except Exception as error:  # it ends this sequence, and no other of the batch
            return self.end(error)
        if not should_continue:
            self.end("stop")
        elif self.num_remaining == 0:
            self.end("length")

    def sample(self, logits: torch.Tensor) -> int:
        """The next token; any token if the sequence is done, or if sampling ends it by an error."""
        if not self.is_done:
            try:
                return self.sampler.sample(logits)
            except Exception as error:  # logits that are NaN: no other sequence is affected
                self.end(error)
        return 0

    def end(self, reason: str | Exception) -> None:
        """Call on_end, unless that was done."""
        if not self.is_done:
            self.is_done = True
            self._on_end(reason)


def check_queue(limits: ServingLimits, num_waiting: int, num_sequences: int) -> None:
    """Raise ServerBusy or RequestTooLarge if the queue cannot take that many now."""
    if num_sequences > limits.max_waiting:
        raise RequestTooLarge(
            f"rank 0: {num_sequences} prompts at a time are more than the {limits.max_waiting} "
            "that may wait here; ask for fewer."
        )
    if num_waiting + num_sequences > limits.max_waiting:
        raise ServerBusy(
            f"rank 0: {num_waiting} requests wait already, and {num_sequences} more would exceed "
            f"the limit of {limits.max_waiting}; try again later."
        )


class BatchScheduler:
    """A queue of sequences, and threads that run batches of them.

    on_loss is called if a rank of the model is lost, after which nothing can run.
    """

    num_restarts = num_missing_ranks = 0  # see RemoteScheduler
    is_restarting = False

    def __init__(
        self,
        model: Any,
        limits: ServingLimits,
        on_loss: Callable[[PeerLost], None] = lambda _: None,
    ) -> None:
        self.model, self.limits, self.on_loss = model, limits, on_loss
        self.largest_batch = self.num_new_tokens = 0
        eos = model.generation_config.eos_token_id
        self.end_tokens = {eos} if isinstance(eos, int) else set(eos or ())
        pad_token = model.generation_config.pad_token_id
        self._pad = pad_token if pad_token is not None else min(self.end_tokens, default=0)
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self._waiting: deque[Generation] = deque()
        self._batches: list[list[Generation]] = []  # those that run
        self._changed = threading.Condition()
        self._closed_by: DrumlineError | None = None
        self._is_preempting = False  # one batch is, so that no other does
        self._threads = [threading.Thread(target=self._serve) for _ in range(limits.num_threads)]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        with self._changed:
            return sum(not item.is_done for batch in self._batches for item in batch)

    def unfinished(self) -> list[tuple[Generation, bool]]:
        """The sequences that run, and those that wait; each with whether it runs."""
        with self._changed:
            running = [item for batch in self._batches for item in batch if not item.is_done]
            return [(item, True) for item in running] + [(item, False) for item in self._waiting]

    def submit(self, generations: Sequence[Generation]) -> None:
        """Append all to the queue, or none. Raises as check_capacity does."""
        with self._changed:
            self.check_capacity(len(generations))
            self._waiting.extend(generations)
            self._changed.notify_all()

    def check_capacity(self, num_sequences: int) -> None:
        """Raise ServerBusy or RequestTooLarge if the queue cannot take that many now."""
        if self._closed_by is not None:
            raise self._closed_by
        check_queue(self.limits, len(self._waiting), num_sequences)

    def close(self) -> None:
        """End every sequence with an error; return when no batch runs.

        A batch ends with its next token, whether or not a client reads the ones before.
        """
        error = ServerStopping("rank 0: the server is being stopped; ask another one.")
        self._close_queue(error)
        with self._changed:
            running = [item for batch in self._batches for item in batch]
        for item in running:
            item.cancel(error)
        for thread in self._threads:
            thread.join()

    def _close_queue(self, error: DrumlineError) -> None:
        with self._changed:
            self._closed_by = self._closed_by or error
            waiting, self._waiting = list(self._waiting), deque()
            self._changed.notify_all()
        for item in waiting:
            item.end(error)

    def _serve(self) -> None:
        torch.set_grad_enabled(False)  # a setting of this thread
        while batch := self._start_batch():
            try:
                self._generate(batch)
            except Exception as error:
                for item in batch:
                    item.end(error)
                if isinstance(error, PeerLost):
                    self._close_queue(error)
                    self.on_loss(error)
            self._finish_batch(batch)

    def _start_batch(self) -> list[Generation]:
        """The next batch, once anything waits; empty after close()."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed_by is not None or self._next_batch())
                if self._closed_by is not None:
                    return []
            time.sleep(timings.TIMINGS.gather_s)
            with self._changed:
                batch = self._next_batch()
                for _ in batch:
                    self._waiting.popleft()
                if batch:
                    self._batches.append(batch)
                self.largest_batch = max(self.largest_batch, len(batch))
                self._is_preempting = self._is_preempting and not batch
            if batch:
                return batch

    def _finish_batch(self, batch: list[Generation]) -> None:
        """Remove a batch; if it was preempted, put its sequences at the head of the queue."""
        unfinished = [item for item in batch if not item.is_done]
        with self._changed:
            self._batches.remove(batch)
            if self._closed_by is None:
                self._waiting.extendleft(reversed(unfinished))
            self._changed.notify_all()
        if self._closed_by is not None:
            for item in unfinished:
                item.end(self._closed_by)

    def should_preempt(self, batch: list[Generation], num_steps: int, length: int) -> bool:
        """True if a batch should stop and restart together with the queue.

        num_steps: tokens of each sequence since the batch started. length: tokens of the longest.
        True for one batch at a time, and only after so many steps that they outweigh the
        computation of all `length` tokens again.
        """
        if not self._waiting:
            return False
        if num_steps < max(MIN_TOKENS_BEFORE_PREEMPTION, length * PREFILL_COST):
            return False
        with self._changed:
            should = not self._is_preempting and bool(self._next_batch(batch))
            self._is_preempting = self._is_preempting or should
            return should

    def _next_batch(self, restarting: Sequence[Generation] = ()) -> list[Generation]:
        """The head of the queue, as far as the limits allow it beside the batches that run.

        restarting: a batch that the result would join. Its finished sequences count against
        max_running until that batch ends, but not after.
        """
        joined = [item for item in restarting if not item.is_done]
        num_kept = len(joined)
        num_running = sum(map(len, self._batches)) - len(restarting) + num_kept
        for item in islice(self._waiting, max(self.limits.max_running - num_running, 0)):
            joined.append(item)
            # The most tokens that each row of this batch, padded to the longest, may get.
            length = max(len(i.tokens) for i in joined) + max(i.num_remaining for i in joined)
            if len(joined) > 1 and length > self.limits.max_length:
                joined.pop()
                break
        return joined[num_kept:]

    def _generate(self, batch: list[Generation]) -> None:
        tokens, mask = self._padded([item.tokens for item in batch])
        settings = generation_settings(
            max_new_tokens=max(item.num_remaining for item in batch),
            do_sample=False,  # _SampledTokens leaves one token to choose from
            pad_token_id=self._pad,
            eos_token_id=self.vocabulary,  # no token, as _TokenDelivery ends each sequence
        )
        self.model.generate(
            tokens.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            generation_config=settings,
            logits_processor=[_SampledTokens(batch)],
            stopping_criteria=[_TokenDelivery(batch, self)],
        )

    def deliver(self, batch: list[Generation], tokens: list[int]) -> None:
        """Give the unfinished sequences of a batch their new tokens."""
        unfinished = [pair for pair in zip(batch, tokens, strict=True) if not pair[0].is_done]
        with self._changed:
            self.num_new_tokens += len(unfinished)
        for item, token in unfinished:
            item.append(token)

    def _padded(self, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and attention mask, padded on the left: [len(prompts), longest] each."""
        rows = [torch.tensor(prompt) for prompt in prompts]
        pad = functools.partial(pad_sequence, batch_first=True, padding_side="left")
        return pad(rows, padding_value=self._pad), pad([torch.ones_like(row) for row in rows])


class _SampledTokens:
    """Sets all logits of a sequence to -inf, but for the token that its sampler chose."""

    def __init__(self, batch: list[Generation]) -> None:
        self.batch = batch

    def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if all(item.is_done or item.sampler.is_greedy for item in self.batch):
            return scores
        sampled = torch.full_like(scores, -torch.inf)
        for row, item in enumerate(self.batch):
            sampled[row, item.sample(scores[row])] = 0
        return sampled


class _TokenDelivery:
    """Delivers new tokens, and stops the sequences that are done, or the batch to preempt it."""

    def __init__(self, batch: list[Generation], scheduler: BatchScheduler) -> None:
        self.batch, self.scheduler = batch, scheduler
        self.num_steps = 0

    def __call__(self, tokens: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.num_steps += 1
        self.scheduler.deliver(self.batch, tokens[:, -1].tolist())
        preempts = self.scheduler.should_preempt(self.batch, self.num_steps, tokens.shape[1])
        return torch.tensor([preempts or item.is_done for item in self.batch], device=tokens.device)
