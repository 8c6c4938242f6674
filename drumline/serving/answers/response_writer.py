"""The answers of OpenAI's API: whole, in chunks of a stream, or an error.

builder = ResponseBuilder("llama", "5", request, 1, tokenizer)
return await whole_response(stream, stream.pieces(request), builder)
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse, Response

from drumline.serving import protocol
from drumline.serving.answers.logprobs import logprobs_field
from drumline.serving.answers.message_parser import merged
from drumline.serving.answers.request_stream import MessagePiece, RequestStream, api_error


class ResponseBuilder:
    """The body of one response, whole or as the events of a stream."""

    def __init__(
        self, model: str, request_id: str, body: Any, num_choices: int, tokenizer: Any
    ) -> None:
        self.model, self.request_id, self.body = model, request_id, body
        self.created, self._num_choices = int(time.time()), num_choices
        self._is_chat = is_chat = isinstance(body, protocol.ChatCompletionRequest)
        self._tokenizer = tokenizer
        self._header = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
            "created": self.created,
            "model": model,
        }

    def whole(
        self, choices: Sequence[Sequence[MessagePiece]], usage: dict[str, Any]
    ) -> dict[str, Any]:
        """The body of a response that is not a stream, of the pieces of each choice."""
        kind = "chat.completion" if self._is_chat else "text_completion"
        bodies = []
        for index, pieces in enumerate(choices):
            logprobs = [item for piece in pieces for item in piece.logprobs]
            reason = pieces[-1].finish_reason if pieces else None
            message = merged(piece.delta for piece in pieces)
            whole = MessagePiece(index, message, logprobs, reason or "cancelled")
            bodies.append(self._choice(whole, "message"))
        return {**self._header, "object": kind, "choices": bodies, "usage": usage}

    def begin(self, usage: dict[str, Any]) -> list[str]:
        """The first events of a stream."""
        roles = {"role": "assistant", "content": ""}
        pieces = [MessagePiece(index, roles, [], None) for index in range(self._num_choices)]
        return [self._chunk([self._choice(each, "delta")]) for each in pieces if self._is_chat]

    def add(self, piece: MessagePiece, usage: dict[str, Any]) -> list[str]:
        """The events of an addition."""
        options = self.body.stream_options
        has_usage = options.include_usage and options.continuous_usage_stats
        choices = [self._choice(piece, "delta")]
        return [self._chunk(choices, **({"usage": usage} if has_usage else {}))]

    def end(self, usage: dict[str, Any]) -> list[str]:
        """The last events."""
        has_usage = self.body.stream_options.include_usage
        last = [self._chunk([], usage=usage)] if has_usage else []
        return [*last, "data: [DONE]\n\n"]

    def fail(self, error: protocol.ApiError) -> list[str]:
        """The events in place of what follows: the status is sent already."""
        return [server_sent_event(error.body)]

    def _chunk(self, choices: list[dict[str, Any]], **usage: Any) -> str:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return server_sent_event({**self._header, "object": kind, "choices": choices, **usage})

    def _choice(self, piece: MessagePiece, key: str) -> dict[str, Any]:
        text = piece.delta.get("content", "")
        has_logprobs = self.body.num_logprobs is not None
        arguments = self._tokenizer, self._is_chat, piece.logprobs
        return {
            "index": piece.index,
            **({key: piece.delta} if self._is_chat else {"text": text}),
            "logprobs": logprobs_field(*arguments) if has_logprobs else None,
            "finish_reason": piece.finish_reason,
        }


async def whole_response(
    stream: RequestStream, pieces: AsyncIterator[MessagePiece | None], builder: ResponseBuilder
) -> Response:
    choices: list[list[MessagePiece]] = [[] for _ in stream.generations]
    async for piece in pieces:
        if piece is not None:
            choices[piece.index].append(piece)
    return JSONResponse(builder.whole(choices, stream.usage()))


async def events(
    first: MessagePiece | None,
    pieces: AsyncIterator[MessagePiece | None],
    stream: RequestStream,
    builder: ResponseBuilder,
) -> AsyncIterator[str]:
    """The events of a stream; for None an empty line, so that no proxy takes it for dead."""

    def added(piece: MessagePiece | None) -> list[str]:
        return ["\n"] if piece is None else builder.add(piece, stream.usage())

    yield "".join([*builder.begin(stream.usage()), *added(first)])
    try:
        async for piece in pieces:
            yield "".join(added(piece))
    except Exception as error:
        yield "".join(builder.fail(api_error(error)))
    else:
        yield "".join(builder.end(stream.usage()))


def server_sent_event(data: Mapping[str, Any], kind: str = "") -> str:
    """An event of a stream (WHATWG HTML, 9.2)."""
    return (f"event: {kind}\n" if kind else "") + f"data: {json.dumps(data)}\n\n"
