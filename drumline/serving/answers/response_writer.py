"""The answers of OpenAI's API: whole, in chunks of a stream, or an error.

builder = ResponseBuilder("llama", is_chat=True, logprobs=None)
return await whole_response(stream, events, builder)
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse, Response

from drumline.errors import DrumlineError, PeerLost
from drumline.serving import protocol
from drumline.serving import scheduler as scheduling
from drumline.serving.answers.logprobs import LogprobFormatter
from drumline.serving.answers.request_stream import RequestStream, TextEvent
from drumline.serving.sampling import TokenLogprob


@dataclass
class ChoiceText:
    """The text of one choice, or a piece of it, and why it ended, if it has."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


class ResponseBuilder:
    """The bodies of one response, whole or in chunks of a stream."""

    def __init__(self, model: str, is_chat: bool, logprobs: LogprobFormatter | None) -> None:
        self._is_chat, self._logprobs = is_chat, logprobs
        self._header = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def response(self, choices: Sequence[ChoiceText], usage: dict[str, int]) -> dict[str, Any]:
        """The body of a response that is not a stream."""
        kind = "chat.completion" if self._is_chat else "text_completion"
        bodies = [
            self._choice(index, choice, "message", {"role": "assistant", "content": choice.text})
            for index, choice in enumerate(choices)
        ]
        return {**self._header, "object": kind, "choices": bodies, "usage": usage}

    def first_chunk(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat's choice."""
        message = {"role": "assistant", "content": ""}
        return self._chunk([self._choice(index, ChoiceText(), "delta", message)])

    def chunk(self, index: int, choice: ChoiceText, offset: int) -> dict[str, Any]:
        """A chunk of one choice; the last of a chat's choice holds no text.

        offset: characters of the choice before it.
        """
        is_empty = self._is_chat and not choice.text and choice.finish_reason is not None
        delta = {} if is_empty else {"content": choice.text}
        return self._chunk([self._choice(index, choice, "delta", delta, offset)])

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last chunk, if the request includes the usage."""
        return {**self._chunk([]), "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._header, "object": kind, "choices": choices}

    def _choice(
        self, index: int, choice: ChoiceText, key: str, message: dict[str, str], offset: int = 0
    ) -> dict[str, Any]:
        body: dict[str, Any] = {key: message} if self._is_chat else {"text": choice.text}
        logprobs = self._logprobs and self._logprobs.format(choice.logprobs, offset)
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": choice.finish_reason}


async def whole_response(
    stream: RequestStream, events: AsyncIterator[TextEvent], response: ResponseBuilder
) -> Response:
    choices = [ChoiceText(finish_reason="cancelled") for _ in stream.generations]
    with as_internal_error():
        async for event in events:
            choice = choices[event.index]
            choice.text += event.text
            choice.logprobs += event.logprobs
            if event.end_reason is not None:
                choice.finish_reason = str(event.end_reason)
    return JSONResponse(response.response(choices, stream.usage()))


async def chunks(
    first: TextEvent | None,
    events: AsyncIterator[TextEvent],
    stream: RequestStream,
    response: ResponseBuilder,
    body: Any,
) -> AsyncIterator[str]:
    """Server-sent events (WHATWG HTML, 9.2), as OpenAI sends them."""
    event, offsets = first, [0] * len(stream.generations)
    if isinstance(body, protocol.ChatCompletionRequest):
        for index in range(len(stream.generations)):
            yield _server_sent_event(response.first_chunk(index))
    try:
        while event is not None:
            end_reason = None if event.end_reason is None else str(event.end_reason)
            piece = ChoiceText(event.text, event.logprobs, end_reason)
            chunk = response.chunk(event.index, piece, offsets[event.index])
            usage = {"usage": stream.usage()} if body.includes_usage_so_far else {}
            yield _server_sent_event({**chunk, **usage})
            offsets[event.index] += len(event.text)
            event = await anext(events, None)
    except Exception as error:  # the status is sent already, so the error becomes an event
        yield _server_sent_event(internal_error(error).body)
        return
    if body.includes_usage:
        yield _server_sent_event(response.usage_chunk(stream.usage()))
    yield "data: [DONE]\n\n"


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
