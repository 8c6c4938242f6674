"""OpenAI's protocol: requests, and errors.

A field that cannot change the answer is dropped, and so is a value that is the default of a field
that is not supported. Any other is refused by name: a response that ignored it would be wrong.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from drumline.serving.grammar import COMPACT, parameters_of, schema_of_calls
from drumline.serving.sampling import SamplingParams

DEFAULT_MAX_TOKENS = 16
"""Of a completion without max_tokens; a chat may go on to the limit of the server."""
MAX_ERRORS = 1000  # to search for the one to report: pydantic lists 300,000 in 20 s
MAX_ITEMS = 20_000  # of one list or object, such as the values of an enum or messages
MAX_LOGPROBS = 20
MAX_STOPS, MAX_STOP_CHARS = 16, 256  # of a request; each is searched for at every token


ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
"""By status, the type of an error in OpenAI's form, where it is not that of all requests."""


class ApiError(Exception):
    """An error response in OpenAI's form."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        usual = "server_error" if status >= 500 else "invalid_request_error"
        kind = ERROR_TYPES.get(status, usual)
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """This error, where the client calls fields otherwise."""
        own, field = self.body["error"], rf"^({'|'.join(names)})(\.\d+)?\b"
        texts = (str(self), own["param"] or "")
        message, param = (re.sub(field, lambda match: names[match[1]], text) for text in texts)
        return ApiError(self.status, message, own["code"], param or None)


def invalid_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, code, param)


def unsupported(what: str, field: str) -> ApiError:
    return invalid_request(f"{what} is not supported by this server; leave it out.", field)


def objects(items: Any, field: str) -> list[dict[str, Any]]:
    """The items, if they are a list of objects. Raises ApiError."""
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise invalid_request(f"{field} is not in the form of this API.", field)
    return items


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
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False
    """Ignored: no chunk is padded."""


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


def _as_stops(stop: str | list[str]) -> list[str]:
    texts = [stop] if isinstance(stop, str) else stop
    if len(texts) > MAX_STOPS or any(len(text) > MAX_STOP_CHARS for text in texts):
        raise ValueError(f"more than {MAX_STOPS} strings, or {MAX_STOP_CHARS} characters")
    return texts


class GenerationRequest(ApiObject):
    """The fields that completions and chats share."""

    model: str
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Any = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = {}
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[str | list[str], AfterValidator(_as_stops)] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    response_format: ResponseFormat = ResponseFormat(type="text")
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    skip_special_tokens: bool = True

    @property
    def num_logprobs(self) -> int | None:
        """Of how many tokens the log-probabilities are wanted, in each place; None if not."""
        count: int | None = self.logprobs
        return count

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The schema of the response, if it must be JSON."""
        form = self.response_format
        if form.json_schema is not None:
            return form.json_schema.schema_
        return {"type": "object"} if form.type == "json_object" else None

    def sampling_params(
        self, max_tokens: int, choice: int, defaults: Mapping[str, float], end_token: int | None
    ) -> SamplingParams:
        """The parameters of one choice. With a seed, each choice has a seed of its own.

        defaults: by name, of what the request does not have. end_token: the tokenizer's.
        """
        names = {field.name for field in dataclasses.fields(SamplingParams)}
        values = {**defaults, **self.model_dump(include=names, exclude_none=True)}
        ends = set() if end_token is None or self.ignore_eos else {end_token}
        values |= {
            "max_tokens": max_tokens,
            "top_k": max(0, values.get("top_k", 0)),
            "logit_bias": tuple(self.logit_bias.items()),
            "seed": None if self.seed is None else (self.seed + choice) % 2**63,
            "stop": tuple(text for text in self.stop if text),
            "stop_tokens": frozenset(self.stop_token_ids) | ends,
            "num_logprobs": self.num_logprobs,
            "scores_prompt": getattr(self, "echo", False) and self.num_logprobs is not None,
        }
        return SamplingParams(**values)


WITHOUT_FALSE = BeforeValidator(lambda value: None if value is False else value)
"""None for false, by which chats say that they want none."""


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int = Field(DEFAULT_MAX_TOKENS, ge=0)
    logprobs: Annotated[int | None, WITHOUT_FALSE] = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    add_special_tokens: bool = True


