"""OpenAI's protocol: requests, responses, chunks of a stream, errors.

Unsupported fields are rejected by name: a response that ignored one would be wrong.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from drumline.serving.sampling import SamplingParams

DEFAULT_MAX_TOKENS = 16
"""Of a completion without max_tokens; a chat may go on to the limit of the server."""
MAX_ERRORS = 1000  # to search for the one to report: pydantic lists 300,000 in 20 s
MAX_LOGPROBS = 20
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


class ApiObject(BaseModel):  # type: ignore[misc]
    """An object whose fields the API defines; one that is null counts as absent.

    What a user defines (a schema, tools, their calls) is a dict inside of one, and stays as it is.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")  # type: ignore[untyped-decorator]
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


class StreamOptions(ApiObject):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class JsonSchema(ApiObject):
    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = True


class ResponseFormat(ApiObject):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")  # type: ignore[untyped-decorator]
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("the type json_schema, and no other, takes the field json_schema")
        return self

    def wanted_schema(self) -> dict[str, Any] | None:
        """The schema of the response; None for any text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class GenerationRequest(ApiObject):
    """The fields that completions and chats share."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = {}
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    response_format: ResponseFormat | None = None
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
    def num_logprobs(self) -> int | None:
        """Of how many tokens the log-probabilities are wanted, in each place; None if not."""
        raise NotImplementedError

    @property
    def named_tokens(self) -> list[int]:
        """The tokens that the request names."""
        return [*self.logit_bias, *self.stop_token_ids]

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The schema of the response, if it must be JSON."""
        return None if self.response_format is None else self.response_format.wanted_schema()

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
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            logit_bias=tuple(self.logit_bias.items()),
            seed=None if self.seed is None else (self.seed + choice) % 2**63,
            stop=tuple(text for text in self.stop or () if text),
            stop_tokens=frozenset(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            num_logprobs=self.num_logprobs,
        )


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @model_validator(mode="after")  # type: ignore[untyped-decorator]
    def _check_echo(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported by this server; leave one out")
        return self


class TextPart(ApiObject):
    type: Literal["text"]
    text: str


class ChatMessage(ApiObject):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] = ""
    name: str | None = None
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message in the form that chat templates take."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        fields = {"tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id}
        present = {name: value for name, value in fields.items() if value}
        return {"role": role, "content": text, **present}


class ChatCompletionRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["none", "auto"] = "auto"

    @model_validator(mode="after")  # type: ignore[untyped-decorator]
    def _check_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is given without logprobs=true, which it needs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def template_options(self) -> dict[str, Any]:
        """Arguments of the chat template beside the messages. It tells the model of the tools; a
        call of one is part of the response's text."""
        has_tools = self.tools and self.tool_choice != "none"
        return {"tools": self.tools} if has_tools else {}


class TokenizeRequest(ApiObject):
    """The body of /tokenize."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(ApiObject):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int]


DISABLED_VALUES: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "logprobs": False,
    "metadata": {},
    "modalities": ["text"],
    "service_tier": "auto",
    "store": False,
    "suffix": "",
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": 0,
}
"""Fields with the value by which clients say that they do not use them, also where a request has no
such field."""


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
    """The validated request. Raises ApiError.

    max_items: the most items of any list or object.
    """
    try:
        _check_num_items(fields, max_items)
        present = dict(fields)
        json.dumps(present, ensure_ascii=False).encode()
        for name, disabled in DISABLED_VALUES.items():
            is_other = type(present.get(name)) is not type(disabled) or present[name] != disabled
            if not is_other and (disabled is False or name not in kind.model_fields):
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
    errors = error.errors()
    deepest = max(errors, key=lambda e: (len(e["loc"]), e["type"] == "extra_forbidden"))
    field = ".".join(str(step) for step in deepest["loc"])
    if deepest["type"] == "extra_forbidden":
        return invalid_request(f"{field} is not supported by this server; leave it out.", field)
    reason = deepest["msg"].removeprefix("Value error, ")
    return invalid_request(f"{field}: {reason}" if field else reason, field or None)


def _check_num_items(value: Any, max_items: int) -> None:
    if not isinstance(value, (dict, list)):
        return
    if len(value) > max_items:
        raise invalid_request(
            f"{len(value)} items in one list or object are more than the {max_items} that this "
            "server accepts; send fewer.",
            code="context_length_exceeded",
        )
    for item in value.values() if isinstance(value, dict) else value:
        _check_num_items(item, max_items)
