"""Tool calls and reasoning in the text of an answer, as it comes.

parser = message_parser(tokenizer, request, prompt)
deltas = [delta for text in texts for delta in parser.feed(text)] + parser.finish()
message = merged(deltas)
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from drumline.serving import protocol

Delta = dict[str, Any]
"""An addition to a message: content, reasoning_content, or tool_calls with their index."""

UNPARSED = (ValueError, KeyError, TypeError, RecursionError)
"""By these transformers' parser and the form of calls refuse what a model wrote: it may not be
JSON, have other fields or types, or be nested too deeply."""

MAY_BE_EMPTY = r"\\[sn][*?]|\(\?:|[\^(]|\\"
"""In patterns, what a text need not have, the beginnings of groups, and what escapes."""

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # names of it in templates


class PlainText:
    """The parser of an answer that is text."""

    uses_special_tokens = False

    def feed(self, text: str) -> list[Delta]:
        """The additions to the message that new text makes."""
        return [{"content": text}] if text else []

    def finish(self, is_cut: bool = False) -> list[Delta]:
        """The additions that the end of the text makes. is_cut: by a limit or a stop string."""
        return []


class NamedCall(PlainText):
    """The parser of an answer that is the arguments of one call, as a grammar made it."""

    def __init__(self, name: str) -> None:
        self._head = _call(0, name, "")

    def feed(self, text: str) -> list[Delta]:
        call, self._head = self._head, {"index": 0, "function": {}}
        return [{"tool_calls": [{**call, "function": {**call["function"], "arguments": text}}]}]


class CallList(PlainText):
    """The parser of an answer that is a JSON list of calls, as a grammar made it."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        return []

    def finish(self, is_cut: bool = False) -> list[Delta]:
        calls, rest = list[Delta](), self._text.lstrip(" \n\r\t[")
        with contextlib.suppress(*UNPARSED):  # of the end, or of a call cut off by max_tokens
            while True:
                call, end = json.JSONDecoder().raw_decode(rest)
                calls.append(_call(len(calls), call["name"], to_json(call["parameters"])))
                rest = rest[end:].lstrip(" \n\r\t,")
        return [{"tool_calls": calls}] if calls else super().feed(self._text)


class TemplateParser(PlainText):
    """transformers' parser of a response template; text that it cannot parse is content.

    As in the messages that it makes, texts have no white space around them, except one that the
    prompt begins if the answer is_continued.
    """

    uses_special_tokens = True

    def __init__(
        self, parser: Any, closings: Sequence[str], max_calls: int | None, is_continued: bool
    ) -> None:
        self._parser, self._max_calls, self._num_calls = parser, max_calls, 0
        self._closing = re.compile(r"\Z")  # what ends a call, or the end
        with contextlib.suppress(re.error):  # transformers has them in the language of `regex`
            self._closing = re.compile("|".join([*closings, r"\Z"]), re.DOTALL)
        self._unsent, self._is_cut = "", False  # text that is in no delta yet
        self._field, self._space = "", ""  # of the last text, and the white space at its end
        for event in parser.initial_events if is_continued else ():
            if event["type"] == "region_chunk":
                self._deltas(event)

    def feed(self, text: str) -> list[Delta]:
        return self._parsed(text, is_end=False)

    def finish(self, is_cut: bool = False) -> list[Delta]:
        whole = self.feed("\n") if is_cut and self._parser else []  # a call that ends at the cut
        self._unsent = self._unsent.removesuffix("\n") if is_cut else self._unsent
        self._is_cut = is_cut
        return whole + self._parsed("", is_end=True)

    def _parsed(self, text: str, is_end: bool) -> list[Delta]:
        if self._parser is None:
            return super().feed(text)
        self._unsent += text
        deltas = list[Delta]()
        try:
            for event in self._parser.finalize()[1] if is_end else self._parser.feed(text):
                deltas += self._deltas(event)
        except UNPARSED:  # what a model wrote is not what its template says
            self._parser = None
            deltas += super().feed(self._unsent)
        return deltas

    def _deltas(self, event: dict[str, Any]) -> list[Delta]:
        kind, field = event["type"], event["field"]
        if kind == "region_close" and field == "tool_calls":
            text, end = self._unsent, self._closing.search(self._unsent)
            deltas = self._text("content", text) if self._is_cut else self._calls(event["value"])
            self._unsent = text[end.end() :] if end and not self._is_cut else ""
            return deltas
        if kind != "region_chunk" or event["dirty"]:
            return []
        self._unsent = self._unsent.partition(event["text"])[2]
        name = "reasoning_content" if field in REASONING_FIELDS else field
        return self._text(name, event["text"]) if name in ("content", "reasoning_content") else []

    def _text(self, field: str, text: str) -> list[Delta]:
        text = self._space + text if field == self._field else text.lstrip()
        self._space = text[len(text.rstrip()) :]
        self._field = field if text else self._field
        return [{field: stripped}] if (stripped := text.rstrip()) else []

    def _calls(self, value: Any) -> list[Delta]:
        deltas = []
        for call in value if isinstance(value, list) else [value]:
            function = call["function"]
            if self._max_calls is None or self._num_calls < self._max_calls:
                plain = json.loads(to_json(function))
                name, arguments = plain["name"], plain["arguments"]
                text = arguments if isinstance(arguments, str) else json.dumps(arguments)
                deltas.append({"tool_calls": [_call(self._num_calls, name, text)]})
                self._num_calls += 1
        return deltas