IMAGE = {"type": "image"}  # as templates know its place


class ImageUrl(ApiObject):
    model_config = ConfigDict(extra="ignore")  # detail

    url: str


class ContentPart(ApiObject):
    """A text, which may be that of an earlier refusal, or an image."""

    model_config = ConfigDict(extra="ignore")  # cache_control, annotations

    type: str
    text: str | None = Field(None, validation_alias=AliasChoices("text", "refusal"))
    image_url: ImageUrl | None = None

    @model_validator(mode="after")  # type: ignore[untyped-decorator]
    def _check_type(self) -> ContentPart:
        self.type = "text" if self.type == "refusal" else self.type
        if self.type not in ("text", "image_url"):
            text = f"a part of the type {self.type!r:.100} is not supported by this server"
            raise ValueError(text)
        if getattr(self, self.type) is None:
            raise ValueError(f"a part of the type {self.type!r} has no field of that name")
        return self

    def for_template(self) -> dict[str, str]:
        return {"type": "text", "text": self.text or ""} if self.type == "text" else IMAGE


class ChatMessage(ApiObject):
    """A message. What has no meaning here is the template's, such as reasoning_content."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] = ""
    tool_calls: list[dict[str, Any]] = []

    @property
    def _parts(self) -> list[ContentPart]:
        content = self.content
        return [ContentPart(type="text", text=content)] if isinstance(content, str) else content

    @property
    def image_urls(self) -> list[str]:
        urls = [part.image_url for part in self._parts if part.type == "image_url"]
        return [url.url for url in urls if url is not None]

    def for_template(self, in_parts: bool = False) -> dict[str, Any]:
        """The message in the form that chat templates take; in_parts: with a list as its content,
        as with images, which have places in it."""
        texts = "".join(part.text or "" for part in self._parts)
        has_list = in_parts or bool(self.image_urls)
        content = [part.for_template() for part in self._parts] if has_list else texts
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        extra = (self.model_extra or {}).items()
        present = {name: value for name, value in extra if value not in ("", [], {})}
        calls = {"tool_calls": [*map(_for_template, self.tool_calls)]} if self.tool_calls else {}
        return {"role": role, "content": content, **present, **calls}


def _for_template(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are a mapping, as templates write them: the API has them as JSON."""
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (TypeError, KeyError, ValueError, RecursionError):
        return call
    is_mapping = isinstance(arguments, dict)
    return {**call, "function": {**function, "arguments": arguments}} if is_mapping else call


class NamedFunction(ApiObject):
    name: str


class NamedTool(ApiObject):
    """The tool that the answer must call."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatCompletionRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    tools: list[dict[str, Any]] = []  # behind the choice, by which it is validated
    parallel_tool_calls: bool = True
    documents: list[dict[str, Any]] = []
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @field_validator("tools")  # type: ignore[untyped-decorator]
    @classmethod
    def _functions_alone(cls, tools: list[Any], info: ValidationInfo) -> list[dict[str, Any]]:
        """The tools, if they are functions; others are dropped where none may be called."""
        others = [tool for tool in tools if not isinstance(tool.get("function"), dict)]
        if others and info.data.get("tool_choice") != "none":
            text = f"{others[0]!r:.200} is not a function, and no other tool is supported"
            raise ValueError(f"{text} by this server; leave it out")
        return [tool for tool in tools if isinstance(tool.get("function"), dict)]

    @model_validator(mode="after")  # type: ignore[untyped-decorator]
    def _check(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is given without logprobs=true, which it needs")
        for function in self._functions():
            if not isinstance(function.get("parameters"), (dict, type(None))):
                raise ValueError("tools: the parameters of a function are not a JSON object")
            if not isinstance(function.get("name"), str):
                raise ValueError(f"tools: the function {function!r:.200} has no name")
        names = [function.get("name") for function in self._functions()]
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice is required, but there are no tools to choose from")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r:.200}, no tool")
        return self

    def _functions(self) -> list[dict[str, Any]]:
        return [tool["function"] for tool in self.tools]

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The schema of the calls where the answer must call a tool, or that of the response."""
        if self.tool_choice == "required":
            return schema_of_calls(self._functions(), None if self.parallel_tool_calls else 1)
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            schemas = (parameters_of(f) for f in self._functions() if f.get("name") == name)
            return {**COMPACT, **next(schemas)}
        return super().json_schema

    @property
    def may_call(self) -> bool:
        """True if the answer may call a tool, or be something else."""
        return bool(self.tools) and self.tool_choice == "auto"

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def template_options(self) -> dict[str, Any]:
        """Arguments of apply_chat_template beside the messages; it tells the model of the tools."""
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        return {
            "tools": self.tools if self.tools and self.tool_choice != "none" else None,
            "documents": self.documents or None,
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
            **effort,
            **self.chat_template_kwargs,
        }


