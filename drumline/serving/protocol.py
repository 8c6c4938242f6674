"""OpenAI's protocol: requests, responses, chunks of a stream, errors.

Unsupported fields are rejected by name: a response that ignored one would be wrong.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from drumline.serving.sampling import SamplingParams

DEFAULT_MAX_TOKENS = 16
"""Of a completion without max_tokens; a chat may go on to the limit of the server."""
MAX_ERRORS = 1000  # to search for the one to report: pydantic lists 300,000 in 20 s
MAX_STOPS, MAX_STOP_CHARS = 16, 256  # of a request; each is searched for at every token


class ApiError(Exception):
    """An error response in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def invalid_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, "invalid_request_error", code, param)


class StreamOptions(BaseModel):  # type: ignore[misc]
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class GenerationRequest(BaseModel):  # type: ignore[misc]
    """The fields that completions and chats share."""

    model_config = ConfigDict(extra="forbid")
    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @field_validator("stop")  # type: ignore[untyped-decorator]
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> list[str]:
        texts = [stop] if isinstance(stop, str) else stop or []
        if len(texts) > MAX_STOPS or any(len(text) > MAX_STOP_CHARS for text in texts):
            raise ValueError(f"more than {MAX_STOPS} strings, or {MAX_STOP_CHARS} characters")
        return texts

    @property
    def num_choices(self) -> int:
        """Completions of each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """True if the last chunk of the stream holds the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, max_tokens: int, choice: int) -> SamplingParams:
        """The parameters of one choice. With a seed, each choice has a seed of its own."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=None if self.seed is None else (self.seed + choice) % 2**63,
            stop=tuple(text for text in self.stop or () if text),
        )


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]


class TextPart(BaseModel):  # type: ignore[misc]
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):  # type: ignore[misc]
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """The message in the form that chat templates take."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatCompletionRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)


DISABLED_VALUES: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "logit_bias": {},
    "logprobs": False,
    "metadata": {},
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "store": False,
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": 0,
}
"""Unsupported fields, with the value by which clients say that they do not use them."""


def parse(body: bytes | bytearray) -> dict[str, Any]:
    """The fields of a request. Raises ApiError unless the body is a JSON object."""
    try:
        fields = json.loads(body)
    except UnicodeError as error:
        raise invalid_request(f"The body is not valid text: {error}") from error
    except (ValueError, RecursionError) as error:
        raise invalid_request(f"The body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise invalid_request("The body is not a JSON object.")
    return fields


def num_prompts(prompt: Any) -> int:
    """The number of prompts in the field `prompt`; a list of tokens is one prompt."""
    is_single = not isinstance(prompt, list) or (prompt and isinstance(prompt[0], int))
    return 1 if is_single else len(prompt)


def validate(kind: type[Any], fields: dict[str, Any], max_items: int) -> Any:
    """The validated request; a field that is null counts as absent. Raises ApiError.

    max_items: the most items of any list or object.
    """
    try:
        present = _without_nulls(fields, max_items)
        json.dumps(present, ensure_ascii=False).encode()
        for name, disabled in DISABLED_VALUES.items():
            if type(present.get(name)) is type(disabled) and present[name] == disabled:
                del present[name]
        return kind.model_validate(present)
    except UnicodeError as error:
        raise invalid_request(f"The body is not valid text: {error}") from error
    except RecursionError as error:
        raise invalid_request("The body nests lists or objects too deeply.") from error
    except ValidationError as error:
        raise _validation_error(error) from error


def _validation_error(error: ValidationError) -> ApiError:
    if error.error_count() > MAX_ERRORS:
        return invalid_request(
            f"The body has {error.error_count()} errors, too many to name. Leave out fields that "
            "OpenAI's API does not have, and lists of another type than it takes."
        )
    deepest = max(error.errors(), key=lambda details: len(details["loc"]))
    field = ".".join(str(step) for step in deepest["loc"])
    if deepest["type"] == "extra_forbidden":
        return invalid_request(f"{field} is not supported by this server; leave it out.", field)
    return invalid_request(f"{field}: {deepest['msg']}", field)


def _without_nulls(value: Any, max_items: int) -> Any:
    if not isinstance(value, (dict, list)):
        return value
    if len(value) > max_items:
        raise invalid_request(
            f"{len(value)} items in one list or object are more than the {max_items} that this "
            "server accepts; send fewer.",
            code="context_length_exceeded",
        )
    if isinstance(value, list):
        return [_without_nulls(item, max_items) for item in value]
    pairs = ((name, item) for name, item in value.items() if item is not None)
    return {name: _without_nulls(item, max_items) for name, item in pairs}


class ResponseBuilder:
    """The bodies of one response, whole or in chunks of a stream."""

    def __init__(self, model: str, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._header = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def response(
        self, texts: list[str], finish_reasons: list[str], usage: dict[str, int]
    ) -> dict[str, Any]:
        """The body of a response that is no stream."""
        kind = "chat.completion" if self._is_chat else "text_completion"
        choices = [
            self._choice(index, reason, "message", {"role": "assistant", "content": text})
            for index, (text, reason) in enumerate(zip(texts, finish_reasons, strict=True))
        ]
        return {**self._header, "object": kind, "choices": choices, "usage": usage}

    def first_chunk(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat's choice."""
        return self._chunk(
            [self._choice(index, None, "delta", {"role": "assistant", "content": ""})]
        )

    def chunk(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """A chunk of one choice; the last of a chat's choice holds no text."""
        is_empty = self._is_chat and not text and finish_reason is not None
        delta = {} if is_empty else {"content": text}
        return self._chunk([self._choice(index, finish_reason, "delta", delta)])

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last chunk, if the request includes the usage."""
        return {**self._chunk([]), "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._header, "object": kind, "choices": choices}

    def _choice(
        self, index: int, finish_reason: str | None, field: str, message: dict[str, str]
    ) -> dict[str, Any]:
        body: dict[str, Any] = {field: message} if self._is_chat else {"text": message["content"]}
        return {"index": index, **body, "logprobs": None, "finish_reason": finish_reason}
