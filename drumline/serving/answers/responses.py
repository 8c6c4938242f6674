"""OpenAI's Responses API, as a translation of chats: its requests into theirs, and their answers.

request = protocol.validate(protocol.ChatCompletionRequest, parse_as_chat(body), max_items)
builder = ItemBuilder("llama", "5", request, 1, tokenizer)

Nothing is stored, so a request that names what is, such as a previous_response_id, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drumline.serving import protocol
from drumline.serving.answers.message_parser import Delta
from drumline.serving.answers.request_stream import MessagePiece
from drumline.serving.answers.response_writer import ResponseBuilder, server_sent_event

REASONING = "reasoning_text"
SUMMARIES = ("summary", "generate_summary")  # of reasoning, which comes as it is
TEXTS = {"content": "output_text", "reasoning_content": REASONING}
"""By the field of a chat's message, the type of the part that holds it."""

FIELDS = {"max_tokens": "max_output_tokens", "messages": "input"}
FIELDS |= dict.fromkeys(("response_format.json_schema", "response_format"), "text.format")
"""By the field of a chat, that of a request."""


def parse_as_chat(body: bytes | bytearray) -> dict[str, Any]:
    """The fields of the chat that a request is. Raises ApiError for what chats do not have."""
    fields = {name: value for name, value in protocol.parse(body).items() if value is not None}
    scores = filter(fields.get, ("logprobs", "top_logprobs"))
    if "messages" in fields:
        refusal = "this API has no field messages; send them as input"
        raise protocol.invalid_request(refusal)  # by a param, it would be named as input
    for name in {"n", *scores} & fields.keys():
        raise protocol.unsupported(name, name)
    for name in {"conversation", "previous_response_id"} & fields.keys():
        raise _not_stored(name, name)
    items, instructions = fields.pop("input", None), fields.pop("instructions", None)
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    messages = [{"role": "system", "content": instructions}] if instructions else []
    for item in protocol.objects(items, "input"):
        _add_item(messages, item)
    if "max_output_tokens" in fields:
        fields["max_tokens"] = fields.pop("max_output_tokens")
    if "tools" in fields:
        fields["tools"] = [*map(_nested, protocol.objects(fields["tools"], "tools"))]
    if isinstance(choice := fields.get("tool_choice"), dict):
        if (kind := choice.get("type")) != "function":
            raise protocol.unsupported(f"tool_choice: the type {kind!r:.100}", "tool_choice")
        fields["tool_choice"] = _nested(choice)
    (text,) = protocol.objects([fields.pop("text", {})], "text")
    form = text.pop("format", None)
    (settings,) = protocol.objects([fields.pop("reasoning", {})], "reasoning")
    effort = settings.pop("effort", None)
    for name in SUMMARIES:
        settings.pop(name, None)
    return {
        "response_format": _nested(form) if isinstance(form, dict) else form,
        "reasoning_effort": effort,
        **{f"reasoning.{name}": value for name, value in settings.items()},
        **text,
        **fields,
        "messages": messages,
    }


