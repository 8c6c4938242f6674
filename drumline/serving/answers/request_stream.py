"""The generations of one request, and their text as it comes.

stream = RequestStream(tokenizer, [SequenceRequest(prompt, params, end_tokens, None)])
scheduler.submit(stream.generations)
async for event in stream.events(request): ...
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fastapi import Request

from drumline import timings
from drumline.errors import PeerLost
from drumline.serving import protocol
from drumline.serving.answers.detokenize import IncrementalDetokenizer
from drumline.serving.sampling import Grammar, SamplingParams, TokenLogprob
from drumline.serving.scheduler import Generation, RequestTooLarge, ServerBusy, ServerStopping


def api_error(error: Exception) -> protocol.ApiError:
    """An error as it is answered: 500, or 503 for what another server would answer, or this one
    once it is started again."""
    if isinstance(error, protocol.ApiError):
        return error
    text = str(error) or repr(error)
    if isinstance(error, RequestTooLarge):
        return protocol.invalid_request(text)
    if isinstance(error, ServerBusy):
        return protocol.ApiError(429, text, "rate_limit_error", "server_busy")
    is_gone = isinstance(error, (PeerLost, ServerStopping))
    status, code = (503, "server_unavailable") if is_gone else (500, "internal_error")
    return protocol.ApiError(status, text, "server_error", code)


@dataclass(frozen=True)
class TextEvent:
    """New text of one choice, and the reason of its end, if it has ended.

    With neither, the request still waits.
    """

    index: int
    text: str
    end_reason: str | Exception | None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the tokens since the event before, if the request asks for them."""
    num_tokens: int = 0
    """Those since the event before."""


class SequenceRequest(NamedTuple):
    """One sequence of a request, as Generation takes it."""

    prompt: list[int]
    params: SamplingParams
    end_tokens: set[int]
    grammar: Grammar | None
    has_echo: bool = False
    """True if the prompt is a part of the answer."""


class RequestStream:
    """The generations of one request, and their text as it comes; used within the event loop."""

    def __init__(
        self,
        tokenizer: Any,
        sequences: Sequence[SequenceRequest],
        skip_special_tokens: bool = True,
        on_gap: Callable[[float], Any] = lambda _: None,
    ) -> None:
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[TextEvent | None]()
        self._tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.start, self.first_token_s = time.monotonic(), 0.0
        self._sequences, self._on_gap = sequences, on_gap
        self.num_reasoning = 0  # tokens
        self.generations = [
            self._generation(index, sequence) for index, sequence in enumerate(sequences)
        ]

    def _generation(self, index: int, sequence: SequenceRequest) -> Generation:
        prompt, params, end_tokens, grammar, has_echo = sequence
        is_prompt_alone = params.max_tokens == 0
        if is_prompt_alone:  # one is always generated
            params = replace(params, max_tokens=1, stop_tokens=frozenset(), ignore_eos=True)
        detokenizer = IncrementalDetokenizer(
            self._tokenizer, params.stop, prompt, self.skip_special_tokens
        )
        logprobs: list[TokenLogprob] = []  # of tokens whose text is not posted yet
        token_s = 0.0  # when the last one came
        num_tokens = 0  # since the last event

        def echo() -> None:
            nonlocal has_echo
            text = self._tokenizer.decode(prompt, skip_special_tokens=self.skip_special_tokens)
            first = [TokenLogprob(prompt[0], None, ())] if params.scores_prompt else []
            self._post(TextEvent(index, text, None, first + generation.prompt_logprobs))
            has_echo = False

        def on_token(token: int) -> bool:
            nonlocal token_s, num_tokens
            before_s, token_s = token_s, time.monotonic()
            if before_s:
                self._on_gap(token_s - before_s)
            if has_echo:
                echo()
            if is_prompt_alone:
                return True
            if generation.sampler.logprob is not None:
                logprobs.append(generation.sampler.logprob)
            num_tokens += 1
            if text := detokenizer.add(token):
                self._post(TextEvent(index, text, None, logprobs.copy(), num_tokens))
                logprobs.clear()
                num_tokens = 0
            return not detokenizer.is_stopped

        def on_end(reason: str | Exception) -> None:
            if has_echo and generation.new_tokens:  # of which the first ends sequences
                echo()
            is_text = not (is_prompt_alone or isinstance(reason, Exception))
            text = detokenizer.flush() if is_text else ""
            self._post(TextEvent(index, text, reason, logprobs, num_tokens))

        generation = Generation(prompt, params, on_token, on_end, end_tokens, grammar)
        return generation

    def _post(self, event: TextEvent) -> None:
        """Pass an event from a thread of the scheduler to the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody listens
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def events(self, request: Request) -> AsyncGenerator[TextEvent, None]:
        """Yield until all generations have ended or the client has disconnected.

        Raises the exception that ended a generation, as an ApiError.
        """
        disconnect = asyncio.create_task(self._watch_disconnect(request))
        num_open = len(self.generations)
        try:
            while num_open and (event := await self._events.get()) is not None:
                if not self.first_token_s and (event.text or event.end_reason is not None):
                    self.first_token_s = time.monotonic() - self.start
                if isinstance(event.end_reason, Exception):
                    raise api_error(event.end_reason) from event.end_reason
                num_open -= event.end_reason is not None
                yield event
        finally:
            disconnect.cancel()
            for generation in self.generations:
                generation.cancel()

    async def _watch_disconnect(self, request: Request) -> None:
        pinged_s = time.monotonic()
        while not await request.is_disconnected():
            await asyncio.sleep(timings.TIMINGS.disconnect_poll_s)
            if time.monotonic() - pinged_s >= timings.TIMINGS.ping_s:
                self._events.put_nowait(TextEvent(0, "", None))
                pinged_s = time.monotonic()
        self._events.put_nowait(None)

    def usage(self) -> dict[str, Any]:
        """The number of tokens so far, as OpenAI's API reports it."""
        first = {id(item.prompt): item for item in reversed(self.generations)}  # choices share it
        num_prompt = sum(len(item.prompt) for item in first.values())
        num_new = sum(
            min(len(item.new_tokens), sequence.params.max_tokens)
            for item, sequence in zip(self.generations, self._sequences, strict=True)
        )
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {
                "cached_tokens": sum(item.num_cached for item in first.values())
            },
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning},
        }
