"""The ASGI application of `drumline serve`: OpenAI's API over a BatchScheduler.

service = Service(["llama"], model, tokenizer, ServingLimits(max_length=4096))
app = application(service, key="secret")
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import ipaddress
import itertools
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

import launcher
from drumline import timings
from drumline.errors import DrumlineError
from drumline.serving import metrics, protocol
from drumline.serving.answers import anthropic_messages, responses
from drumline.serving.answers.message_parser import call_starts, message_parser
from drumline.serving.answers.request_stream import MessagePiece, RequestStream, api_error
from drumline.serving.answers.response_writer import ResponseBuilder, events, whole_response
from drumline.serving.front.remote_scheduler import RemoteScheduler
from drumline.serving.grammar import GrammarCompiler
from drumline.serving.image_reader import ImageReader
from drumline.serving.one_by_one import Prompt
from drumline.serving.prompt_reader import PromptReader, Prompts
from drumline.serving.scheduler import BatchScheduler, ServerBusy, ServingLimits
from drumline.serving.status import StatusReport

log = logging.getLogger("drumline.requests")

MIN_ITEMS = 128  # that a prompt may have, however small max_length is
SHORT_BODY_NBYTES = 64 << 10  # longer ones are parsed and tokenized one after the other
MAX_BODY_NBYTES = 4 << 20  # of a request
MAX_BODIES_NBYTES = 64 << 20  # of all bodies at a time, beyond which long ones are refused
MAX_INPUTS_NBYTES = 1 << 30  # of all images at a time, as the model takes them

Parse = Callable[[bytes | bytearray], dict[str, Any]]
"""Of a body, the fields of a request."""

REQUEST_ID = "x-request-id"
PRINTABLE = re.compile("[!-~]{1,200}")

REPORT_S, REPORT_POLLS = 1.0, 10  # between two reports, and looks at failures meanwhile
PAGE = Path(__file__).with_name("status_page.html")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}


class Service:
    """The handlers of OpenAI's API, and of Anthropic's messages, for one model.

    names: what requests may call it, the first what responses do. model: None if ranks that are no
    part of this process have it. sampling: parameters of requests that do not have them. images:
    None if the model takes none.
    """

    def __init__(
        self,
        names: Sequence[str],
        model: Any,
        tokenizer: Any,
        limits: ServingLimits,
        sampling: Mapping[str, float] = MappingProxyType({}),
        images: ImageReader | None = None,
    ) -> None:
        self.names, self.name = names, names[0]
        self.tokenizer, self.limits, self._sampling = tokenizer, limits, sampling
        self.created = int(time.time())
        self.is_stopping = False  # and no report follows
        self._bodies_nbytes = 0
        self._long_body_thread = ThreadPoolExecutor(1)
        self.scheduler = RemoteScheduler(limits) if model is None else BatchScheduler(model, limits)
        self.prompts = PromptReader(self.name, tokenizer, limits.max_length, self.scheduler, images)
        self.metrics = metrics.ServerMetrics(self.scheduler, self.name)
        self.status = StatusReport(self.scheduler)

    def close(self) -> None:
        """End every request with an error; return when nothing runs."""
        self.scheduler.close()
        self._long_body_thread.shutdown(wait=False, cancel_futures=True)

    async def get_health(self) -> Response:
        if (failure := self.scheduler.failure) is not None:
            return JSONResponse(api_error(failure).body, 503)
        status = "restarting" if self.scheduler.is_restarting else "ok"
        return JSONResponse({"status": status, "ranks_missing": self.scheduler.num_missing_ranks})

    async def get_page(self) -> Response:
        return Response(PAGE.read_text(), media_type="text/html", headers=PAGE_HEADERS)

    async def get_status(self, request: Request) -> Response:
        """A stream of reports; the last one tells of the rank that failed."""

        def is_last() -> bool:
            return self.is_stopping or self.scheduler.failure is not None

        async def reports() -> AsyncIterator[str]:
            has_ended = False
            while not (has_ended or await request.is_disconnected()):
                has_ended = is_last()
                yield f"data: {self.status.to_json()}\n\n"
                for _ in range(REPORT_POLLS):
                    if not is_last():
                        await asyncio.sleep(REPORT_S / REPORT_POLLS)

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
        kind, tokenize = protocol.CompletionRequest, self.prompts.of_completion
        body, prompts = await self._read(kind, request, tokenize)
        max_tokens = body.max_completion_tokens or body.max_tokens
        if max_tokens == 0 and not body.echo:
            text = "max_tokens is 0, so nothing would be generated; ask for more, or for echo."
            raise protocol.invalid_request(text, "max_tokens")
        return await self._respond(request, body, prompts, max_tokens, ResponseBuilder)

    async def create_chat_completion(self, request: Request) -> Response:
        return await self._create_chat(request, protocol.parse, ResponseBuilder)

    async def create_response(self, request: Request) -> Response:
        return await self._create_chat(request, responses.parse_as_chat, responses.ItemBuilder)

    async def create_message(self, request: Request) -> Response:
        return await self._create_chat(
            request, anthropic_messages.parse_message_request, anthropic_messages.MessageBuilder
        )

    async def count_tokens(self, request: Request) -> dict[str, int]:
        kind, tokenize = protocol.ChatCompletionRequest, self.prompts.of_chat
        parse = anthropic_messages.parse_count_request
        _, (tokens,) = await self._read(kind, request, tokenize, parse, generates=False)
        return {"input_tokens": len(tokens)}

    async def _create_chat(
        self, request: Request, parse: Parse, builder: type[ResponseBuilder]
    ) -> Response:
        kind = protocol.ChatCompletionRequest
        body, prompts = await self._read(kind, request, self.prompts.of_chat, parse)
        num_left = max(self.limits.max_length - len(prompts[0]), 1)
        max_tokens = body.max_completion_tokens or body.max_tokens or num_left
        return await self._respond(request, body, prompts, max_tokens, builder)

    async def tokenize(self, request: Request) -> dict[str, Any]:
        kind, tokenize = protocol.TokenizeRequest, self.prompts.of_completion
        _, (tokens,) = await self._read(kind, request, tokenize, generates=False)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self.limits.max_length}

    async def detokenize(self, request: Request) -> dict[str, str]:
        kind, check = protocol.DetokenizeRequest, self.prompts.of_tokens
        _, (tokens,) = await self._read(kind, request, check, generates=False)
        return {"prompt": self.tokenizer.decode(tokens)}

    async def get_version(self) -> dict[str, str]:
        return {"version": launcher.__version__}

    async def _read(
        self,
        kind: type[Any],
        request: Request,
        tokenize: Callable[[Any], Prompts],
        parse: Parse = protocol.parse,
        generates: bool = True,
    ) -> tuple[Any, Prompts]:
        """The request and its prompts; those of long bodies are made one after the other.

        generates: whether it needs a place in the queue.
        """
        content, body_s = bytearray(), timings.TIMINGS.body_s

        def prepare() -> tuple[Any, Prompts]:
            body = self._validated(kind, parse(content), generates)
            return body, tokenize(body)

        try:
            await asyncio.wait_for(self._receive(request, content), body_s)
            thread = self._long_body_thread if len(content) > SHORT_BODY_NBYTES else None
            return await asyncio.get_running_loop().run_in_executor(thread, prepare)
        except TimeoutError as error:
            text = f"The body did not arrive within {body_s:g} s."
            raise protocol.ApiError(408, text, "body_too_slow") from error
        finally:
            self._bodies_nbytes -= len(content)

    async def _receive(self, request: Request, content: bytearray) -> None:
        async for piece in request.stream():
            content += piece
            self._bodies_nbytes += len(piece)
            if len(content) > MAX_BODY_NBYTES:
                text = f"The body has more than {MAX_BODY_NBYTES} bytes, the most that are read."
                raise protocol.ApiError(413, text, "body_too_large")
            if self._bodies_nbytes > MAX_BODIES_NBYTES and len(content) > SHORT_BODY_NBYTES:
                raise ServerBusy("Too many large request bodies are in progress; retry later.")

    def _validated(self, kind: type[Any], fields: dict[str, Any], generates: bool) -> Any:
        """The request. Prompts are counted before they are validated, as there may be many."""
        if generates:
            self.scheduler.check_capacity(len(protocol.prompts_of(fields.get("prompt"))))
        body = protocol.validate(kind, fields, max(self.limits.max_length, MIN_ITEMS))
        if body.model is not None:
            self._check_name(body.model)
        if generates:
            prompts = protocol.prompts_of(getattr(body, "prompt", None))
            self.scheduler.check_capacity(len(prompts) * body.n)
        return body

    def _check_name(self, name: str) -> None:
        if name not in self.names:
            text = f"The model {name!r:.200} is not served here, but {self.name!r} is."
            raise protocol.ApiError(404, text, "model_not_found", "model")

    async def _respond(
        self,
        request: Request,
        body: Any,
        prompts: list[list[int]],
        max_tokens: int,
        builder: type[ResponseBuilder],
    ) -> Response:
        self.prompts.check_tokens([*body.logit_bias], "logit_bias")
        self.prompts.check_tokens(body.stop_token_ids, "stop_token_ids")
        for prompt in prompts or [[]]:
            self._check_length(len(prompt), max_tokens)
        self._check_inputs(prompts)
        if body.min_tokens > max_tokens:
            text = f"min_tokens={body.min_tokens} is more than the {max_tokens} at most."
            raise protocol.invalid_request(text, "min_tokens")
        if await request.is_disconnected():
            raise ClientDisconnect("The client has disconnected.")
        stream = RequestStream(self.tokenizer, self.metrics.token_gap_s.observe)
        await asyncio.to_thread(self._add_choices, stream, body, prompts, max_tokens)
        self.scheduler.submit(stream.generations)
        request_id, num_choices = request.state.request_id, len(stream.generations)
        response = builder(self.name, request_id, body, num_choices, self.tokenizer)
        pieces = self._measured(stream, request)
        if not body.stream:
            return await whole_response(stream, pieces, response)
        first = await anext(pieces, None)  # an error before it still has a status of its own
        lines = events(first, pieces, stream, response)
        return StreamingResponse(lines, media_type="text/event-stream")

    def _add_choices(
        self,
        stream: RequestStream,
        body: protocol.GenerationRequest,
        prompts: Prompts,
        max_tokens: int,
    ) -> None:
        schema, end_token = body.json_schema, getattr(self.tokenizer, "eos_token_id", None)
        if end_token is not None and end_token >= self.scheduler.vocabulary:
            end_token = None
        for prompt, choice in itertools.product(prompts, range(body.n)):
            params = body.sampling_params(max_tokens, choice, self._sampling, end_token)
            try:
                starts = [*call_starts(self.tokenizer, body).values()]
                grammar = None if schema is None else self._grammars.json(schema, starts)
            except (ValueError, DrumlineError) as error:
                is_chosen = getattr(body, "tool_choice", "auto") not in ("auto", "none")
                field = "tool_choice" if is_chosen else "response_format"
                raise protocol.invalid_request(f"{field}: {error}", field) from error
            parser = message_parser(self.tokenizer, body, prompt)
            stream.add(body, prompt, params, self.scheduler.end_tokens, grammar, parser)

    @functools.cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self.scheduler.vocabulary)

    def _check_length(self, num_prompt: int, max_tokens: int) -> None:
        if num_prompt == 0:
            text = "The prompt has no tokens, so there is nothing to continue."
            raise protocol.invalid_request(text, "prompt")
        if num_prompt + max_tokens > (most := self.limits.max_length):
            raise protocol.context_error(
                most,
                f"you requested {num_prompt + max_tokens} tokens ({num_prompt} in the prompt, "
                f"{max_tokens} in the completion); ask for fewer.",
                "max_tokens" if num_prompt < most else None,
            )

    def _check_inputs(self, prompts: Prompts) -> None:
        """Raise ServerBusy where what images come to is more than may be held at a time."""
        new = sum(len(prompt.inputs) for prompt in prompts if isinstance(prompt, Prompt))
        if not new:
            return
        held = {id(item.prompt): len(item.inputs) for item, _ in self.scheduler.unfinished()}
        if new + sum(held.values()) > MAX_INPUTS_NBYTES:
            raise ServerBusy("Too many large images are in progress; retry later.")

    async def _measured(
        self, stream: RequestStream, request: Request
    ) -> AsyncIterator[MessagePiece | None]:
        async with contextlib.aclosing(stream.pieces(request)) as pieces:
            async for piece in pieces:
                if piece is not None and (reason := piece.finish_reason):
                    self.metrics.finished.labels(reason.replace("tool_calls", "stop")).inc()
                yield piece
        if not stream.request_s:  # the client has left
            return
        usage, times_s = stream.usage(), (stream.first_token_s, stream.request_s)
        self.metrics.prompt_tokens.inc(usage["prompt_tokens"])
        self.metrics.first_token_s.observe(stream.first_token_s)
        self.metrics.request_s.observe(stream.request_s)
        self.status.observe(*times_s)
        log.info(
            "%s, id %s: %d tokens of prompt, %d new, the first after %.3f s, the last after %.3f s",
            *(request.url.path, request.state.request_id),
            *(usage["prompt_tokens"], usage["completion_tokens"], *times_s),
        )


def application(
    service: Service, key: str | None, allowed_origins: Sequence[str] | None = None
) -> Any:
    """The ASGI application. With a key, every path but / and /health requires it as a bearer
    token or as x-api-key; the page at / holds nothing of the model, and asks for the key.

    allowed_origins: of pages whose scripts may send requests and read the answers; * is any.
    """

    async def authorize(request: Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        bearer = token.lstrip(" ") if scheme.lower() == "bearer" else ""  # RFC 9110, 11.1 and 11.4
        sent = [each.encode() for each in (bearer, request.headers.get("x-api-key", ""))]
        if key is not None and not any(hmac.compare_digest(each, key.encode()) for each in sent):
            text = "The API key is missing or wrong: send 'Authorization: Bearer KEY' or x-api-key."
            raise protocol.ApiError(401, text, "invalid_api_key")
        if key is None and not _is_local_name(name := request.url.hostname or "localhost"):
            text = (
                f"Without a key this server answers by an address or a name of a local network, "
                f"not as {name}, which a web page may have made up: start it with --api-key-file "
                "FILE, or have a proxy send Host: localhost."
            )
            raise protocol.ApiError(403, text)

    kinds = HTTPException, protocol.ApiError, DrumlineError, ClientDisconnect, Exception
    handlers = dict.fromkeys(kinds, _respond_error)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, exception_handlers=handlers)
    reads = ["GET", "HEAD"]
    app.add_api_route("/health", service.get_health, methods=reads)
    app.add_api_route("/", service.get_page, methods=reads)
    for path, handler, methods in (
        ("/metrics", service.get_metrics, reads),
        ("/status", service.get_status, ["GET"]),  # without an end
        ("/version", service.get_version, reads),
        ("/tokenize", service.tokenize, ["POST"]),
        ("/detokenize", service.detokenize, ["POST"]),
        ("/v1/models", service.list_models, reads),
        ("/v1/models/{name:path}", service.get_model, reads),
        ("/v1/completions", service.create_completion, ["POST"]),
        ("/v1/chat/completions", service.create_chat_completion, ["POST"]),
        ("/v1/responses", service.create_response, ["POST"]),
        ("/v1/messages", service.create_message, ["POST"]),
        ("/v1/messages/count_tokens", service.count_tokens, ["POST"]),
    ):
        app.add_api_route(path, handler, methods=methods, dependencies=[Depends(authorize)])
    if allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )
    return _marked(app, service.metrics)


def _is_local_name(name: str) -> bool:
    """True for a name that nobody in the internet can own and point at this host."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name) is not None
    name = name.rstrip(".")
    return "." not in name or name.endswith((".localhost", ".local", ".internal"))


