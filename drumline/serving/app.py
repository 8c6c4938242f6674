"""The ASGI application of `drumline serve`: OpenAI's API over a BatchScheduler.

service = Service(["llama"], model, tokenizer, ServingLimits(max_length=4096))
app = application(service, key="secret")
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

import launcher
from coordinator import Peer
from drumline import timings
from drumline.errors import DrumlineError, PeerLost
from drumline.serving import metrics, protocol
from drumline.serving import scheduler as scheduling
from drumline.serving.detokenize import IncrementalDetokenizer
from drumline.serving.front.remote_scheduler import RemoteScheduler, Scheduler
from drumline.serving.grammar import GrammarCompiler
from drumline.serving.logprobs import LogprobFormatter
from drumline.serving.sampling import Grammar, SamplingParams, TokenLogprob
from drumline.serving.scheduler import BatchScheduler, Generation, ServingLimits
from drumline.serving.status import StatusReport

log = logging.getLogger("drumline.requests")

MIN_ITEMS = 128  # that a list or object of a request may have, however small max_length is
SHORT_BODY_NBYTES = 64 << 10  # longer ones are parsed and tokenized one after the other
MAX_BODIES_NBYTES = 64 << 20  # of all bodies at a time, beyond which long ones are refused

REPORT_S, REPORT_POLLS = 1.0, 10  # between two reports, and looks at failures meanwhile
PAGE = Path(__file__).with_name("status_page.html")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}

Prompts = list[list[int]]
"""The tokens of each."""


@dataclass(frozen=True)
class TextEvent:
    """New text of one choice, and the reason of its end, if it has ended."""

    index: int
    text: str
    end_reason: str | Exception | None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the tokens since the event before, if the request asks for them."""


class SequenceRequest(NamedTuple):
    """One sequence of a request, as Generation takes it."""

    prompt: list[int]
    params: SamplingParams
    end_tokens: set[int]
    grammar: Grammar | None


class RequestStream:
    """The generations of one request, and their text as it comes; used within the event loop."""

    def __init__(self, tokenizer: Any, sequences: Sequence[SequenceRequest]) -> None:
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[TextEvent | None]()
        self._tokenizer = tokenizer
        self.start, self.first_token_s = time.monotonic(), 0.0
        self.generations = [
            self._generation(index, sequence) for index, sequence in enumerate(sequences)
        ]

    def _generation(self, index: int, sequence: SequenceRequest) -> Generation:
        prompt, params, end_tokens, grammar = sequence
        detokenizer = IncrementalDetokenizer(self._tokenizer, params.stop, prompt)
        logprobs: list[TokenLogprob] = []  # of tokens whose text is not posted yet

        def on_token(token: int) -> bool:
            if generation.sampler.logprob is not None:
                logprobs.append(generation.sampler.logprob)
            if text := detokenizer.add(token):
                self._post(TextEvent(index, text, None, logprobs.copy()))
                logprobs.clear()
            return not detokenizer.is_stopped

        def on_end(reason: str | Exception) -> None:
            text = "" if isinstance(reason, Exception) else detokenizer.flush()
            self._post(TextEvent(index, text, reason, logprobs))

        generation = Generation(prompt, params, on_token, on_end, end_tokens, grammar)
        return generation

    def _post(self, event: TextEvent) -> None:
        """Pass an event from a thread of the scheduler to the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody listens
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def events(self, request: Request) -> AsyncGenerator[TextEvent, None]:
        """Yield until all generations have ended or the client has disconnected.

        Raises the exception that ended a generation.
        """
        disconnect = asyncio.create_task(self._watch_disconnect(request))
        num_open = len(self.generations)
        try:
            while num_open and (event := await self._events.get()) is not None:
                self.first_token_s = self.first_token_s or time.monotonic() - self.start
                if isinstance(event.end_reason, Exception):
                    raise event.end_reason
                num_open -= event.end_reason is not None
                yield event
        finally:
            disconnect.cancel()
            for generation in self.generations:
                generation.cancel()

    async def _watch_disconnect(self, request: Request) -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(timings.TIMINGS.disconnect_poll_s)
        self._events.put_nowait(None)

    def usage(self) -> dict[str, int]:
        """The number of tokens so far, as OpenAI's API reports it."""
        prompts = {id(item.prompt): len(item.prompt) for item in self.generations}  # choices share
        num_prompt = sum(prompts.values())
        num_new = sum(len(item.new_tokens) for item in self.generations)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        }


