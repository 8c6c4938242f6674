"""The application behind `python -m drumline serve`: OpenAI's API over a Batcher.

app = application(Service("llama", model, tokenizer, Limits(max_length=4096)), key="secret")
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from drumline.errors import DrumlineError, PeerLost
from drumline.serving.detokenize import Text
from drumline.serving.metrics import Metrics
from drumline.serving.protocol import (
    DEFAULT_MAX_TOKENS,
    Answers,
    ApiError,
    Chat,
    Completion,
    Message,
    invalid,
    num_prompts,
    parse,
    validate,
)
from drumline.serving.sampling import Sampling
from drumline.serving.scheduler import Batcher, Busy, Limits, RequestTooLarge, Row

MAX_BODY = 4 << 20
BODY_S = 60  # for it to come
MIN_ITEMS = 128  # that one list or object of a request may have, however short rows are
LOOK_S = 0.2  # between looks at whether the client is still there


@dataclass(frozen=True)
class Event:
    """What choice `number` says next, and how it ended, if it has."""

    number: int
    text: str
    end: str | Exception | None


class Conversation:
    """The rows of one request, and what they say as it comes; used within the event loop."""

    def __init__(self, tokenizer: Any, rows: list[tuple[list[int], Sampling]]) -> None:
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[Event | None]()
        self._tokenizer = tokenizer
        self.begun, self.first_s = time.monotonic(), 0.0
        self.rows = [self._row(number, *row) for number, row in enumerate(rows)]

    def _row(self, number: int, prompt: list[int], sampling: Sampling) -> Row:
        text = Text(self._tokenizer, sampling.stop)

        def heard(token: int) -> bool:
            if said := text.add(token):
                self._tell(Event(number, said, None))
            return not text.is_stopped

        def ended(how: str | Exception) -> None:
            self._tell(Event(number, "" if isinstance(how, Exception) else text.rest(), how))

        return Row(prompt, sampling, heard, ended)

    def _tell(self, event: Event) -> None:
        """From the threads that run the model."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody listens
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def events(self, request: Request) -> AsyncGenerator[Event, None]:
        """Until all rows have ended or the client has gone. Raises what ended a row."""
        watcher = asyncio.create_task(self._watch(request))
        left = len(self.rows)
        try:
            while left and (event := await self._events.get()) is not None:
                self.first_s = self.first_s or time.monotonic() - self.begun
                if isinstance(event.end, Exception):
                    raise event.end
                left -= event.end is not None
                yield event
        finally:
            watcher.cancel()
            for row in self.rows:
                row.cancel()

    async def _watch(self, request: Request) -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(LOOK_S)
        self._events.put_nowait(None)

    def usage(self) -> dict[str, int]:
        prompts = {id(row.prompt): len(row.prompt) for row in self.rows}  # choices share theirs
        prompt, new = sum(prompts.values()), sum(len(row.new) for row in self.rows)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class Service:
    """One model by name, for everybody who asks."""

    def __init__(self, name: str, model: Any, tokenizer: Any, limits: Limits) -> None:
        self.name, self.tokenizer, self.limits = name, tokenizer, limits
        self.failure: DrumlineError | None = None
        self.created = int(time.time())
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self.batcher = Batcher(model, limits, self.fail)
        self.metrics = Metrics(
            {
                "new_tokens_total": lambda: self.batcher.num_new,
                "requests_running": lambda: self.batcher.num_running,
                "requests_waiting": lambda: self.batcher.num_waiting,
                "largest_batch": lambda: self.batcher.largest_batch,
            }
        )

    def close(self) -> None:
        """Return when nothing runs any more."""
        self.batcher.close()

    def fail(self, failure: PeerLost) -> None:
        """Note that nothing will ever run again."""
        self.failure = self.failure or failure

    async def health(self) -> Response:
        if self.failure is not None:
            return JSONResponse(_lost(self.failure).body, 503)
        return JSONResponse({"status": "ok"})

    async def show_metrics(self) -> Response:
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._card()]}

    async def model(self, name: str) -> dict[str, Any]:
        self._check_name(name)
        return self._card()

    def _card(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "drumline"}

    async def completions(self, request: Request) -> Response:
        asked: Completion = await self._read(Completion, request)
        given = asked.prompt if isinstance(asked.prompt, list) else [asked.prompt]
        if given and isinstance(given[0], int):
            given = [given]
        self._check_room(len(given) * asked.choices)
        prompts = await asyncio.to_thread(lambda: [self._tokens(prompt) for prompt in given])
        return await self._answer(request, asked, prompts, asked.max_tokens or DEFAULT_MAX_TOKENS)

    async def chat(self, request: Request) -> Response:
        asked: Chat = await self._read(Chat, request)
        self._check_room(asked.choices)
        prompt = await asyncio.to_thread(self._chat_tokens, asked.messages)
        left = max(self.limits.max_length - len(prompt), 1)
        wanted = asked.max_completion_tokens or asked.max_tokens or left
        return await self._answer(request, asked, [prompt], wanted)

    async def _read(self, kind: type[Any], request: Request) -> Any:
        body = await _body(request)
        fields = await asyncio.to_thread(self._parse, kind, body)
        self._check_name(fields.model)
        await _check_client(request)
        return fields

    def _parse(self, kind: type[Any], body: bytes) -> Any:
        """The request, of which no more is looked at than may be answered."""
        fields = parse(body)
        self._check_room(num_prompts(fields.get("prompt")))
        return validate(kind, fields, max(self.limits.max_length, MIN_ITEMS))

    def _check_room(self, num_rows: int) -> None:
        try:
            self.batcher.check_room(num_rows)
        except DrumlineError as error:
            raise _refused(error) from error

    def _check_name(self, name: str) -> None:
        if name != self.name:
            raise ApiError(
                404,
                f"The model {name!r} is not served here, but {self.name!r} is.",
                "invalid_request_error",
                "model_not_found",
                "model",
            )

    def _tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        strange = [token for token in prompt if not 0 <= token < self._vocabulary]
        if strange:
            raise invalid(f"prompt: {strange[0]} is no token of this model.", "prompt")
        return list(prompt)

    def _chat_tokens(self, messages: list[Message]) -> list[int]:
        if not self.tokenizer.chat_template:
            raise invalid(
                f"{self.name!r} has no chat template; use /v1/completions with a prompt.",
                "messages",
            )
        try:
            text = self.tokenizer.apply_chat_template(
                [message.plain() for message in messages],
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # templates raise errors of their own for what they do not take
            raise invalid(f"messages: {error}", "messages") from error
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    async def _answer(
        self, request: Request, asked: Any, prompts: list[list[int]], max_tokens: int
    ) -> Response:
        for prompt in prompts or [[]]:
            self._check_length(len(prompt), max_tokens)
        await _check_client(request)
        choices = range(asked.choices)
        rows = [(prompt, asked.sampling(max_tokens, c)) for prompt in prompts for c in choices]
        talk = Conversation(self.tokenizer, rows)
        try:
            self.batcher.submit(talk.rows)
        except DrumlineError as error:
            raise _refused(error) from error
        answers = Answers(self.name, isinstance(asked, Chat))
        events = self._counted(talk, request)
        if not asked.stream:
            return await self._whole(talk, events, answers)
        first = await _first(events)
        chunks = _chunks(first, events, talk, answers, asked)
        return StreamingResponse(chunks, media_type="text/event-stream")

    def _check_length(self, num_prompt: int, max_tokens: int) -> None:
        if num_prompt == 0:
            raise invalid("The prompt has no tokens, so there is nothing to continue.", "prompt")
        if num_prompt + max_tokens > self.limits.max_length:
            raise invalid(
                f"{num_prompt} tokens of prompt and {max_tokens} new ones are more than the "
                f"{self.limits.max_length} that this server allows; ask for fewer.",
                "max_tokens",
                "context_length_exceeded",
            )

    async def _counted(self, talk: Conversation, request: Request) -> AsyncIterator[Event]:
        async with contextlib.aclosing(talk.events(request)) as events:
            async for event in events:
                yield event
        whole_s = time.monotonic() - talk.begun
        self.metrics.answered(talk.usage()["prompt_tokens"], talk.first_s, whole_s)

    async def _whole(
        self, talk: Conversation, events: AsyncIterator[Event], answers: Answers
    ) -> Response:
        texts, ends = [""] * len(talk.rows), ["cancelled"] * len(talk.rows)
        try:
            async for event in events:
                texts[event.number] += event.text
                if event.end is not None:
                    ends[event.number] = str(event.end)
        except Exception as error:
            raise _lost(error) from error
        return JSONResponse(answers.whole(texts, ends, talk.usage()))


async def _first(events: AsyncIterator[Event]) -> Event | None:
    """The first event, while an error can still be an answer with a status of its own."""
    try:
        return await anext(events, None)
    except Exception as error:
        raise _lost(error) from error


async def _chunks(
    first: Event | None,
    events: AsyncIterator[Event],
    talk: Conversation,
    answers: Answers,
    asked: Any,
) -> AsyncIterator[str]:
    """Server-sent events (WHATWG HTML, 9.2), as OpenAI sends them."""
    event = first
    if isinstance(asked, Chat):
        for number in range(len(talk.rows)):
            yield _line(answers.opening(number))
    try:
        while event is not None:
            end = None if event.end is None else str(event.end)
            yield _line(answers.chunk(event.number, event.text, end))
            event = await anext(events, None)
    except Exception as error:
        yield _line(_lost(error).body)
        return
    if asked.wants_usage:
        yield _line(answers.usage(talk.usage()))
    yield "data: [DONE]\n\n"


def _line(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _lost(error: Exception) -> ApiError:
    return ApiError(500, str(error) or repr(error), "server_error", "internal_error")


def _refused(error: DrumlineError) -> ApiError:
    if isinstance(error, RequestTooLarge):
        return invalid(str(error))
    if isinstance(error, Busy):
        return ApiError(429, str(error), "rate_limit_error", "server_busy")
    return _lost(error)


async def _check_client(request: Request) -> None:
    """Raise what nobody hears if the client has gone, as it may while its request waits."""
    if await request.is_disconnected():
        raise ApiError(499, "The client has gone.", "invalid_request_error", "client_gone")


async def _body(request: Request) -> bytes:
    try:
        return await asyncio.wait_for(_whole_body(request), BODY_S)
    except asyncio.TimeoutError as error:
        text = f"The body did not come within {BODY_S} s."
        raise ApiError(408, text, "invalid_request_error", "body_too_slow") from error


async def _whole_body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            text = f"The body has more than {MAX_BODY} bytes, which is all that is taken."
            raise ApiError(413, text, "invalid_request_error", "body_too_large")
    return bytes(body)


def application(service: Service, key: str | None) -> Any:
    """The ASGI application; with a key, only who knows it is answered, but for /health."""

    async def authorize(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if key is not None and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            text = "The API key is missing or wrong: send 'Authorization: Bearer KEY'."
            raise ApiError(401, text, "authentication_error", "invalid_api_key")

    app = FastAPI(title="drumline", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_api_route("/health", service.health)
    for path, handler, method in (
        ("/metrics", service.show_metrics, "GET"),
        ("/v1/models", service.models, "GET"),
        ("/v1/models/{name:path}", service.model, "GET"),
        ("/v1/completions", service.completions, "POST"),
        ("/v1/chat/completions", service.chat, "POST"),
    ):
        app.add_api_route(path, handler, methods=[method], dependencies=[Depends(authorize)])
    app.add_exception_handler(ApiError, _show_error)
    app.add_exception_handler(HTTPException, _show_http_error)
    app.add_exception_handler(Exception, _show_unknown_error)
    for status in (404, 405):
        app.add_exception_handler(status, _show_http_error)
    return _Counting(app, service.metrics)


async def _show_error(_: Request, error: ApiError) -> Response:
    return JSONResponse(error.body, error.status)


async def _show_unknown_error(_: Request, error: Exception) -> Response:
    """A mistake of the server's own, which is raised again, and so is in its log."""
    return await _show_error(_, _lost(error))


async def _show_http_error(request: Request, error: HTTPException) -> Response:
    text = f"{request.method} {request.url.path}: {error.detail}"
    shown = ApiError(error.status_code, text, "invalid_request_error")
    return JSONResponse(shown.body, shown.status)


class _Counting:
    """Counts the answers of an application by path and status."""

    PATHS = ("/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions")

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                known = path if path in self.PATHS else "other"
                self._metrics.requested(known, message["status"])
            await send(message)

        await self._app(scope, receive, counted)