async def _respond_error(request: Request, error: Exception) -> Response:
    """Of a request, the scheduler, or a mistake here, which Starlette raises again for the log."""
    headers = getattr(error, "headers", None)  # of a path and a method that do not go together
    if isinstance(error, HTTPException):
        text = f"{request.method} {request.url.path}: {error.detail}"
        error = protocol.ApiError(error.status_code, text)
    answer = api_error(error)
    if answer.status == 401:
        headers = {"WWW-Authenticate": "Bearer"}  # RFC 9110, 15.5.2
    of_messages = request.url.path.startswith("/v1/messages")
    if of_messages or request.url.path == "/v1/responses":
        answer = answer.renamed((anthropic_messages if of_messages else responses).FIELDS)
    body = anthropic_messages.error_body(answer) if of_messages else answer.body
    return JSONResponse(body, answer.status, headers)


def _marked(app: Any, server_metrics: metrics.ServerMetrics) -> Any:
    """The app, whose responses are counted by path and status, and have the id of their request."""

    async def marked(scope: Any, receive: Any, send: Callable[[Any], Any]) -> None:
        sent_id = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = sent_id if PRINTABLE.fullmatch(sent_id) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def marking_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")  # known once it is routed
                server_metrics.responses.labels(path, str(message["status"])).inc()
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await app(scope, receive, marking_send)

    return marked