class Service:
    """The handlers of OpenAI's API for one model.

    names: what requests may call it, the first what responses do. model: None if ranks that are no
    part of this process have it. peers: the ranks of the model.
    """

    def __init__(
        self,
        names: Sequence[str],
        model: Any,
        tokenizer: Any,
        limits: ServingLimits,
        peers: Sequence[Peer] = (),
    ) -> None:
        self.names, self.name = names, names[0]
        self.tokenizer, self.limits = tokenizer, limits
        self.failure: DrumlineError | None = None
        self.created = int(time.time())
        self._bodies_nbytes = 0
        self._long_body_thread = ThreadPoolExecutor(1)
        kind = functools.partial(BatchScheduler, model) if model is not None else RemoteScheduler
        self.scheduler: Scheduler = kind(limits, self.fail)
        self.metrics = metrics.ServerMetrics(self.scheduler)
        self.status = StatusReport(getattr(model, "device_map", None), self.scheduler, peers)

    def close(self) -> None:
        """End every request with an error; return when nothing runs."""
        self.scheduler.close()
        self._long_body_thread.shutdown(wait=False, cancel_futures=True)

    def fail(self, failure: PeerLost) -> None:
        """Note that the model has lost a rank, so that nothing can run any longer."""
        self.status.failures += failure.failures  # first, for no report follows the failure
        self.failure = self.failure or failure

    async def get_health(self) -> Response:
        if self.failure is not None:
            return JSONResponse(_internal_error(self.failure).body, 503)
        status = "restarting" if self.scheduler.is_restarting else "ok"
        return JSONResponse({"status": status, "ranks_missing": self.scheduler.num_missing_ranks})

    async def get_page(self) -> Response:
        return Response(PAGE.read_text(), media_type="text/html", headers=PAGE_HEADERS)

    async def get_status(self, request: Request) -> Response:
        """A stream of reports, one a second; the last one tells of the rank that failed."""

        async def reports() -> AsyncIterator[str]:
            has_failed = False
            while not (has_failed or await request.is_disconnected()):
                has_failed = self.failure is not None
                yield f"data: {self.status.to_json()}\n\n"
                for _ in range(0 if has_failed else REPORT_POLLS):
                    await asyncio.sleep(REPORT_S / REPORT_POLLS)
                    if self.failure is not None:
                        break

        return StreamingResponse(reports(), media_type="text/event-stream")

    async def get_metrics(self) -> Response:
        return Response(self.metrics.exposition(), media_type=metrics.CONTENT_TYPE)

    async def list_models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model_card(name) for name in self.names]}

    async def get_model(self, name: str) -> dict[str, Any]:
        self._check_name(name)
        return self._model_card(name)

    def _model_card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "drumline",
            "max_model_len": self.limits.max_length,
        }

    async def create_completion(self, request: Request) -> Response:
        body, prompts = await self._read(
            protocol.CompletionRequest, request, self._tokenize_prompts
        )
        max_tokens = body.max_tokens or protocol.DEFAULT_MAX_TOKENS
        return await self._respond(request, body, prompts, max_tokens)

    async def create_chat_completion(self, request: Request) -> Response:
        body, prompts = await self._read(
            protocol.ChatCompletionRequest, request, self._tokenize_chat
        )
        num_left = max(self.limits.max_length - len(prompts[0]), 1)
        max_tokens = body.max_completion_tokens or body.max_tokens or num_left
        return await self._respond(request, body, prompts, max_tokens)

    async def tokenize(self, request: Request) -> dict[str, Any]:
        def tokens_of(body: protocol.TokenizeRequest) -> Prompts:
            return [self._tokenize_text(body.prompt, add_special_tokens=body.add_special_tokens)]

        _, (tokens,) = await self._read(protocol.TokenizeRequest, request, tokens_of)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self.limits.max_length}

    async def detokenize(self, request: Request) -> dict[str, str]:
        def tokens_of(body: protocol.DetokenizeRequest) -> Prompts:
            self._check_tokens(body.tokens, "tokens")
            return [body.tokens]

        _, (tokens,) = await self._read(protocol.DetokenizeRequest, request, tokens_of)
        return {"prompt": self.tokenizer.decode(tokens)}

    async def get_version(self) -> dict[str, str]:
        return {"version": launcher.__version__}

    async def _read(
        self, kind: type[Any], request: Request, tokenize: Callable[[Any], Prompts]
    ) -> tuple[Any, Prompts]:
        """The request and its prompts; those of long bodies are made one after the other."""
        content, body_s = bytearray(), timings.TIMINGS.body_s

        def prepare() -> tuple[Any, Prompts]:
            body = self._parse(kind, content)
            return body, tokenize(body)

        try:
            await asyncio.wait_for(self._receive(request, content), body_s)
            thread = self._long_body_thread if len(content) > SHORT_BODY_NBYTES else None
            return await asyncio.get_running_loop().run_in_executor(thread, prepare)
        except TimeoutError as error:
            text = f"The body did not arrive within {body_s:g} s."
            raise protocol.ApiError(408, text, "invalid_request_error", "body_too_slow") from error
        except ClientDisconnect as error:
            raise _disconnected() from error
        finally:
            self._bodies_nbytes -= len(content)

    async def _receive(self, request: Request, content: bytearray) -> None:
        max_nbytes = self.limits.max_body_nbytes
        async for piece in request.stream():
            content += piece
            self._bodies_nbytes += len(piece)
            if len(content) > max_nbytes:
                text = (
                    f"The body has more than {max_nbytes} bytes, the most that this server reads."
                )
                raise protocol.ApiError(413, text, "invalid_request_error", "body_too_large")
            if self._bodies_nbytes > MAX_BODIES_NBYTES and len(content) > SHORT_BODY_NBYTES:
                text = "Too many large request bodies are in progress; retry later."
                raise protocol.ApiError(429, text, "rate_limit_error", "server_busy")

    def _parse(self, kind: type[Any], content: bytes | bytearray) -> Any:
        """The request. Prompts are counted before they are validated, as there may be many."""
        fields = protocol.parse(content)
        self._check_capacity(protocol.num_prompts(fields.get("prompt")))
        body = protocol.validate(kind, fields, max(self.limits.max_length, MIN_ITEMS))
        if body.model is not None:
            self._check_name(body.model)
        return body

    def _check_capacity(self, num_sequences: int) -> None:
        with _as_api_error():
            self.scheduler.check_capacity(num_sequences)

    def _check_name(self, name: str) -> None:
        if name not in self.names:
            raise protocol.ApiError(
                404,
                f"The model {name!r:.200} is not served here, but {self.name!r} is.",
                "invalid_request_error",
                "model_not_found",
                "model",
            )

    def _tokenize_prompts(self, body: protocol.CompletionRequest) -> Prompts:
        prompts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        if prompts and isinstance(prompts[0], int):
            prompts = [prompts]
        self._check_capacity(len(prompts) * body.num_choices)
        return [self._tokenize(prompt) for prompt in prompts]

    def _tokenize(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenize_text(prompt)
        self._check_tokens(prompt, "prompt")
        return list(prompt)

    def _check_tokens(self, tokens: Sequence[int], name: str) -> None:
        unknown = [token for token in tokens if not 0 <= token < self.scheduler.vocabulary]
        if unknown:
            raise protocol.invalid_request(
                f"{name}: {unknown[0]} is not a token of this model.", name
            )

    def _tokenize_chat(self, body: protocol.ChatCompletionRequest) -> Prompts:
        self._check_capacity(body.num_choices)
        if not self.tokenizer.chat_template:
            raise protocol.invalid_request(
                f"{self.name!r} has no chat template; use /v1/completions with a prompt.",
                "messages",
            )
        try:
            text = self.tokenizer.apply_chat_template(
                [message.for_template() for message in body.messages],
                tokenize=False,
                add_generation_prompt=True,
                **body.template_options(),
            )
        except Exception as error:  # a template may raise any error for messages it rejects
            raise protocol.invalid_request(f"messages: {error}", "messages") from error
        return [self._tokenize_text(text, add_special_tokens=False)]

    def _tokenize_text(self, text: str, **options: bool) -> list[int]:
        max_chars = self.limits.max_length * self._longest_token
        if len(text) > max_chars:
            raise protocol.invalid_request(
                f"{len(text)} characters are more than the {self.limits.max_length} tokens that "
                f"this server allows can hold ({max_chars}); send fewer.",
                code="context_length_exceeded",
            )
        return list(self.tokenizer(text, **options)["input_ids"])

    @functools.cached_property
    def _longest_token(self) -> int:
        """In characters. A text that has more for each token that fits is refused."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    async def _respond(
        self, request: Request, body: Any, prompts: list[list[int]], max_tokens: int
    ) -> Response:
        self._check_tokens(body.named_tokens, "logit_bias or stop_token_ids")
        for prompt in prompts or [[]]:
            self._check_length(len(prompt), max_tokens)
        if body.min_tokens > max_tokens:
            text = f"min_tokens={body.min_tokens} is more than the {max_tokens} at most."
            raise protocol.invalid_request(text, "min_tokens")
        if await request.is_disconnected():
            raise _disconnected()
        sequences = await asyncio.get_running_loop().run_in_executor(
            None, self._sequences, body, prompts, max_tokens
        )
        stream = RequestStream(self.tokenizer, sequences)
        with _as_api_error():
            self.scheduler.submit(stream.generations)
        is_chat = isinstance(body, protocol.ChatCompletionRequest)
        formatter = None if body.num_logprobs is None else LogprobFormatter(self.tokenizer, is_chat)
        response = protocol.ResponseBuilder(self.name, is_chat, formatter)
        events = self._measured(stream, request)
        if isinstance(body, protocol.CompletionRequest) and body.echo:
            events = self._echoed(stream, events)
        if not body.stream:
            return await _whole_response(stream, events, response)
        with _as_internal_error():  # an error before the first event still has a status of its own
            first = await anext(events, None)
        chunks = _chunks(first, events, stream, response, body)
        return StreamingResponse(chunks, media_type="text/event-stream")

    def _sequences(
        self, body: protocol.GenerationRequest, prompts: Prompts, max_tokens: int
    ) -> list[SequenceRequest]:
        end_tokens, schema = self.scheduler.end_tokens, body.json_schema

        def sequence(prompt: list[int], choice: int) -> SequenceRequest:
            grammar = None if schema is None else self._grammars.json(schema)
            params = body.sampling_params(max_tokens, choice)
            return SequenceRequest(prompt, params, end_tokens, grammar)

        try:
            return [sequence(prompt, i) for prompt in prompts for i in range(body.num_choices)]
        except ValueError as error:
            text = f"response_format: {error}"
            raise protocol.invalid_request(text, "response_format") from error
        except DrumlineError as error:
            raise protocol.invalid_request(str(error), "response_format") from error

    @functools.cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self.scheduler.vocabulary)

    async def _echoed(
        self, stream: RequestStream, events: AsyncIterator[TextEvent]
    ) -> AsyncIterator[TextEvent]:
        """The prompts, and then the events."""
        for index, generation in enumerate(stream.generations):
            text = self.tokenizer.decode(generation.prompt, skip_special_tokens=True)
            yield TextEvent(index, text, None)
        async for event in events:
            yield event

    def _check_length(self, num_prompt: int, max_tokens: int) -> None:
        if num_prompt == 0:
            text = "The prompt has no tokens, so there is nothing to continue."
            raise protocol.invalid_request(text, "prompt")
        if num_prompt + max_tokens > self.limits.max_length:
            raise protocol.invalid_request(
                f"{num_prompt} tokens of prompt and {max_tokens} new ones are more than the "
                f"{self.limits.max_length} that this server allows; ask for fewer.",
                "max_tokens",
                "context_length_exceeded",
            )

    async def _measured(self, stream: RequestStream, request: Request) -> AsyncIterator[TextEvent]:
        async with contextlib.aclosing(stream.events(request)) as events:
            async for event in events:
                yield event
        request_s = time.monotonic() - stream.start
        usage = stream.usage()
        self.metrics.observe_completion(usage["prompt_tokens"], stream.first_token_s, request_s)
        self.status.observe(stream.first_token_s, request_s)
        log.info(
            "%s: %d tokens of prompt, %d new ones, the first after %.3f s, the last after %.3f s",
            *(request.url.path, usage["prompt_tokens"], usage["completion_tokens"]),
            *(stream.first_token_s, request_s),
        )


async def _whole_response(
    stream: RequestStream, events: AsyncIterator[TextEvent], response: protocol.ResponseBuilder
) -> Response:
    choices = [protocol.ChoiceText(finish_reason="cancelled") for _ in stream.generations]
    with _as_internal_error():
        async for event in events:
            choice = choices[event.index]
            choice.text += event.text
            choice.logprobs += event.logprobs
            if event.end_reason is not None:
                choice.finish_reason = str(event.end_reason)
    return JSONResponse(response.response(choices, stream.usage()))


async def _chunks(
    first: TextEvent | None,
    events: AsyncIterator[TextEvent],
    stream: RequestStream,
    response: protocol.ResponseBuilder,
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
            piece = protocol.ChoiceText(event.text, event.logprobs, end_reason)
            yield _server_sent_event(response.chunk(event.index, piece, offsets[event.index]))
            offsets[event.index] += len(event.text)
            event = await anext(events, None)
    except Exception as error:  # the status is sent already, so the error becomes an event
        yield _server_sent_event(_internal_error(error).body)
        return
    if body.includes_usage:
        yield _server_sent_event(response.usage_chunk(stream.usage()))
    yield "data: [DONE]\n\n"


def _server_sent_event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _internal_error(error: Exception) -> protocol.ApiError:
    """500; 503 for what another server would answer, or this one once it is started again."""
    is_gone = isinstance(error, (PeerLost, scheduling.ServerStopping))
    status, code = (503, "server_unavailable") if is_gone else (500, "internal_error")
    return protocol.ApiError(status, str(error) or repr(error), "server_error", code)


@contextlib.contextmanager
def _as_internal_error() -> Iterator[None]:
    """Within, every error is answered with status 500, or 503."""
    try:
        yield
    except Exception as error:
        raise _internal_error(error) from error


@contextlib.contextmanager
def _as_api_error() -> Iterator[None]:
    """Within, errors of the scheduler are answered with their status."""
    try:
        yield
    except scheduling.RequestTooLarge as error:
        raise protocol.invalid_request(str(error)) from error
    except scheduling.ServerBusy as error:
        raise protocol.ApiError(429, str(error), "rate_limit_error", "server_busy") from error
    except DrumlineError as error:
        raise _internal_error(error) from error


def _disconnected() -> protocol.ApiError:
    text = "The client has disconnected."
    return protocol.ApiError(499, text, "invalid_request_error", "client_disconnected")


def application(service: Service, key: str | None) -> Any:
    """The ASGI application. With a key, every path but / and /health requires it as a bearer
    token; the page at / holds nothing of the model, and asks for the key."""

    async def authorize(request: Request) -> None:
        header = request.headers.get("authorization", "")
        if key is not None and not hmac.compare_digest(header.encode(), f"Bearer {key}".encode()):
            text = "The API key is missing or wrong: send 'Authorization: Bearer KEY'."
            raise protocol.ApiError(401, text, "authentication_error", "invalid_api_key")

    app = FastAPI(title="drumline", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_api_route("/health", service.get_health)
    app.add_api_route("/", service.get_page)
    for path, handler, method in (
        ("/metrics", service.get_metrics, "GET"),
        ("/status", service.get_status, "GET"),
        ("/version", service.get_version, "GET"),
        ("/tokenize", service.tokenize, "POST"),
        ("/detokenize", service.detokenize, "POST"),
        ("/v1/models", service.list_models, "GET"),
        ("/v1/models/{name:path}", service.get_model, "GET"),
        ("/v1/completions", service.create_completion, "POST"),
        ("/v1/chat/completions", service.create_chat_completion, "POST"),
    ):
        app.add_api_route(path, handler, methods=[method], dependencies=[Depends(authorize)])
    app.add_exception_handler(protocol.ApiError, _respond_api_error)
    app.add_exception_handler(HTTPException, _respond_http_error)
    app.add_exception_handler(Exception, _respond_unknown_error)
    for status in (404, 405):
        app.add_exception_handler(status, _respond_http_error)
    return _ResponseCounter(app, service.metrics)


async def _respond_api_error(_: Request, error: protocol.ApiError) -> Response:
    return JSONResponse(error.body, error.status)


async def _respond_unknown_error(request: Request, error: Exception) -> Response:
    """A mistake of the server, which Starlette raises again, so that it is in the log."""
    return await _respond_api_error(request, _internal_error(error))


async def _respond_http_error(request: Request, error: HTTPException) -> Response:
    text = f"{request.method} {request.url.path}: {error.detail}"
    return await _respond_api_error(
        request, protocol.ApiError(error.status_code, text, "invalid_request_error")
    )


class _ResponseCounter:
    """Middleware that counts responses by path and status."""

    PATHS = (
        *("/", "/health", "/metrics", "/status", "/version", "/tokenize", "/detokenize"),
        *("/v1/models", "/v1/completions", "/v1/chat/completions"),
    )

    def __init__(self, app: Any, server_metrics: metrics.ServerMetrics) -> None:
        self._app, self._metrics = app, server_metrics

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Any]) -> None:
        path = scope.get("path", "")
        label = path if path in self.PATHS else "other"

        async def counting_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._metrics.observe_response(label, message["status"])
            await send(message)

        await self._app(scope, receive, counting_send)
