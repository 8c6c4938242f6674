"""OpenAI's Responses API is the chats' by other names."""

import asyncio
import importlib
import json
from contextlib import closing
from types import SimpleNamespace

import pytest

from drumline.serving.sampling import SamplingParams
from drumline.serving.scheduler import PAGE_SIZE, ServingLimits
from tests.drumline.serving.conftest import expected, respond

for package in ("fastapi", "prometheus_client"):
    pytest.importorskip(package, reason="runs after `pip install 'drumline[serve]'`")
app = importlib.import_module("drumline.serving.app")
responses = importlib.import_module("drumline.serving.answers.responses")
request_stream = importlib.import_module("drumline.serving.answers.request_stream")
MessagePiece = request_stream.MessagePiece
message_parser = importlib.import_module("drumline.serving.answers.message_parser")
protocol = importlib.import_module("drumline.serving.protocol")
ApiError = protocol.ApiError

CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}


@pytest.fixture
def service(plain, loaded):
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(plain[1])
    with closing(app.Service(["llama"], loaded, tokenizer, ServingLimits(200))) as service:
        yield service


def ask(service, **fields):
    """The status, and the answer as an object, or as the list of a stream's."""
    body = {"model": "llama", "temperature": 0, "max_output_tokens": 6, **fields}
    status, text = asyncio.run(respond(service, body, path="responses"))
    if not text.startswith("event: "):
        return status, json.loads(text)
    events = [event.split("\n") for event in text.split("\n\n") if event]
    data = [json.loads(line.removeprefix("data: ")) for _, line in events]
    assert [f"event: {event['type']}" for event in data] == [name for name, _ in events]
    assert [event["sequence_number"] for event in data] == list(range(len(data)))
    return status, data


