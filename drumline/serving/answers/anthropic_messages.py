"""Anthropic's Messages API, as a translation of chats: its requests into theirs, and their answers.

request = protocol.validate(protocol.ChatCompletionRequest, parse_message_request(body), max_items)
builder = MessageBuilder("llama", "5", request, 1, tokenizer)
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from drumline.serving import protocol
from drumline.serving.answers.message_parser import to_json
from drumline.serving.answers.request_stream import MessagePiece
from drumline.serving.answers.response_writer import ResponseBuilder, server_sent_event

TEXTS = {"thinking": "reasoning_content", "text": "content"}
"""By the type of a block, which is also the name of its text, the field of a chat's message."""
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
TOOL_FIELDS = {"name": "name", "description": "description", "input_schema": "parameters"}
IGNORED = ("cache_control", "context_management", "inference_geo")
FIELDS = {"stop": "stop_sequences"}
FIELDS |= dict.fromkeys(("response_format.json_schema", "response_format"), "output_config.format")
"""By the field of a chat, that of a request."""
ERROR_TYPES = {403: "permission_error", 404: "not_found_error"}
ERROR_TYPES |= {500: "api_error", 503: "overloaded_error"}


def error_body(error: protocol.ApiError) -> dict[str, Any]:
    """An error in the form of this API."""
    kind = ERROR_TYPES.get(error.status, error.body["error"]["type"])
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def parse_message_request(body: bytes | bytearray) -> dict[str, Any]:
    """The fields of the chat that a request is. Raises ApiError for what chats do not have."""
    fields = parse_count_request(body)
    if "max_tokens" not in fields:
        raise protocol.invalid_request("max_tokens: Field required", "max_tokens")
    return fields