class TokenizeRequest(ApiObject):
    """The body of /tokenize."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(ApiObject):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int]


UNUSED = json.loads(Path(__file__).with_name("unused_fields.json").read_text())
"""ignored: fields that change nothing about the answer: who asks, how soon, what is kept, how often
tools of OpenAI's own run, which are refused.
defaults: fields with the values by which clients say that they do not use them, also where a
request has no such field. By truncation "auto" a prompt would be cut that is an error here."""


FIELDS = TypeAdapter(dict[str, Any])


def parse(body: bytes | bytearray) -> dict[str, Any]:
    """The fields of a request. Raises ApiError unless the body is a JSON object."""
    try:
        return dict(FIELDS.validate_json(body.removeprefix(codecs.BOM_UTF8)))
    except ValidationError as error:  # also of half a character, or too many lists in each other
        raise _validation_error(error) from error


def prompts_of(prompt: Any) -> list[Any]:
    """The prompts in the field `prompt`; a list of tokens is one prompt."""
    is_single = not isinstance(prompt, list) or (prompt and isinstance(prompt[0], int))
    return [prompt] if is_single else prompt


def validate(kind: type[Any], fields: dict[str, Any], max_items: int) -> Any:
    """The validated request. Raises ApiError.

    max_items: the most tokens or texts of a prompt.
    """
    try:
        for name, value in fields.items():
            _check_num_items(value, max_items if name == "prompt" else MAX_ITEMS)
        _check_num_items([*fields], MAX_ITEMS)
        return kind.model_validate(
            {name: value for name, value in fields.items() if not _is_unused(kind, name, value)}
        )
    except ValidationError as error:
        raise _validation_error(error) from error


def _is_unused(kind: type[Any], name: str, value: Any) -> bool:
    """True of a field that is dropped."""
    if name in kind.model_fields:
        return False
    return name in UNUSED["ignored"] or any(
        value == default and isinstance(value, bool) == isinstance(default, bool)
        for default in UNUSED["defaults"].get(name, ())
    )


def context_error(max_length: int, reason: str, param: str | None) -> ApiError:
    """In the words by which litellm knows it; others look at the code."""
    text = f"This model's maximum context length is {max_length} tokens. However, {reason}"
    return invalid_request(text, param, "context_length_exceeded")


def _validation_error(error: ValidationError) -> ApiError:
    if error.error_count() > MAX_ERRORS:
        return invalid_request(
            f"The body has {error.error_count()} errors, too many to name. Leave out fields that "
            "OpenAI's API does not have, and lists of another type than it takes."
        )
    errors = error.errors()
    deepest = max(errors, key=lambda e: (len(e["loc"]), e["type"] == "extra_forbidden"))
    first, *rest = deepest["loc"] or [""]
    # Of a field with several types, pydantic names the one that it tried, too.
    steps = [first, *(s for s in rest if "[" not in str(s) and s not in ("str", "NamedTool"))]
    field = ".".join(map(str, steps))
    if deepest["type"] == "extra_forbidden":
        return unsupported(field, field)
    reason = deepest["msg"].removeprefix("Value error, ")
    return invalid_request(f"{field}: {reason}" if field else reason, field or None)


def _check_num_items(value: Any, max_items: int) -> None:
    if not isinstance(value, (dict, list)):
        return
    if len(value) > max_items:
        reason = f"{len(value)} items are in one list or object"
        if max_items != MAX_ITEMS:
            raise context_error(max_items, f"{reason} of the prompt; send fewer.", "prompt")
        raise invalid_request(f"{reason}, which may have {max_items}; send fewer.")
    for item in value.values() if isinstance(value, dict) else value:
        _check_num_items(item, max_items)