def test_a_response_is_the_answer_of_the_chat(plain, service):
    text, end = expected(plain, "5 6 7", 6)
    items = [{"role": "user", "content": [{"type": "input_text", "text": "6 7"}]}]
    for fields in ({"input": "5 6 7"}, {"instructions": "5", "input": items}):
        status, answer = ask(service, **fields)
        (item,) = answer["output"]
        (part,) = item["content"]
        assert status == 200 and part["text"].split() == text.split() and end == "length"
        assert answer["status"] == item["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert answer["usage"]["input_tokens"] == 3 and answer["usage"]["output_tokens"] == 6
        _, events = ask(service, **fields, stream=True)
        assert events[-1]["type"] == "response.incomplete"
        last = events[-1]["response"]
        assert last["output"][0]["content"] == item["content"]
        deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
        assert "".join(deltas) == part["text"] and len(deltas) > 1
        own = [e for e in events if e["type"].startswith("response.output_text.")]
        assert all(event["logprobs"] == [] for event in own) and len(own) == len(deltas) + 1


def test_usage_tells_of_what_was_cached_and_of_reasoning(service, monkeypatch):
    """Both were 0, whatever was computed."""

    class Reasoning(message_parser.PlainText):
        def feed(self, text):
            return [{"reasoning_content": text}]

    parsers = iter((message_parser.PlainText(), Reasoning()))
    monkeypatch.setattr(app, "message_parser", lambda *_: next(parsers))
    text = " ".join(str(3 + n % 50) for n in range(2 * PAGE_SIZE + 1))
    for num_cached, num_reasoning in ((0, 0), (2 * PAGE_SIZE, 6)):
        usage = ask(service, input=text, logit_bias={"30": 100})[1]["usage"]
        details = {"cached_tokens": num_cached, "cache_write_tokens": 0}
        assert usage["input_tokens_details"] == details
        assert usage["output_tokens_details"] == {"reasoning_tokens": num_reasoning}


def builder_of(**fields):
    body = json.dumps({"model": "llama", "input": "5", **fields}).encode()
    protocol = responses.protocol
    request = protocol.validate(protocol.ChatCompletionRequest, responses.parse_as_chat(body), 99)
    return responses.ItemBuilder("llama", "r", request, 1, None)


def test_reasoning_text_and_calls_are_items_of_their_own():
    builder = builder_of(tools=[TOOL], tool_choice={"type": "function", "name": "add"})
    function = {"name": "add", "arguments": "{}"}
    deltas = [
        *({"reasoning_content": "so"}, {"content": "it "}, {"content": "is"}),
        {"tool_calls": [{"index": 0, "id": "c1", "function": function}]},
    ]
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    usage |= {"prompt_tokens_details": {}, "completion_tokens_details": {}}
    MessagePiece = importlib.import_module("drumline.serving.answers.response_writer").MessagePiece
    pieces = [MessagePiece(0, delta, [], None) for delta in deltas]
    pieces.append(MessagePiece(0, {}, [], "tool_calls"))
    answer = builder.whole([pieces], usage)
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
    assert answer["output"][0]["content"] == [{"type": "reasoning_text", "text": "so"}]
    assert answer["output"][1]["content"][0]["text"] == "it is"
    call = answer["output"][2]
    assert (call["call_id"], call["name"], call["arguments"]) == ("c1", "add", "{}")
    assert {item["status"] for item in answer["output"]} == {answer["status"]} == {"completed"}
    assert answer["tools"] == [TOOL] and answer["tool_choice"]["name"] == "add"


def test_a_tool_that_is_no_function_is_left_out_where_none_may_be_called():
    """It was refused, as where it might have been."""
    assert builder_of(tools=[{"type": "web_search"}, TOOL], tool_choice="none").body.tools == [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    ]


def test_fields_that_cannot_change_an_answer_of_functions_are_taken():
    """Common clients send both: one counts calls of OpenAI's tools, one is for longer prompts."""
    fields = {"tools": [TOOL], "max_tool_calls": 3, "truncation": "auto"}
    assert builder_of(**fields).body == builder_of(tools=[TOOL]).body


def test_an_error_is_the_last_event_of_a_stream_that_has_begun():
    (event,) = builder_of().fail(ApiError(500, "no logits"))
    kind, data = event.strip().split("\n")
    assert kind == "event: response.failed"
    response = json.loads(data.removeprefix("data: "))["response"]
    assert response["status"] == "failed" and response["error"]["message"] == "no logits"


def test_items_of_an_answer_sent_back_are_the_messages_of_a_chat():
    reasoning = {"type": "reasoning", "summary": [], "content": [{"text": "so"}]}
    output = {"type": "function_call_output", "call_id": "c", "output": "3"}
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    fields = {
        "input": [{"role": "user", "content": "5"}, reasoning, CALL, CALL, output],
        "text": {"format": schema, "verbosity": "medium"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "previous_response_id": None,
    }
    chat = responses.parse_as_chat(json.dumps(fields).encode())
    function = {"name": "add", "arguments": "{}"}
    call = {"id": "c", "type": "function", "function": function}
    assert chat["messages"] == [
        {"role": "user", "content": "5"},
        {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    own = {"name": "a", "schema": {"type": "object"}}
    assert chat["response_format"] == {"type": "json_schema", "json_schema": own}
    assert chat["reasoning_effort"] == "low" and chat["verbosity"] == "medium"
    assert not [name for name in chat if name.startswith("reasoning.")]


def test_reasoning_in_pieces_or_without_a_text_behind_is_kept():
    """The last piece alone was, in the user's message or nowhere."""
    parts = [{"type": "reasoning_text", "text": "so"}]
    pieces = [{"type": "reasoning", "summary": [], "content": parts}]
    pieces.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": " it"}]})
    pieces.append({"type": "reasoning", "summary": [], "encrypted_content": "x"})
    user, text = {"role": "user", "content": "5"}, {"role": "assistant", "content": "is"}
    items = [*pieces, text, *pieces, user, pieces[2], user, *pieces]
    chat = responses.parse_as_chat(json.dumps({"input": items}).encode())
    own = {"role": "assistant", "content": "", "reasoning_content": "so it"}
    assert chat["messages"] == [own | text, own, user, user, own]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "oldest"}, "truncation"),
        ({"n": 2}, "n"),
        ({"messages": []}, None),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "messages"),
        ({"text": 5}, "text"),
        ({"reasoning": {"effort": "low", "mode": "pro"}}, "reasoning.mode"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(fields, field):
    """Nothing is stored, so a conversation cannot go on from an answer's id."""
    with pytest.raises(ApiError) as refusal:
        builder_of(**fields)
    assert refusal.value.status == 400 and refusal.value.body["error"]["param"] == field


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"input": [{"type": "item_reference", "id": "1"}]},
    ],
)
def test_what_would_have_to_be_stored_is_refused_with_what_to_send(fields):
    """To leave it out, as the error said, would have lost the conversation."""
    with pytest.raises(ApiError, match="Send store=false, and the items themselves"):
        builder_of(**fields)


