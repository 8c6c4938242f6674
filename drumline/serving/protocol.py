"""What clients of OpenAI's API say and hear: requests, answers, chunks, errors.

Fields that are not understood are refused by name: an answer that ignored one would be wrong.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drumline.serving.sampling import Sampling

DEFAULT_MAX_TOKENS = 16
"""Of a completion that does not say; a chat may go on to the limit of the server."""
MAX_FAULTS = 1000  # to look for the one to name: pydantic lists 300,000 in 20 s


class ApiError(Exception):
    """An answer in OpenAI's form of errors."""

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


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, "invalid_request_error", code, param)


class StreamOptions(BaseModel):  # type: ignore[misc]
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Asked(BaseModel):  # type: ignore[misc]
    """What completions and chats have in common."""

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

    @property
    def choices(self) -> int:
        """How many answers to each prompt."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int, choice: int) -> Sampling:
        """Of one choice; with a seed each has its own."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Sampling(
            max_tokens,
            1.0 if self.temperature is None else self.temperature,
            1.0 if self.top_p is None else self.top_p,
            self.top_k or 0,
            self.presence_penalty or 0.0,
            self.frequency_penalty or 0.0,
            None if self.seed is None else (self.seed + choice) % 2**63,
            tuple(text for text in stop if text),
        )


class Completion(Asked):
    prompt: str | list[str] | list[int] | list[list[int]]


class Part(BaseModel):  # type: ignore[misc]
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):  # type: ignore[misc]
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        whole = self.content
        text = whole if isinstance(whole, str) else "".join(part.text for part in whole)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Chat(Asked):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)


ASKING_NOTHING: dict[str, Any] = {
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
"""Fields that are not supported, and what some clients send in them who do not want them."""


def parse(body: bytes) -> dict[str, Any]:
    """The fields of a request. Raises ApiError where there is no JSON object."""
    try:
        fields = json.loads(body)
    except UnicodeError as error:
        raise invalid(f"The body holds what is no text: {error}") from error
    except (ValueError, RecursionError) as error:
        raise invalid(f"The body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise invalid("The body is no JSON object.")
    return fields


def num_prompts(prompt: Any) -> int:
    """The number of prompts in the field of this name; a list of tokens is one of them."""
    is_one = not isinstance(prompt, list) or (prompt and isinstance(prompt[0], int))
    return 1 if is_one else len(prompt)


def validate(kind: type[Any], fields: dict[str, Any], max_items: int) -> Any:
    """The request; a field that is null is as good as none. Raises ApiError that names a fault.

    max_items: of each list or object.
    """
    try:
        present = _without_nulls(fields, max_items)
        json.dumps(present, ensure_ascii=False).encode()
        return kind.model_validate(
            {name: value for name, value in present.items() if not _asks_nothing(name, value)}
        )
    except UnicodeError as error:
        raise invalid(f"The body holds what is no text: {error}") from error
    except RecursionError as error:
        raise invalid("The body holds lists within lists without end.") from error
    except ValidationError as error:
        raise _fault(error) from error


def _fault(error: ValidationError) -> ApiError:
    if error.error_count() > MAX_FAULTS:
        return invalid(
            f"The body has {error.error_count()} faults, so none is named here; leave out fields "
            "that OpenAI's API does not have, and lists of another type than it takes."
        )
    deepest = max(error.errors(), key=lambda fault: len(fault["loc"]))
    where = ".".join(str(step) for step in deepest["loc"])
    unknown = deepest["type"] == "extra_forbidden"
    what = " is not supported by this server; leave it out." if unknown else f": {deepest['msg']}"
    return invalid(where + what, where)


def _without_nulls(value: Any, max_items: int) -> Any:
    if not isinstance(value, (dict, list)):
        return value
    if len(value) > max_items:
        raise invalid(
            f"{len(value)} items in one list or object are more than the {max_items} that this "
            "server takes; send fewer.",
            code="context_length_exceeded",
        )
    if isinstance(value, list):
        return [_without_nulls(item, max_items) for item in value]
    pairs = ((name, item) for name, item in value.items() if item is not None)
    return {name: _without_nulls(item, max_items) for name, item in pairs}


def _asks_nothing(name: str, value: Any) -> bool:
    known = ASKING_NOTHING.get(name)
    return type(value) is type(known) and bool(value == known)


class Answers:
    """The answers to one request, whole or in chunks."""

    def __init__(self, model: str, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, texts: list[str], ends: list[str], usage: dict[str, int]) -> dict[str, Any]:
        kind = "chat.completion" if self._is_chat else "text_completion"
        choices = [
            self._choice(number, end, "message", {"role": "assistant", "content": text})
            for number, (text, end) in enumerate(zip(texts, ends, strict=True))
        ]
        return {**self._head, "object": kind, "choices": choices, "usage": usage}

    def opening(self, number: int) -> dict[str, Any]:
        """The first chunk of a chat's choice."""
        return self._chunk(
            [self._choice(number, None, "delta", {"role": "assistant", "content": ""})]
        )

    def chunk(self, number: int, text: str, end: str | None) -> dict[str, Any]:
        said = {"content": text} if text or end is None else {}
        if not self._is_chat:
            said = {"content": text}
        return self._chunk([self._choice(number, end, "delta", said)])

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last chunk, for those who asked for it."""
        return {**self._chunk([]), "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _choice(
        self, number: int, end: str | None, field: str, said: dict[str, str]
    ) -> dict[str, Any]:
        what: dict[str, Any] = {field: said} if self._is_chat else {"text": said["content"]}
        return {"index": number, **what, "logprobs": None, "finish_reason": end}
