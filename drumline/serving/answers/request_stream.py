"""The generations of one request, and what they add to its messages as it comes.

stream = RequestStream(tokenizer)
stream.add(body, prompt, params, end_tokens, None, PlainText())
scheduler.submit(stream.generations)
async for piece in stream.pieces(request): ...
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from drumline import timings
from drumline.core.detokenize import IncrementalDetokenizer
from drumline.errors import PeerLost
from drumline.serving import protocol
from drumline.serving.answers.logprobs import PlacedLogprob
from drumline.serving.answers.message_parser import Delta, PlainText
from drumline.serving.grammar import JsonGrammar
from drumline.serving.sampling import SamplingParams, TokenLogprob
from drumline.serving.scheduler import Generation, RequestTooLarge, ServerBusy, ServerStopping

ANSWERS = {
    RequestTooLarge: (400, None),
    ServerBusy: (429, "server_busy"),
    ClientDisconnect: (499, "client_disconnected"),
    PeerLost: (503, "server_unavailable"),
    ServerStopping: (503, "server_unavailable"),
    Exception: (500, "internal_error"),
}
"""By kind of error, the status and the code that it is answered by: 503 for what another server
would answer, or this one once it is started again."""


def api_error(error: Exception) -> protocol.ApiError:
    """An error as it is answered."""
    if isinstance(error, protocol.ApiError):
        return error
    status, code = next(answer for kind, answer in ANSWERS.items() if isinstance(error, kind))
    return protocol.ApiError(status, str(error) or repr(error), code)


@dataclass(frozen=True)
class MessagePiece:
    """An addition to the message of one choice, and why the choice ended, if it has.

    logprobs: of the tokens since the piece before, if the request asks for them, each with the
    number of characters before it. stop_string: the one that came, if one did.
    """

    index: int
    delta: Delta
    logprobs: list[PlacedLogprob]
    finish_reason: str | None
    stop_string: str = ""


class Choice(Generation):
    """The sequence of one choice of an answer, which posts what its tokens add to it.

    parser: of its text. end_tokens, grammar: as Generation takes them.
    """

    def __init__(
        self,
        stream: RequestStream,
        body: protocol.GenerationRequest,
        prompt: list[int],
        params: SamplingParams,
        end_tokens: set[int],
        grammar: JsonGrammar | None,
        parser: PlainText,
    ) -> None:
        self._stream, self._index = stream, len(stream.generations)
        self._parser, self._max_tokens = parser, params.max_tokens
        self._skips = body.skip_special_tokens and not parser.uses_special_tokens
        self._detokenizer = IncrementalDetokenizer(
            stream.tokenizer, params.stop, prompt, self._skips, params.min_tokens
        )
        self.num_reasoning = 0  # tokens
        self._token_s = 0.0  # when the last one came
        self._num_held, self._logprobs = 0, list[PlacedLogprob]()  # of tokens that are in no piece
        self._is_echoed, self._has_calls = not getattr(body, "echo", False), False
        if params.max_tokens == 0:  # one is always generated
            params = replace(params, max_tokens=1, stop_tokens=frozenset(), ignore_eos=True)
        super().__init__(prompt, params, self._take, self._finish, end_tokens, grammar)

    @property
    def num_new(self) -> int:
        """The tokens of the answer so far."""
        return min(len(self.new_tokens), self._max_tokens)

    def _take(self, token: int) -> bool:
        stream, before_s, self._token_s = self._stream, self._token_s, time.monotonic()
        stream.first_token_s = stream.first_token_s or self._token_s - stream.began_s
        if before_s:
            stream.on_gap(self._token_s - before_s)
        self._echo()
        if self._max_tokens == 0:
            return True
        self._keep_logprob()
        self._num_held += 1
        self._add(self._detokenizer.add(token))
        return not self._detokenizer.stopped_by

    def _finish(self, reason: str | Exception) -> None:
        if isinstance(reason, Exception):
            return self._stream.post(reason)
        if self.new_tokens:  # of which the first may have ended the sequence
            self._echo()
            if self.new_tokens[-1] in self.end_tokens:  # which has a place among the logprobs alone
                self._keep_logprob()
        try:
            text = self._detokenizer.flush()
            self._add(text, "stop" if self._detokenizer.stopped_by else reason)
        except Exception as error:  # of the parser: it ends this request, and no other of the step
            self._stream.post(error)

    def _keep_logprob(self) -> None:
        if (logprob := self.sampler.logprob) is not None:
            self._logprobs.append((logprob, self._detokenizer.num_chars))

    def _echo(self) -> None:
        """Add the prompt, once it is scored, before all else."""
        if not self._is_echoed:
            self._is_echoed = True
            if self.params.scores_prompt:
                own = IncrementalDetokenizer(self._stream.tokenizer, (), (), self._skips)
                for logprob in TokenLogprob(self.prompt[0], None, ()), *self.prompt_logprobs:
                    self._logprobs.append((logprob, own.num_chars))
                    own.add(logprob.token)
            text = self._detokenizer.text_of([*self.prompt])
            self._detokenizer.num_chars += len(text)
            self._add(text)

    def _add(self, text: str, end_reason: str | None = None) -> None:
        deltas = self._parser.feed(text) if text else []
        if end_reason is not None:
            is_cut = end_reason != "stop" or bool(self._detokenizer.stopped_by)
            deltas = [*deltas, *self._parser.finish(is_cut)] or [{}]
        self._has_calls |= any("tool_calls" in delta for delta in deltas)
        if end_reason == "stop" and self._has_calls:
            end_reason = "tool_calls"
        for delta in deltas:
            self.num_reasoning += self._num_held * ("reasoning_content" in delta)
            reason = end_reason if delta is deltas[-1] else None
            stop = self._detokenizer.stopped_by
            self._stream.post(MessagePiece(self._index, delta, self._logprobs, reason, stop))
            self._num_held, self._logprobs = 0, []


class RequestStream:
    """The choices of one request, and their pieces as they come; used within the event loop.

    on_gap(seconds): called with the time between two tokens.
    """

    def __init__(self, tokenizer: Any, on_gap: Callable[[float], Any] = lambda _: None) -> None:
        self.tokenizer, self.on_gap = tokenizer, on_gap
        self._loop = asyncio.get_running_loop()
        self._pieces = asyncio.Queue[MessagePiece | Exception | None]()
        self.began_s = time.monotonic()
        self.first_token_s = self.request_s = 0.0  # until the first token, and the end of all
        self.generations: list[Choice] = []

    def add(self, *arguments: Any, **options: Any) -> None:
        """Add a choice of these arguments: see Choice."""
        self.generations.append(Choice(self, *arguments, **options))

    def post(self, piece: MessagePiece | Exception) -> None:
        """Pass a piece from a thread of the scheduler to the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody listens
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def pieces(self, request: Request) -> AsyncGenerator[MessagePiece | None, None]:
        """Yield until all generations have ended or the client has disconnected; None whenever
        ping_s have passed without a piece.

        Raises the exception that ended a generation, as an ApiError.
        """
        disconnect = asyncio.create_task(self._watch_disconnect(request))
        num_open = len(self.generations)
        try:
            while num_open:
                try:
                    piece = await asyncio.wait_for(self._pieces.get(), timings.TIMINGS.ping_s)
                except TimeoutError:
                    yield None
                    continue
                if piece is None:
                    return
                so_far_s = time.monotonic() - self.began_s
                self.first_token_s = self.first_token_s or so_far_s  # if the end came at once
                if isinstance(piece, Exception):
                    raise api_error(piece) from piece
                num_open -= piece.finish_reason is not None
                self.request_s = 0.0 if num_open else so_far_s
                yield piece
        finally:
            disconnect.cancel()
            for generation in self.generations:
                generation.cancel()

    async def _watch_disconnect(self, request: Request) -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(timings.TIMINGS.disconnect_poll_s)
        self._pieces.put_nowait(None)

    def usage(self) -> dict[str, Any]:
        """The number of tokens so far, as OpenAI's API reports it."""
        first = {id(item.prompt): item for item in reversed(self.generations)}.values()
        num_prompt = sum(len(item.prompt) for item in first)  # choices share it
        num_new = sum(choice.num_new for choice in self.generations)
        num_reasoning = sum(choice.num_reasoning for choice in self.generations)
        num_cached = sum(item.num_cached for item in first)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": num_reasoning},
        }