def test_an_error_names_fields_as_the_request_does(service):
    """It named those of a chat, which the client had not sent."""
    schema = {"type": "json_schema", "name": "s", "schema": {"$ref": "#"}}
    for fields, field in (
        ({"input": "5", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "5", "max_output_tokens": 500}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": "5", "text": {"format": schema}}, "text.format"),
    ):
        status, answer = ask(service, **fields)
        assert status == 400 and answer["error"]["param"] == field
        assert answer["error"]["message"].startswith((f"{field}: ", "This model's maximum"))
    error = ask(service, messages=[])[1]["error"]
    assert "no field messages" in error["message"] and error["param"] is None


def test_a_stop_string_of_the_last_token_is_the_reason_of_the_end():
    """It was the length where the token ends within a character, which is decoded at the end."""

    class WholeTokens:
        def decode(self, tokens, **_):
            return "".join("a\ufffd" if token else " " for token in tokens)

    async def read():
        stream = request_stream.RequestStream(WholeTokens())
        body = protocol.CompletionRequest(model="m", prompt=[0], stop="a")
        params = SamplingParams(max_tokens=1, stop=("a",))
        stream.add(body, [0], params, set(), None, message_parser.PlainText())
        stream.generations[0].append(1)
        request = SimpleNamespace(is_disconnected=stays)
        return [(p.delta, p.finish_reason) async for p in stream.pieces(request)]

    async def stays():
        return False

    assert asyncio.run(read()) == [({}, "stop")]


@pytest.mark.parametrize("end_tokens", [set(), {6}])
def test_the_time_to_the_first_token_is_not_that_to_the_first_piece(byte_tokenizer, end_tokens):
    """An answer of calls, which come at its end, looked like a prompt of that length."""

    async def read():
        stream = request_stream.RequestStream(byte_tokenizer)
        body = protocol.CompletionRequest(model="m", prompt=[5])
        params = SamplingParams(max_tokens=2)
        stream.add(body, [5], params, end_tokens, None, message_parser.CallList())
        stream.generations[0].append(6)
        await asyncio.sleep(0.2)
        if not end_tokens:
            stream.generations[0].append(6)
        async for _ in stream.pieces(SimpleNamespace(is_disconnected=stays)):
            pass
        return stream.first_token_s, stream.request_s

    async def stays():
        return False

    first_s, last_s = asyncio.run(read())
    assert first_s > 0 and (last_s - first_s > 0.1 or end_tokens)


def test_a_parser_that_fails_at_the_end_ends_its_own_request_alone(byte_tokenizer):
    """The error went into the step, which ended all sequences of the batch."""

    class BrokenParser(message_parser.PlainText):
        def finish(self, is_cut):
            raise AttributeError("not in the form of the template")

    async def read():
        stream = request_stream.RequestStream(byte_tokenizer)
        body = protocol.CompletionRequest(model="m", prompt=[5])
        stream.add(body, [5], SamplingParams(max_tokens=1), set(), None, BrokenParser())
        stream.generations[0].append(6)
        async for _ in stream.pieces(SimpleNamespace(is_disconnected=stays)):
            pass

    async def stays():
        return False

    with pytest.raises(ApiError, match="not in the form"):
        asyncio.run(read())