def _nested(item: dict[str, Any]) -> dict[str, Any]:
    """A function or a schema as chats have it, below a key of its own; anything else as it is."""
    if (kind := item.get("type")) not in ("function", "json_schema"):
        return item
    return {"type": kind, kind: {name: value for name, value in item.items() if name != "type"}}


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Add an item: a message, or a part of one, which reasoning begins."""
    kind, call_id = item.get("type", "message"), item.get("call_id")
    last = messages[-1] if messages else {}
    is_begun = "reasoning_content" in last and not (last["content"] or "tool_calls" in last)
    if kind == "reasoning":
        if text := _text(item.get("content") or item.get("summary") or ""):
            if not is_begun:
                last = {"role": "assistant", "content": "", "reasoning_content": ""}
                messages.append(last)
            last["reasoning_content"] += text
    elif kind == "message":
        message = {"role": item.get("role"), "content": _content(item.get("content", ""))}
        if is_begun and message["role"] == "assistant":
            last |= message
        else:
            messages.append(message)
    elif kind == "function_call":
        function = {key: item.get(key) for key in ("name", "arguments")}
        if last.get("role") != "assistant":
            messages.append(last := {"role": "assistant", "content": ""})
        call = {"id": call_id, "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = {"role": "tool", "tool_call_id": call_id, "content": _text(item.get("output", ""))}
        messages.append(output)
    elif kind == "item_reference":
        raise _not_stored(f"input: an item of the type {kind!r}", "input")
    else:
        raise protocol.unsupported(f"input: an item of the type {kind!r:.100}", "input")


def _not_stored(what: str, field: str) -> protocol.ApiError:
    reason = "is not known: nothing is stored here. Send store=false, and the items themselves."
    return protocol.invalid_request(f"{what} {reason}", field)


def _content(content: Any) -> Any:
    """The content of a message: text, or parts."""
    if isinstance(content, str):
        return content
    return [*map(_part, protocol.objects(content, "input"))]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """A part of a message as chats have it."""
    if part.get("type") != "input_image":
        return {"type": "text", "text": _text([part])}
    if not isinstance(url := part.get("image_url"), str):
        raise protocol.unsupported("input: an image without image_url", "input")
    return {"type": "image_url", "image_url": {"url": url}}


def _text(content: Any) -> str:
    """The text of an item, which may be in parts."""
    texts: list[str] = []
    for part in (
        [{"text": content}] if isinstance(content, str) else protocol.objects(content, "input")
    ):
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise protocol.unsupported(
                f"input: a part of the type {part.get('type')!r:.100}", "input"
            )
        texts.append(text)
    return "".join(texts)


class ItemBuilder(ResponseBuilder):
    """The items of one response, whole or as the events of a stream."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._num_events = 0
        self._item: dict[str, Any] = {}  # to which text is being added
        choice = self.body.tool_choice
        if not isinstance(choice, str):
            choice = {"type": "function", "name": choice.function.name}
        own = self.body.model_dump(include={"parallel_tool_calls", "temperature", "top_p"})
        self._response: dict[str, Any] = {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self.created,
            "status": "in_progress",
            "model": self.model,
            "output": [],
            "tools": [{"type": "function", **tool["function"]} for tool in self.body.tools],
            "tool_choice": choice,
            **own,
            **dict.fromkeys(("error", "incomplete_details", "instructions", "metadata", "usage")),
        }

    def whole(
        self, choices: Sequence[Sequence[MessagePiece]], usage: dict[str, Any]
    ) -> dict[str, Any]:
        for piece in choices[0]:
            self.add(piece, usage)
        self.end(usage)
        return self._response

    def begin(self, usage: dict[str, Any]) -> list[str]:
        return [
            self._event(name, response=self._response)
            for name in ("response.created", "response.in_progress")
        ]

    def add(self, piece: MessagePiece, usage: dict[str, Any]) -> list[str]:
        events = []
        for name, kind in TEXTS.items():
            if text := piece.delta.get(name):
                events += self._add_text(kind, text)
        for call in piece.delta.get("tool_calls", ()):
            events += self._add_call(call)
        if piece.finish_reason == "length":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        return events

    def end(self, usage: dict[str, Any]) -> list[str]:
        status = "incomplete" if self._response["incomplete_details"] else "completed"
        events = self._close(status)
        renamed = {
            name.replace("prompt", "input").replace("completion", "output"): count
            for name, count in usage.items()
        }
        self._response |= {"status": status, "usage": renamed}
        return [*events, self._event(f"response.{status}", response=self._response)]

    def fail(self, error: protocol.ApiError) -> list[str]:
        reason = {"code": "server_error", "message": str(error)}
        self._response |= {"status": "failed", "error": reason}
        return [self._event("response.failed", response=self._response)]

    def _event(self, kind: str, **fields: Any) -> str:
        self._num_events += 1
        return server_sent_event(
            {"type": kind, "sequence_number": self._num_events - 1, **fields}, kind
        )

    def _item_event(self, kind: str, **fields: Any) -> str:
        """An event of the last item."""
        output = self._response["output"]
        place = {"item_id": output[-1]["id"], "output_index": len(output) - 1}
        return self._event(f"response.{kind}", **place, **fields)

    def _add_text(self, kind: str, text: str) -> list[str]:
        events, is_reasoning = [], kind == REASONING
        part: dict[str, Any] = next(iter(self._item.get("content", ())), {})
        if part.get("type") != kind:
            own: dict[str, Any] = {"summary": []} if is_reasoning else {"role": "assistant"}
            part = {"type": kind, "text": ""}
            part |= {} if is_reasoning else {"annotations": [], "logprobs": []}
            events = self._open("reasoning" if is_reasoning else "message", **own, content=[])
            events.append(self._item_event("content_part.added", content_index=0, part=part))
            self._item["content"].append(part)
        part["text"] += text
        place = {"content_index": 0, "logprobs": []}
        return [*events, self._item_event(f"{kind}.delta", **place, delta=text)]

    def _add_call(self, call: Delta) -> list[str]:
        events, function = [], call["function"]
        if "id" in call:
            fields = {"call_id": call["id"], "name": function["name"], "arguments": ""}
            events = self._open("function_call", **fields)
        if arguments := function.get("arguments"):
            self._item["arguments"] += arguments
            events.append(self._item_event("function_call_arguments.delta", delta=arguments))
        return events

    def _open(self, kind: str, **fields: Any) -> list[str]:
        """Begin an item, after the end of the one before it."""
        events, output = self._close("completed"), self._response["output"]
        name = f"{kind}_{self.request_id}_{len(output)}"
        self._item = {"id": name, "type": kind, "status": "in_progress", **fields}
        output.append(self._item)
        return [*events, self._item_event("output_item.added", item=self._item)]

    def _close(self, status: str) -> list[str]:
        item, self._item = self._item, {}
        if not item:
            return []
        item["status"] = status
        if item["type"] == "function_call":
            ends = {"function_call_arguments.done": {k: item[k] for k in ("name", "arguments")}}
        else:
            (part,) = item["content"]
            ends = {
                f"{part['type']}.done": {"content_index": 0, "logprobs": [], "text": part["text"]},
                "content_part.done": {"content_index": 0, "part": part},
            }
        ends["output_item.done"] = {"item": item}
        return [self._item_event(kind, **fields) for kind, fields in ends.items()]
