"""The answers of OpenAI's API: whole, in chunks of a stream, or an error.

builder = ResponseBuilder("llama", is_chat=True, logprobs=None, request_id="5")
return await whole_response(stream, message_pieces(events, parsers), builder)
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse, Response

from drumline import timings
from drumline.errors import DrumlineError, PeerLost
from drumline.serving import protocol
from drumline.serving import scheduler as scheduling
from drumline.serving.answers.logprobs import LogprobFormatter
from drumline.serving.answers.message_parser import Delta, PlainText, merged
from drumline.serving.answers.request_stream import RequestStream, TextEvent
from drumline.serving.sampling import TokenLogprob


@dataclass(frozen=True)
class MessagePiece:
    """An addition to the message of one choice, and why the choice ended, if it has.

    Of an event that adds nothing yet: None.
    """

    index: int
    delta: Delta
    logprobs: list[TokenLogprob]
    finish_reason: str | None


class ResponseBuilder:
    """The bodies of one response, whole or in chunks of a stream."""

    def __init__(
        self, model: str, is_chat: bool, logprobs: LogprobFormatter | None, request_id: str
    ) -> None:
        self.is_chat, self._logprobs = is_chat, logprobs
        self._header = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
            "created": int(time.time()),
            "model": model,
        }

    def response(
        self, choices: Sequence[Sequence[MessagePiece]], usage: dict[str, int]
    ) -> dict[str, Any]:
        """The body of a response that is not a stream, of the pieces of each choice."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        bodies = []
        for index, pieces in enumerate(choices):
            logprobs = [item for piece in pieces for item in piece.logprobs]
            reason = pieces[-1].finish_reason if pieces else None
            message = merged(piece.delta for piece in pieces)
            whole = MessagePiece(index, message, logprobs, reason or "cancelled")
            bodies.append(self._choice(whole, "message"))
        return {**self._header, "object": kind, "choices": bodies, "usage": usage}

    def first_chunk(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat's choice."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk([self._choice(MessagePiece(index, delta, [], None), "delta")])

    def chunk(self, piece: MessagePiece, offset: int) -> dict[str, Any]:
        """A chunk of one choice. offset: characters of the choice before it."""
        return self._chunk([self._choice(piece, "delta", offset)])

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last chunk, if the request includes the usage."""
        return {**self._chunk([]), "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self._header, "object": kind, "choices": choices}

    def _choice(self, piece: MessagePiece, key: str, offset: int = 0) -> dict[str, Any]:
        text = piece.delta.get("content", "")
        return {
            "index": piece.index,
            **({key: piece.delta} if self.is_chat else {"text": text}),
            "logprobs": self._logprobs and self._logprobs.format(piece.logprobs, offset),
            "finish_reason": piece.finish_reason,
        }


async def message_pieces(
    events: AsyncIterator[TextEvent], parsers: Sequence[PlainText]
) -> AsyncIterator[MessagePiece | None]:
    """The additions of each event to the message of its choice, by that choice's parser."""
    held: list[list[TokenLogprob]] = [[] for _ in parsers]  # of text that is in no delta yet
    callers = set()
    async for event in events:
        index, end_reason = event.index, event.end_reason
        deltas = parsers[index].feed(event.text) if event.text else []
        held[index] += event.logprobs
        reasons: list[str | None] = [None]
        if end_reason is not None:
            deltas = [*deltas, *parsers[index].finish()] or [{}]
        callers |= {index for delta in deltas if "tool_calls" in delta}
        if end_reason is not None:
            is_call = end_reason == "stop" and index in callers
            reasons = ["tool_calls" if is_call else str(end_reason)]
        for delta, reason in zip(deltas, [*[None] * (len(deltas) - 1), *reasons], strict=False):
            yield MessagePiece(index, delta, held[index], reason)
            held[index] = []
        if not deltas:
            yield None


async def whole_response(
    stream: RequestStream, pieces: AsyncIterator[MessagePiece | None], response: ResponseBuilder
) -> Response:
    choices: list[list[MessagePiece]] = [[] for _ in stream.generations]
    with as_internal_error():
        async for piece in pieces:
            if piece is not None:
                choices[piece.index].append(piece)
    return JSONResponse(response.response(choices, stream.usage()))


async def chunks(
    first: MessagePiece | None,
    pieces: AsyncIterator[MessagePiece | None],
    stream: RequestStream,
    response: ResponseBuilder,
    body: Any,
) -> AsyncIterator[str]:
    """Server-sent events (WHATWG HTML, 9.2), as OpenAI sends them.

    After ping_s without one, a comment follows, so that no proxy takes the stream for dead.
    """
    offsets, sent_s = [0] * len(stream.generations), time.monotonic()
    for index in range(len(stream.generations) if response.is_chat else 0):
        yield _server_sent_event(response.first_chunk(index))
    try:
        async for piece in _with_first(first, pieces):
            if piece is not None:
                chunk = response.chunk(piece, offsets[piece.index])
                usage = {"usage": stream.usage()} if body.includes_usage_so_far else {}
                yield _server_sent_event({**chunk, **usage})
                offsets[piece.index] += len(piece.delta.get("content", ""))
            elif time.monotonic() - sent_s >= timings.TIMINGS.ping_s:
                yield ": ping\n\n"
            else:
                continue
            sent_s = time.monotonic()
    except Exception as error:  # the status is sent already, so the error becomes an event
        yield _server_sent_event(internal_error(error).body)
        return
    if body.includes_usage:
        yield _server_sent_event(response.usage_chunk(stream.usage()))
    yield "data: [DONE]\n\n"


async def _with_first(
    first: MessagePiece | None, pieces: AsyncIterator[MessagePiece | None]
) -> AsyncIterator[MessagePiece | None]:
    yield first
    async for piece in pieces:
        yield piece


def _server_sent_event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def internal_error(error: Exception) -> protocol.ApiError:
    """500; 503 for what another server would answer, or this one once it is started again."""
    is_gone = isinstance(error, (PeerLost, scheduling.ServerStopping))
    status, code = (503, "server_unavailable") if is_gone else (500, "internal_error")
    return protocol.ApiError(status, str(error) or repr(error), "server_error", code)


@contextlib.contextmanager
def as_internal_error() -> Iterator[None]:
    """Within, every error is answered with status 500, or 503."""
    try:
        yield
    except Exception as error:
        raise internal_error(error) from error


@contextlib.contextmanager
def as_api_error() -> Iterator[None]:
    """Within, errors of the scheduler are answered with their status."""
    try:
        yield
    except scheduling.RequestTooLarge as error:
        raise protocol.invalid_request(str(error)) from error
    except scheduling.ServerBusy as error:
        raise protocol.ApiError(429, str(error), "rate_limit_error", "server_busy") from error
    except DrumlineError as error:
        raise internal_error(error) from error
