"""Anthropic's Messages API is the chats' by other names."""

import asyncio
import copy
import importlib
import json
from contextlib import closing

import pytest

from drumline.serving.scheduler import ServingLimits
from tests.drumline.serving.conftest import expected, respond
from tests.drumline.serving.test_clients import CALLS

for package in ("fastapi", "prometheus_client"):
    pytest.importorskip(package, reason="runs after `pip install 'drumline[serve]'`")
app = importlib.import_module("drumline.serving.app")
messages = importlib.import_module("drumline.serving.answers.anthropic_messages")
protocol = importlib.import_module("drumline.serving.protocol")
MessagePiece = importlib.import_module("drumline.serving.answers.request_stream").MessagePiece
transformers = importlib.import_module("transformers")

USER = [{"role": "user", "content": "5 6 7"}]
COUNT = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL = {"name": "count", "description": "counts", "input_schema": COUNT}
USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}


@pytest.fixture
def service(plain, loaded):
    tokenizer = transformers.AutoTokenizer.from_pretrained(plain[1])
    with closing(app.Service(["llama"], loaded, tokenizer, ServingLimits(200))) as service:
        yield service


def events_of(text):
    events = [event.split("\n") for event in text.split("\n\n") if event]
    data = [json.loads(line.removeprefix("data: ")) for _, line in events]
    assert [f"event: {event['type']}" for event in data] == [name for name, _ in events]
    return data


def joined(events):
    """The message that the events of a stream come to."""
    first, *rest, delta, last = events
    assert first["type"] == "message_start" and last["type"] == "message_stop"
    assert delta["type"] == "message_delta" and first["message"]["stop_reason"] is None
    blocks = list(first["message"]["content"])
    is_open = False
    for event in rest:
        kind = event["type"].removeprefix("content_block_")
        assert is_open == (kind != "start")
        is_open = kind != "stop"
        if kind == "start":
            blocks.append({**event["content_block"]})
        elif kind == "delta":
            ((name, text),) = ((k, v) for k, v in event["delta"].items() if k != "type")
            block = blocks[event["index"]]
            block[name] = block.get(name, "") + text
        assert event["index"] == len(blocks) - 1
    for block in blocks:
        if "partial_json" in block:
            block["input"] = json.loads(block.pop("partial_json"))
    return {**first["message"], "content": blocks, **delta["delta"], "usage": delta["usage"]}


def ask(service, path="messages", **fields):
    """The status, and the message, of a stream if the fields ask for one."""
    body = {"model": "llama", "temperature": 0, "max_tokens": 6, "messages": USER, **fields}
    body = {name: value for name, value in body.items() if value is not None}
    status, text = asyncio.run(respond(service, body, path=path))
    if not text.startswith("event: "):
        return status, json.loads(text)
    return status, joined(events_of(text))


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_is_the_answer_of_the_chat(plain, service, stream):
    text, _ = expected(plain, "5 6 7", 6)
    blocks = [{"type": "text", "text": "6 ", "cache_control": {"type": "ephemeral"}}]
    blocks.append({"type": "text", "text": "7"})
    own = {"system": [{"type": "text", "text": "5"}], "metadata": {"user_id": "a"}}
    own |= {"messages": [{"role": "user", "content": blocks}]}
    for fields in ({}, {**own, "thinking": {"type": "disabled"}}, {**own, "system": "5"}):
        status, message = ask(service, **fields, stream=stream)
        (block,) = message["content"]
        assert status == 200 and block["type"] == "text" and block["text"].split() == text.split()
        assert message["type"] == "message" and message["role"] == "assistant"
        assert message["id"].startswith("msg_") and message["model"] == "llama"
        assert message["stop_reason"] == "max_tokens" and message["stop_sequence"] is None
        counts = {"input_tokens": 3, "cache_read_input_tokens": 0, "output_tokens": 6}
        assert message["usage"] == counts


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_that_came_is_told_from_the_end_of_a_turn(plain, service, stream):
    words = expected(plain, "5 6 7", 6)[0].split()
    first = words.index(words[3])
    stops = {"stop_sequences": ["no such text", words[3]], "stream": stream}
    _, message = ask(service, **stops)
    assert message["stop_reason"] == "stop_sequence" and message["stop_sequence"] == words[3]
    assert [word for block in message["content"] for word in block["text"].split()] == words[:first]
    _, message = ask(service, **stops, logit_bias={"2": 100})
    assert message["stop_reason"] == "end_turn" and message["stop_sequence"] is None
    assert message["content"] == []


def test_an_answer_goes_on_from_a_message_of_the_assistant(plain, service):
    begun = [{"role": "user", "content": "5"}, {"role": "assistant", "content": "6 7"}]
    _, message = ask(service, messages=begun)
    assert message["content"][0]["text"].split() == expected(plain, "5 6 7", 6)[0].split()