def parse_count_request(body: bytes | bytearray) -> dict[str, Any]:
    """The fields of the chat whose tokens are to be counted."""
    sent = protocol.parse(body).items()
    fields = {name: value for name, value in sent if value is not None and name not in IGNORED}
    for name in {"n", "logprobs", "top_logprobs"} & fields.keys():
        raise protocol.unsupported(name, name)
    messages: list[dict[str, Any]] = []
    for message in protocol.objects(fields.pop("messages", None), "messages"):
        _add_message(messages, message)
    last = messages[-1] if messages else {}
    is_begun = last.get("role") == "assistant" and not last["tool_calls"]
    if system := fields.pop("system", None):
        messages.insert(0, {"role": "system", "content": _content(system, "system")})
    if "tools" in fields:
        fields["tools"] = [*map(_tool, protocol.objects(fields["tools"], "tools"))]
    if choice := _object(fields, "tool_choice"):
        named = {"type": "function", "function": {"name": choice.get("name")}}
        kind = str(choice.get("type"))
        fields["tool_choice"] = {"any": "required", "tool": named}.get(kind, kind)
        fields["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    if thinking := _object(fields, "thinking"):
        is_enabled = thinking.get("type") != "disabled"
        fields.setdefault("chat_template_kwargs", {"enable_thinking": is_enabled})
    output = _object(fields, "output_config")
    if form := _object(output, "format"):
        schema = {"schema": form.get("schema")}
        fields["response_format"] = {"type": form.get("type"), "json_schema": schema}
    own = {"continue_final_message": is_begun, "stop": fields.pop("stop_sequences", None)}
    own["reasoning_effort"] = output.pop("effort", None)
    return {**own, **output, **fields, "messages": messages}


def _object(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """A field that is an object, taken out; empty if there is none."""
    return protocol.objects([fields.pop(name, None) or {}], name)[0]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A function as chats have it; any other tool as it is, to be refused there."""
    if (tool.get("type") or "custom") != "custom":
        return tool
    function = {name: tool[key] for key, name in TOOL_FIELDS.items() if key in tool}
    return {"type": "function", "function": function}


def _add_message(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message as chats have it, after the results of tools in it, each a message there."""
    content, num_before = message.get("content", ""), len(messages)
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    own: dict[str, Any] = {"content": [], "tool_calls": [], "reasoning_content": ""}
    for block in protocol.objects(blocks, "messages"):
        if (kind := block.get("type")) == "tool_result":
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
            result["content"] = _content(block.get("content") or "", "messages")
            messages.append({**result, "is_error": block.get("is_error") or None})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            call = {"id": block.get("id"), "type": "function", "function": function}
            own["tool_calls"].append(call)
        elif kind == "thinking":
            own["reasoning_content"] += str(block.get("thinking") or "")
        elif kind != "redacted_thinking":
            own["content"].append(_part(block))
    if any(own.values()) or len(messages) == num_before:
        messages.append({"role": message.get("role"), **own})


def _content(content: Any, field: str) -> Any:
    return content if isinstance(content, str) else [*map(_part, protocol.objects(content, field))]


def _part(block: dict[str, Any]) -> dict[str, Any]:
    """A block as the part of a chat's message; those of other types are refused there."""
    if block.get("type") != "image":
        return block
    (source,) = protocol.objects([block.get("source")], "messages")
    data = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": source.get("url") or data}}


class MessageBuilder(ResponseBuilder):
    """The blocks of one message, whole or as the events of a stream."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""  # of the last call
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def whole(
        self, choices: Sequence[Sequence[MessagePiece]], usage: dict[str, Any]
    ) -> dict[str, Any]:
        for piece in choices[0]:
            self.add(piece, usage)
        self._close()
        head = {"id": f"msg_{self.request_id}", "type": "message", "role": "assistant"}
        own = {"model": self.model, "content": self._blocks, **self._end}
        return {**head, **own, "usage": _usage(usage)}

    def begin(self, usage: dict[str, Any]) -> list[str]:
        return [_event("message_start", message=self.whole([[]], usage))]

    def add(self, piece: MessagePiece, usage: dict[str, Any]) -> list[str]:
        events = []
        for kind, name in TEXTS.items():
            if text := piece.delta.get(name):
                if not self._blocks or self._blocks[-1]["type"] != kind:
                    signature = {"signature": ""} if kind == "thinking" else {}
                    events += self._open({"type": kind, kind: "", **signature})
                self._blocks[-1][kind] += text
                delta = {"type": f"{kind}_delta", kind: text}
                events.append(self._block_event("delta", delta=delta))
        for call in piece.delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                own = {"id": call["id"], "name": function["name"], "input": {}}
                events += self._open({"type": "tool_use", **own})
            if arguments := function.get("arguments"):
                self._arguments += arguments
                delta = {"type": "input_json_delta", "partial_json": arguments}
                events.append(self._block_event("delta", delta=delta))
        if (reason := piece.finish_reason) == "stop" and piece.stop_string:
            self._end = {"stop_reason": "stop_sequence", "stop_sequence": piece.stop_string}
        elif reason:
            self._end["stop_reason"] = STOP_REASONS.get(reason)
        return events

    def end(self, usage: dict[str, Any]) -> list[str]:
        last = _event("message_delta", delta=self._end, usage=_usage(usage))
        return [*self._close(), last, _event("message_stop")]

    def fail(self, error: protocol.ApiError) -> list[str]:
        return [server_sent_event(error_body(error), "error")]

    def _block_event(self, kind: str, **fields: Any) -> str:
        """An event of the last block."""
        return _event(f"content_block_{kind}", index=len(self._blocks) - 1, **fields)

    def _open(self, block: dict[str, Any]) -> list[str]:
        """Begin a block, after the end of the one before it."""
        events = self._close()
        self._blocks.append(block)
        return [*events, self._block_event("start", content_block=block)]

    def _close(self) -> list[str]:
        if not self._blocks:
            return []
        if self._blocks[-1]["type"] == "tool_use":
            with contextlib.suppress(ValueError, RecursionError):  # of a call that max_tokens cut
                self._blocks[-1]["input"] = json.loads(to_json(json.loads(self._arguments)))
            self._arguments = ""
        return [self._block_event("stop")]


def _event(kind: str, **fields: Any) -> str:
    return server_sent_event({"type": kind, **fields}, kind)


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    """The number of tokens as this API has it: those of the prompt without what was cached."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    counts = {"input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached}
    return {**counts, "output_tokens": usage["completion_tokens"]}
