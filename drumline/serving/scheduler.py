"""Continuous batching: sequences of many requests, generated together in steps.

scheduler = BatchScheduler(model, ServingLimits(max_length=4096))
scheduler.submit([Generation(prompt, SamplingParams(), on_token=print, on_end=print)])

transformers' manager decides what a step computes: sequences join at the next one and leave when
they end, long prompts come in chunks, equal beginnings are computed once, and where the pages of
keys and values are full, sequences are put back. Each token is chosen here, by its sequence's own
sampler. A model whose layers keep no pages gets one sequence at a time, by generate(), and so do
prompts with images.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from coordinator import RankFailure
from drumline.core.cpu.idle_threads import release_idle_threads
from drumline.errors import DrumlineError, PeerLost, PlanError
from drumline.pipeline.paged_generation import tried_manager
from drumline.serving.grammar import JsonGrammar
from drumline.serving.one_by_one import Prompt, generate_ahead, generate_alone, score_prompt
from drumline.serving.sampling import SamplingParams, TokenLogprob, TokenSampler, best_tokens

log = logging.getLogger("drumline")

PAGE_SIZE = 32
"""The tokens of a page: sequences share the whole pages that they begin with."""

CHUNK_TOKENS = {"cpu": (256, 32)}
"""By kind of device, the tokens of prompts in a step by themselves, and beside sequences that get a
token in it, which come so much later."""
CHUNK_ON_ACCELERATOR = (2048, 512)


@dataclass(frozen=True)
class ServingLimits:
    """Sizes that the server accepts."""

    max_length: int
    """Tokens of a prompt together with its completion."""
    max_running: int = 16
    """Sequences that run at a time, in all batches together."""
    max_waiting: int = 64
    """Sequences in the queue."""
    num_batches: int = 1
    """Steps that run at a time, of as many batches."""
    prompt_lookup: int = 0
    """Tokens that a greedy sequence by itself tries in a pass, of those that its text repeats."""


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
    on_cancel(): called by cancel(); a scheduler sets it.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        on_token: Callable[[int], bool],
        on_end: Callable[[str | Exception], None],
        end_tokens: Iterable[int] = (),
        grammar: JsonGrammar | None = None,
    ) -> None:
        self.prompt, self.params = prompt, params
        self.inputs = prompt.inputs if isinstance(prompt, Prompt) else ""
        self.end_tokens = {*params.stop_tokens, *(() if params.ignore_eos else end_tokens)}
        self.sampler = TokenSampler(params, prompt, self.end_tokens, grammar)
        self.new_tokens: list[int] = []
        self.prompt_logprobs: list[TokenLogprob] = []  # of params.scores_prompt, at the first token
        self.num_cached = 0  # tokens of the prompt that were not computed for it, known as those
        self.is_done = False
        self.cancel_reason: str | Exception | None = None
        self.on_cancel: Callable[[], Any] = lambda: None
        self._on_token, self._on_end = on_token, on_end

    @property
    def tokens(self) -> list[int]:
        """The prompt with the new tokens."""
        return [*self.prompt, *self.new_tokens]

    def resume(self, new_tokens: Sequence[int]) -> None:
        """Go on behind tokens that were generated elsewhere."""
        self.new_tokens += new_tokens
        self.sampler.replay(new_tokens)

    def cancel(self, reason: str | Exception = "cancelled") -> None:
        """End with this reason: at once if a scheduler has it, otherwise at the next token."""
        self.cancel_reason = self.cancel_reason or reason
        self.on_cancel()

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
        elif len(self.new_tokens) == self.params.max_tokens:
            self.end("length")

    def sample(self, logits: torch.Tensor) -> int:
        """The next token; any token if sampling is an error, by which append() ends it then."""
        try:
            return self.sampler.sample(logits)
        except Exception as error:  # logits that are NaN: no other sequence is affected
            self.cancel(error)
        return 0

    def end(self, reason: str | Exception) -> None:
        """Call on_end, unless that was done."""
        if not self.is_done:
            self.is_done = True
            self._on_end(reason)


class Scheduler:
    """Open sequences, of which limits.max_running run at a time and the others wait.

    on_loss(error): called if nothing can run any longer. failure: that error; failures: the
    ranks that failed. largest_batch: the most sequences in one step so far. num_running: those in
    steps now. pool_usage: the share of the pages that they have; all tables are looked at for it.
    device_map, peers: the places of layers, and the ranks, as JSON has them.
    """

    device_map: Any = None
    peers: Sequence[dict[str, Any]] = ()
    num_running: int
    pool_usage: float
    largest_batch = 0
    num_restarts = num_missing_ranks = 0  # see RemoteScheduler
    is_restarting = False

    def __init__(
        self, limits: ServingLimits, on_loss: Callable[[PeerLost], Any] = lambda _: None
    ) -> None:
        self.limits, self._on_loss = limits, on_loss
        self.failure: PeerLost | None = None
        self.failures: list[RankFailure] = []
        self.end_tokens: set[int] = set()
        self.vocabulary = self.num_new_tokens = 0
        self._lock = threading.RLock()
        self._open: dict[int, Generation] = {}
        self._ids = itertools.count()
        self._closed_by: DrumlineError | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._open) - self.num_running

    def unfinished(self) -> list[tuple[Generation, bool]]:
        """The open sequences; each with whether it runs, if they are taken in order."""
        with self._lock:
            items, num_running = list(self._open.values()), self.num_running
        return [(item, place < num_running) for place, item in enumerate(items)]

    def check_capacity(self, num_sequences: int) -> None:
        """Raise ServerBusy or RequestTooLarge if the queue cannot take that many now."""
        if self._closed_by is not None:
            raise copy.copy(self._closed_by)  # whose traceback would grow each time
        num_waiting = max(len(self._open) - self.limits.max_running, 0)
        most = self.limits.max_waiting
        if num_sequences > most:
            raise RequestTooLarge(
                f"rank 0: {num_sequences} prompts at a time are more than the {most} that may wait "
                "here; ask for fewer."
            )
        if num_waiting + num_sequences > most:
            raise ServerBusy(
                f"rank 0: {num_waiting} requests wait already, and {num_sequences} more would "
                f"exceed the limit of {most}; try again later."
            )

    def submit(self, generations: Sequence[Generation]) -> None:
        """Open all, or none. Raises as check_capacity does."""
        with self._lock:
            self.check_capacity(len(generations))
            new = dict(zip(self._ids, generations, strict=False))
            for number, item in new.items():
                item.on_cancel = functools.partial(self._cancel, number)
            self._open |= new
            try:
                self._start(new)
            except BaseException:
                for number in new:
                    self._open.pop(number, None)  # all of them first: none may get another's place
                for number in new:
                    self._forget(number)
                raise

    def _forget(self, number: int) -> None:
        """Compute a sequence no longer."""
        self._open.pop(number, None)

    def _cancel(self, number: int) -> None:
        """End a sequence without a client, which has no tokens to come while it waits."""
        with self._lock:
            if number in self._open:
                self._leave_if_over(number)

    def _append(self, item: Generation, token: int) -> None:
        """Give a sequence a new token, unless it has ended."""
        with self._lock:
            if not item.is_done:
                self.num_new_tokens += 1
                item.append(token)

    def _leave_if_over(self, number: int) -> None:
        """Compute a sequence no longer if it has ended, or was cancelled."""
        item = self._open.get(number)
        if item is not None and item.cancel_reason is not None:
            item.end(item.cancel_reason)
        if item is None or item.is_done:
            self._forget(number)

    def _start(self, sequences: dict[int, Generation]) -> None:
        """Have these sequences run."""
        raise NotImplementedError

    def fail(self, error: PeerLost) -> None:
        """End every sequence, and all that come, with this error: nothing can run any longer."""
        self.failures += error.failures  # first, for nobody looks again after the failure
        is_first, self.failure = self.failure is None, self.failure or error
        if is_first:
            self._on_loss(error)  # first, for it may end what _end_all() would wait for
        self._end_all(error)

    def close(self) -> None:
        """End every sequence with an error."""
        self._end_all(ServerStopping("rank 0: the server is being stopped; ask another one."))

    def _end_all(self, error: DrumlineError) -> None:
        with self._lock:
            self._closed_by = self._closed_by or error
            while self._open:
                self._open.popitem()[1].end(error)


class BatchScheduler(Scheduler):
    """Runs sequences in steps of as many batches at a time as limits.num_batches."""

    def __init__(self, model: Any, limits: ServingLimits, *rest: Any) -> None:
        super().__init__(limits, *rest)
        eos = model.generation_config.eos_token_id
        self.end_tokens = {eos} if isinstance(eos, int) else set(eos or ())
        self.vocabulary = model.get_input_embeddings().num_embeddings
        self.device_map = json.loads(model.device_map.to_json())
        self._model, self._chunk = model, limits.max_length
        self._alone = ThreadPoolExecutor(1)  # for what has passes of its own
        self._waiting, self._batch_of = dict[int, None](), dict[int, Any]()
        self._batches = self._made_batches(model)
        self._threads = [threading.Thread(target=self._run, args=(b,)) for b in self._batches]
        release_idle_threads()  # from now on it is other threads that compute
        for batch, thread in zip(self._batches, self._threads, strict=True):
            batch.start()
            thread.start()

    @property
    def num_running(self) -> int:  # type: ignore[override]
        has_alone = {*self._open} - self._batch_of.keys() - self._waiting.keys()
        most: int = sum(batch.num_running for batch in self._batches) + bool(has_alone)
        return min(len(self._open), most)

    @property
    def pool_usage(self) -> float:  # type: ignore[override]
        usages: list[float] = [b.pool_usage for b in self._batches if self.num_running]
        return sum(usages) / max(len(self._batches), 1)

    def _made_batches(self, model: Any) -> list[Any]:
        """Managers of batches; none if a step shows that the model has none over pages."""
        limits = self.limits
        alone, beside = CHUNK_TOKENS.get(model.device.type, CHUNK_ON_ACCELERATOR)
        make = functools.partial(
            tried_manager,
            model,
            self._choose,
            length=limits.max_length,
            share=1 / limits.num_batches,
            tokens_beside=beside,
            page_size=PAGE_SIZE,
            max_requests_per_batch=-(-limits.max_running // limits.num_batches),
            max_batch_tokens=limits.max_running + alone,
        )
        try:
            batches = [make() for _ in range(limits.num_batches)]
            self._chunk = alone
            return batches
        except (PeerLost, PlanError):
            raise
        except Exception as error:
            log.warning(
                "rank 0: %s cannot be batched over pages, so its requests are answered one at a "
                "time: %s",
                *(type(model).__name__, str(error) or repr(error)),
            )
        self.limits = replace(limits, max_running=1)
        return []

    def close(self) -> None:
        """End every sequence with an error; return when no step runs."""
        super().close()
        self._alone.shutdown(cancel_futures=True)
        for batch in self._batches:
            _stop(batch)
        for thread in self._threads:
            thread.join()

    def _start(self, sequences: dict[int, Generation]) -> None:
        for number, item in sequences.items():
            if item.params.scores_prompt and not item.new_tokens:
                self._alone.submit(self._compute_alone, number, item, self._score_prompt)
            elif self._may_look_ahead(item):
                self._alone.submit(self._compute_alone, number, item, self._look_ahead)
            elif not self._batches or item.inputs:
                self._alone.submit(self._compute_alone, number, item, self._generate)
            else:
                self._waiting[number] = None
        self._fill_places()

    def _fill_places(self) -> None:
        """Add sequences that wait to the batches that have places for them."""
        while self._waiting and len(self._batch_of) < self.limits.max_running:
            batch = min(self._batches, key=[*self._batch_of.values()].count)
            self._waiting.pop(number := next(iter(self._waiting)))
            if number in self._open:
                self._add(number, batch)

    def _compute_alone(
        self, number: int, item: Generation, compute: Callable[[int, Generation], None]
    ) -> None:
        """Compute a sequence by itself, to its end or until a batch can go on with it."""
        try:
            if item.cancel_reason is None and not item.is_done:
                compute(number, item)
        except PeerLost as error:
            self.fail(error)
        except Exception as error:  # it ends this sequence, and no other
            item.cancel(error)
        release_idle_threads()
        with self._lock:
            self._leave_if_over(number)
            if number in self._open:
                self._start({number: item})

    def _generate(self, number: int, item: Generation) -> None:
        choose = functools.partial(self._choose, [str(number)], [str(number)])
        prompt = Prompt(item.tokens, item.inputs)
        generate_alone(self._model, prompt, choose, lambda: number not in self._open)

    def _may_look_ahead(self, item: Generation) -> bool:
        """True of a greedy sequence by itself, while tokens that are tried have positions."""
        is_alone = not self._batches or len(self._open) == 1
        num_left = self.limits.max_length - len(item.tokens) if not item.inputs else 0
        return is_alone and item.sampler.is_greedy and 0 < self.limits.prompt_lookup < num_left

    def _look_ahead(self, number: int, item: Generation) -> None:
        """Generate with tokens of the text that are tried, until others come, for the batches."""

        def has_ended() -> bool:
            return item.is_done or not self._may_look_ahead(item)

        def take(token: int, logits: torch.Tensor) -> None:
            is_nan = bool(logits.max().isnan())  # by which sample() ends it with an error
            self._append(item, item.sample(logits[0]) if is_nan else token)

        num_ahead = self.limits.prompt_lookup
        try:
            generate_ahead(self._model, item.tokens, num_ahead, take, has_ended)
        except PeerLost:
            raise
        except Exception as error:
            log.warning("rank 0: prompts are no longer looked up: %s", str(error) or repr(error))
            self.limits = replace(self.limits, prompt_lookup=0)

    def _score_prompt(self, number: int, item: Generation) -> None:
        args = item.prompt, item.params.num_logprobs or 0, self._chunk
        logits, item.prompt_logprobs = score_prompt(self._model, *args)
        self._append(item, item.sample(logits))

    def _add(self, number: int, batch: Any) -> None:
        self._batch_of[number] = batch
        try:
            batch.add_request(self._open[number].tokens, str(number))
        except Exception as error:
            if batch.failure is None and not isinstance(error, DrumlineError):
                self._batch_of.pop(number)
                self._open.pop(number).end(error)
                raise  # otherwise the batch fails, and _start_again() adds it

    def _choose(
        self, names: list[str], names_with_token: list[str], logits: torch.Tensor
    ) -> list[int]:
        """The next tokens, by the samplers of their sequences, which get them at once."""
        items = [self._open.get(int(name)) for name in names_with_token]
        tokens = best_tokens(logits)
        for row, item in enumerate(items):
            if item is None:
                tokens[row] = 0  # which nobody gets
            elif tokens[row] < 0 or not item.sampler.is_greedy:
                tokens[row] = item.sample(logits[row])
        with self._lock:
            self.largest_batch = max(self.largest_batch, len(names))
            for name, item, token in zip(names_with_token, items, tokens, strict=True):
                if item is not None:
                    if not item.new_tokens and (batch := self._batch_of.get(int(name))):
                        item.num_cached = batch.num_cached(name)
                    self._append(item, token)
            for number in map(int, names):
                self._leave_if_over(number)
        return tokens

    def _forget(self, number: int) -> None:
        super()._forget(number)
        self._batch_of.pop(number, None)
        self._waiting.pop(number, None)
        for batch in self._batches:
            batch.cancel_request(str(number))
        with contextlib.suppress(Exception):  # one that cannot be added has ended with its error
            self._fill_places()

    def _run(self, batch: Any) -> None:
        """Run a batch until it is stopped; anew after a step that failed."""
        try:
            while self._closed_by is None:
                try:
                    for _ in batch:  # the tokens are there already
                        pass
                except PeerLost:
                    raise
                except Exception as error:
                    self._start_again(batch, error)
        except Exception as error:
            self.fail(error if isinstance(error, PeerLost) else PeerLost(str(error)))

    def _start_again(self, batch: Any, error: Exception) -> None:
        """End the sequences of the step that failed, and go on with the others.

        If no step could be made, as the longest sequence needs more pages than there are, that one.
        Raises DrumlineError if there is none.
        """
        with self._lock:
            failed = [*map(int, batch.names_in_step)]
            if not failed:
                own = [n for n in self._open if self._batch_of.get(n) is batch]
                failed = sorted(own, key=lambda number: len(self._open[number].tokens))[-1:]
                error = DrumlineError(f"rank 0: no step can be made any longer: {error}")
            for number in failed:
                if number in self._open:
                    self._open[number].end(error)
                    self._leave_if_over(number)
            _stop(batch)
            if failed and self._closed_by is None:
                batch.input_queue.queue.clear()  # of what came as the step failed
                batch.start()
                for number, owner in self._batch_of.items():
                    if owner is batch:
                        self._add(number, batch)
        if not failed:
            raise error


def _stop(batch: Any) -> None:
    """Stop a batch, whose thread may have ended with an error, which its sequences have got."""
    if batch.is_running() or batch.failure is not None:
        with contextlib.suppress(Exception):
            batch.stop(hard_stop=True)