def test_the_result_of_a_tool_reaches_the_template(plain, service):
    use = {"type": "tool_use", "id": "c", "name": "count", "input": {"n": 1}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "6 7"}
    sent = [
        {"role": "user", "content": "5"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    _, message = ask(service, messages=sent, tools=[TOOL])
    assert message["content"][0]["text"].split() == expected(plain, "5 6 7", 6)[0].split()


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_the_model_writes_is_a_use_of_a_tool(plain, service, stream):
    words = expected(plain, "5 6 7", 40)[0].split()
    service.tokenizer.response_template = copy.deepcopy(CALLS)
    region = service.tokenizer.response_template["fields"]["tool_calls"]
    region["open"], region["close"] = words[1], words[4]
    _, message = ask(service, tools=[TOOL], max_tokens=40, stream=stream)
    text, use = message["content"][:2]
    assert text["type"] == "text" and text["text"] == words[0]
    assert use["name"] == "look" and use["input"] == {"place": " ".join(words[2:4])}
    assert message["stop_reason"] in ("tool_use", "max_tokens")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["any", "tool"])
def test_a_tool_that_must_be_used_is_used(speaker, kind, stream):
    pytest.importorskip("llguidance", reason="runs after `pip install llguidance`")
    choice = {"type": kind, "disable_parallel_tool_use": True}
    choice |= {"name": "count"} if kind == "tool" else {}
    fields = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 500, "seed": 4}
    _, message = ask(speaker, **fields, temperature=1, stream=stream)
    (block,) = message["content"]
    assert block["type"] == "tool_use" and block["name"] == "count" and block["id"]
    assert block["input"]["n"] in (1, 2) and message["stop_reason"] == "tool_use"


def test_an_answer_may_have_to_be_json_of_a_schema(speaker):
    pytest.importorskip("llguidance", reason="runs after `pip install llguidance`")
    output = {"format": {"type": "json_schema", "schema": COUNT}, "effort": "low"}
    _, message = ask(speaker, output_config=output, max_tokens=500)
    assert json.loads(message["content"][0]["text"])["n"] in (1, 2)


def test_the_tokens_of_a_request_are_counted_with_its_tools(service):
    path = "messages/count_tokens"
    service.tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
        + service.tokenizer.chat_template
    )
    assert ask(service, path, max_tokens=None) == (200, {"input_tokens": 3})
    assert ask(service, path, system="8", tools=[TOOL]) == (200, {"input_tokens": 5})


def test_calls_at_the_end_of_a_request_are_counted(service):
    """They were left out: the last message was cut behind its text, to be continued."""
    use = {"type": "tool_use", "id": "c", "name": "count", "input": {"n": 6}}
    sent = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "8"}, use]}]
    service.tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content }} {% for call in message.tool_calls %}"
        "{{ call.function.arguments.n }} {% endfor %}{% endfor %}"
    )
    counted = ask(service, "messages/count_tokens", max_tokens=None, messages=sent)
    assert counted == (200, {"input_tokens": 5})


def chat_of(**fields):
    body = {"model": "llama", "max_tokens": 6, "messages": USER, **fields}
    fields = messages.parse_message_request(json.dumps(body).encode())
    return protocol.validate(protocol.ChatCompletionRequest, fields, 99)


def builder():
    return messages.MessageBuilder("llama", "r", chat_of(), 1, None)


def test_thinking_text_and_uses_of_tools_are_blocks_of_their_own():
    calls = [
        {"index": 0, "id": "c1", "function": {"name": "count", "arguments": '{"n"'}},
        {"index": 0, "function": {"arguments": ": 1}"}},
        {"index": 1, "id": "c2", "function": {"name": "count", "arguments": '{"n": 2}'}},
    ]
    deltas = [
        *({"reasoning_content": "so "}, {"reasoning_content": "so"}, {"content": "it "}),
        *({"content": "is"}, *({"tool_calls": [call]} for call in calls)),
    ]
    pieces = [MessagePiece(0, delta, [], None) for delta in deltas]
    pieces.append(MessagePiece(0, {}, [], "tool_calls", "a stop string"))
    whole = builder().whole([pieces], USAGE)
    assert whole["content"] == [
        {"type": "thinking", "thinking": "so so", "signature": ""},
        {"type": "text", "text": "it is"},
        {"type": "tool_use", "id": "c1", "name": "count", "input": {"n": 1}},
        {"type": "tool_use", "id": "c2", "name": "count", "input": {"n": 2}},
    ]
    assert whole["stop_reason"] == "tool_use" and whole["stop_sequence"] is None
    assert whole["usage"]["input_tokens"] == 1 and whole["usage"]["cache_read_input_tokens"] == 2
    own = builder()
    stream = own.begin(USAGE)
    for piece in pieces:
        stream += own.add(piece, USAGE)
    assert joined(events_of("".join(stream + own.end(USAGE)))) == whole