class JsonOrCall(PlainText):
    """The parser of an answer that a grammar makes JSON, unless it begins with a call."""

    uses_special_tokens = True

    def __init__(self, calls: PlainText, starts: Iterable[str], special: Sequence[str]) -> None:
        self._parser, self._starts, self._special = calls, starts, special
        self._is_json: bool | None = None

    def feed(self, text: str) -> list[Delta]:
        if self._is_json is None and (first := text.lstrip()):
            # A possible beginning of a stop string is held back, so a start may come in two pieces.
            self._is_json = not any(
                first.startswith(start) or (len(first) > 1 and start.startswith(first))
                for start in self._starts
            )
            self._parser = PlainText() if self._is_json else self._parser
        return self._parser.feed("" if self._is_json and text in self._special else text)

    def finish(self, is_cut: bool = False) -> list[Delta]:
        return self._parser.finish(is_cut)


def message_parser(
    tokenizer: Any, request: protocol.GenerationRequest, prompt: Sequence[int]
) -> PlainText:
    """The parser of the answer to a prompt: by the request's grammar, otherwise by the tokenizer's
    response template, if it has one."""
    if not isinstance(request, protocol.ChatCompletionRequest):
        return PlainText()
    if isinstance(request.tool_choice, protocol.NamedTool):
        return NamedCall(request.tool_choice.function.name)
    if request.tool_choice == "required":
        return CallList()
    template = getattr(tokenizer, "response_template", None)
    if template is None or (request.json_schema is not None and not request.may_call):
        return PlainText()
    if not request.may_call:
        fields = {name: own for name, own in template["fields"].items() if name != "tool_calls"}
        template = {**template, "fields": fields}
    text = tokenizer.decode(prompt) if request.json_schema is None else ""  # no reasoning before
    try:
        parser = tokenizer.get_response_parser(template, prefix=text, tools=request.tools)
    except UNPARSED:  # the beginning of the answer, in the prompt, is not what its template says
        return PlainText()
    is_continued = request.continue_final_message and text == text.rstrip()
    max_calls = None if request.parallel_tool_calls else 1
    calls = TemplateParser(parser, _patterns(template, "close"), max_calls, is_continued)
    if request.json_schema is None:
        return calls
    return JsonOrCall(calls, call_starts(tokenizer, request), tokenizer.all_special_tokens)


def call_starts(tokenizer: Any, request: protocol.GenerationRequest) -> dict[str, int]:
    """The tokens with which a call begins that may come in place of JSON, by their texts. Raises
    ValueError if a call would begin with none of its own."""
    template = getattr(tokenizer, "response_template", None) or {"fields": {}}
    is_needed = request.json_schema is not None and getattr(request, "may_call", False)
    if not is_needed or not template["fields"].get("tool_calls"):
        return {}
    vocabulary, patterns = tokenizer.get_added_vocab(), _patterns(template, "open")
    words = [word for each in patterns if (word := _first_word(each, vocabulary))]
    if not words:
        raise ValueError(
            "calls of this model do not begin with a token that tells them from JSON; leave out "
            "response_format, or tools, or send a tool_choice that is not auto"
        )
    return {word: vocabulary[word] for word in words}


def _patterns(template: dict[str, Any], side: str) -> list[str]:
    """The patterns of what stands at the open or the close side of a template's calls."""
    field = template["fields"].get("tool_calls", {})
    if f"{side}_pattern" in field:
        return [field[f"{side}_pattern"]]
    literals = field.get(side, [])
    return [*map(re.escape, [literals] if isinstance(literals, str) else literals)]


def _first_word(pattern: str, words: Iterable[str]) -> str:
    """The longest of the words with which a text of the pattern begins, if there is one."""
    plain = re.sub(MAY_BE_EMPTY, "", pattern)
    return max(filter(plain.startswith, words), key=len, default="")


def merged(deltas: Iterable[Delta]) -> dict[str, Any]:
    """The message of all deltas."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            whole = calls.setdefault(call["index"], {**call, "function": {"arguments": ""}})
            whole.pop("index", None)
            arguments = whole["function"]["arguments"] + call["function"]["arguments"]
            whole["function"] |= {**call["function"], "arguments": arguments}
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [*calls.values()]
    return message


def to_json(value: Any) -> str:
    """The JSON of what Python read as such: without NaN, infinities and halves of characters."""
    text = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    return json.dumps(json.loads(text, parse_constant=str))


def _call(index: int, name: str, arguments: str) -> dict[str, Any]:
    call_id, function = f"call_{uuid.uuid4().hex[:24]}", {"name": name, "arguments": arguments}
    return {"index": index, "id": call_id, "type": "function", "function": function}