def test_a_use_of_a_tool_that_was_cut_has_no_input():
    call = {"index": 0, "id": "c", "function": {"name": "count", "arguments": '{"n'}}
    piece = MessagePiece(0, {"tool_calls": [call]}, [], "length")
    message = builder().whole([[piece]], USAGE)
    assert message["content"][0]["input"] == {} and message["stop_reason"] == "max_tokens"


def test_the_input_of_a_use_of_a_tool_is_json_whatever_the_model_wrote():
    """Numbers without an end, and halves of characters, were an error of the server."""
    arguments = '{"n": 1e999, "m": NaN, "text": "\\ud83d"}'
    call = {"index": 0, "id": "c", "function": {"name": "count", "arguments": arguments}}
    message = builder().whole([[MessagePiece(0, {"tool_calls": [call]}, [], "tool_calls")]], USAGE)
    assert message["content"][0]["input"] == {"n": "Infinity", "m": "NaN", "text": "?"}


def test_blocks_of_messages_are_the_messages_of_a_chat():
    image = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    use = {"type": "tool_use", "id": "c", "name": "count", "input": {"n": 1}}
    thinking = [{"type": "thinking", "thinking": "so", "signature": "s"}]
    thinking.append({"type": "thinking", "thinking": None})
    thinking.append({"type": "redacted_thinking", "data": "x"})
    text = {"type": "text", "text": "now"}
    results = [{"type": "tool_result", "tool_use_id": "c", "content": "3", "is_error": True}]
    results.append({"type": "tool_result", "tool_use_id": "d", "content": [text]})
    results.append({"type": "tool_result", "tool_use_id": "e"})
    chat = chat_of(
        messages=[
            {"role": "user", "content": [text, {"type": "image", "source": image}]},
            {"role": "assistant", "content": [*thinking, text, use]},
            {"role": "user", "content": results},
            {"role": "user", "content": [results[0], text]},
        ],
        tools=[{**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}}],
        thinking={"type": "enabled", "budget_tokens": 2000},
        tool_choice={"type": "auto"},
    )
    assert chat.messages[0].image_urls == ["data:image/png;base64,aGk="]
    error = {"role": "tool", "content": "3", "tool_call_id": "c", "is_error": True}
    function = {"name": "count", "arguments": {"n": 1}}
    own = {"reasoning_content": "so", "content": "now"}
    calls = [{"id": "c", "type": "function", "function": function}]
    assert [message.for_template() for message in chat.messages] == [
        {"role": "user", "content": [text, {"type": "image"}]},
        {"role": "assistant", **own, "tool_calls": calls},
        error,
        {"role": "tool", "content": "now", "tool_call_id": "d"},
        {"role": "tool", "content": "", "tool_call_id": "e"},
        error,
        {"role": "user", "content": "now"},
    ]
    function = {"name": "count", "description": "counts", "parameters": COUNT}
    assert chat.tools == [{"type": "function", "function": function}]
    assert chat.chat_template_kwargs == {"enable_thinking": True} and chat.parallel_tool_calls
    assert chat.tool_choice == "auto" and not chat.continue_final_message


def test_what_a_client_lets_be_cleared_of_its_messages_is_kept():
    """Each turn of Claude Code was refused."""
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    assert chat_of(context_management={"edits": edits}) == chat_of()


def test_a_tool_that_is_no_function_is_left_out_where_none_may_be_called():
    """It was refused, as where it might have been."""
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    assert chat_of(tools=tools, tool_choice={"type": "none"}).tools == []


def test_an_image_at_an_address_keeps_it():
    source = {"type": "url", "url": "https://a/b.png"}
    chat = chat_of(messages=[{"role": "user", "content": [{"type": "image", "source": source}]}])
    assert chat.messages[0].image_urls == ["https://a/b.png"]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        ({"system": 5}, "system"),
        ({"n": 2}, "n is not supported"),
        ({"logprobs": True}, "logprobs"),
        ({"mcp_servers": [{"url": "a"}]}, "mcp_servers"),
        ({"output_config": {"budget": 5}}, "budget"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": []}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": 5}, "thinking"),
        ({"stop_sequences": ["5"] * 17}, "stop_sequences: "),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: "),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(service, fields, word):
    status, answer = ask(service, **fields)
    assert status == 400 and answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error" and word in answer["error"]["message"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_an_error_has_the_form_of_the_api(status, kind):
    (event,) = builder().fail(protocol.ApiError(status, "no logits"))
    name, data = event.strip().split("\n")
    body = {"type": "error", "error": {"type": kind, "message": "no logits"}}
    assert name == "event: error" and json.loads(data.removeprefix("data: ")) == body


def test_an_error_of_another_endpoint_keeps_its_form(service):
    status, answer = ask(service, model="other")
    assert status == 404 and answer["error"]["type"] == "not_found_error"
    status, answer = ask(service, "messages/batches")
    assert status == 404 and answer["error"]["type"] == "not_found_error"
    status, answer = ask(service, "chat/completions", model="other")
    assert status == 404 and answer["error"]["code"] == "model_not_found"
