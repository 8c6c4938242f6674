"""What the clients of today send, and get, without the package of any of them."""

import asyncio
import copy
import importlib
import json
import threading
from contextlib import closing

import pytest
from transformers import PreTrainedTokenizerFast

from drumline import timings
from drumline.errors import CheckpointError
from drumline.serving import http_server
from drumline.serving.scheduler import ServingLimits
from drumline.timings import ModelTimings
from tests.drumline.conftest import LLAMA
from tests.drumline.serving.conftest import expected, respond

for package in ("fastapi", "prometheus_client"):
    pytest.importorskip(package, reason="runs after `pip install 'drumline[serve]'`")
app = importlib.import_module("drumline.serving.app")
merged = importlib.import_module("drumline.serving.answers.message_parser").merged

LIMITS = ServingLimits(max_length=200)
USER = [{"role": "user", "content": "5 6 7"}]


@pytest.fixture
def tokenizer(plain):
    return PreTrainedTokenizerFast.from_pretrained(plain[1])


@pytest.fixture
def service(plain, tokenizer):
    with closing(app.Service(["llama"], plain[0], tokenizer, LIMITS)) as service:
        yield service


def ask(service, path="completions", **fields):
    """The status, and the answer as an object, or as the list of a stream's."""
    body = {"model": "llama", "temperature": 0, "max_tokens": 6, **fields}
    body |= {} if "prompt" in fields or "messages" in fields else {"prompt": "5 6 7"}
    status, text = asyncio.run(respond(service, body, path=path))
    if not text.startswith("data: "):
        return status, json.loads(text)
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return status, [json.loads(line) for line in lines if line != "[DONE]"]


def chat(service, messages=USER, **fields):
    return ask(service, "chat/completions", messages=messages, **fields)


def test_each_chunk_has_the_usage_so_far_if_the_request_asks_for_it(service):
    """A load client asks for it with each stream, and could not measure this server."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    status, chunks = ask(service, stream=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert status == 200 and counts == sorted(counts) and counts[-1] == 6 and len(set(counts)) > 1
    assert all(chunk["usage"]["prompt_tokens"] == 3 for chunk in chunks)


def test_special_tokens_are_part_of_the_text_if_the_request_asks_for_them(service):
    ends = {"logit_bias": {"2": 100}, "ignore_eos": True, "max_tokens": 2}
    texts = [
        ask(service, **ends, skip_special_tokens=skip)[1]["choices"][0]["text"].split()
        for skip in (True, False)
    ]
    assert texts == [[], ["end", "end"]]


def test_arguments_of_a_call_reach_the_template_as_a_mapping(plain, service, tokenizer):
    """They were encoded twice, and a template that walks over them answered 400."""
    tokenizer.chat_template = (
        "{% for call in messages[-1].tool_calls %}"
        "{% for name, value in call.function.arguments.items() %}{{ value }} {% endfor %}"
        "{% endfor %}"
    )
    arguments = json.dumps({"a": 5, "b": 6, "c": 7})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    _, answer = chat(service, [{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["choices"][0]["message"]["content"].strip() == expected(plain, "5 6 7", 6)[0]


def test_variables_of_the_template_come_from_the_request(plain, service, tokenizer):
    tokenizer.chat_template = "{{ start }} {{ reasoning_effort }} {{ messages[0].extra }}"
    message = {"role": "user", "content": "", "extra": "7"}
    options = {"chat_template_kwargs": {"start": "5"}, "reasoning_effort": "6"}
    _, answer = chat(service, [message], **options)
    assert answer["choices"][0]["message"]["content"].strip() == expected(plain, "5 6 7", 6)[0]
    status, answer = chat(service, chat_template_kwargs={"chat_template": "{{ 5 }}"})
    assert status == 400 and answer["error"]["param"] == "chat_template_kwargs.chat_template"


def test_sampling_that_the_checkpoint_recommends_counts_where_the_request_says_nothing(
    plain, tokenizer
):
    """Its temperature was ignored, so that three equal chats had three texts."""
    defaults = {"temperature": 1e-4, "top_k": 1, "repetition_penalty": 1.0}
    with closing(app.Service(["llama"], plain[0], tokenizer, LIMITS, sampling=defaults)) as service:
        quiet = {chat(service, temperature=None)[1]["choices"][0]["message"]["content"]}
        loud = {
            chat(service, temperature=2, top_k=0)[1]["choices"][0]["message"]["content"]
            for _ in range(4)
        }
    assert {text.strip() for text in quiet} == {expected(plain, "5 6 7", 6)[0]} and len(loud) > 1


def test_the_end_token_of_the_tokenizer_ends_an_answer_too(service, tokenizer):
    """A chat's end came out as text, and the answer went on to its limit."""
    tokenizer.eos_token = "9"
    wanted = {"logit_bias": {"9": 100}}
    choice = chat(service, **wanted)[1]["choices"][0]
    assert choice["message"]["content"] == "" and choice["finish_reason"] == "stop"
    choice = chat(service, **wanted, ignore_eos=True)[1]["choices"][0]
    assert choice["message"]["content"].split() == ["9"] * 6 and choice["finish_reason"] == "length"


def test_settings_of_a_checkpoint_are_read_before_it_is_served(plain, tmp_path):
    assert http_server.read_sampling_defaults(str(tmp_path)) == {}
    settings = {"temperature": 0.6, "top_k": 20, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert http_server.read_sampling_defaults(str(tmp_path)) == {"temperature": 0.6, "top_k": 20}
    arguments = (str(plain[1]), "127.0.0.1", 0, None, None, None, {})
    with http_server.Endpoint.open(*arguments).listener:
        pass


def test_a_response_template_that_is_not_one_is_said_at_start(plain, tokenizer):
    tokenizer.response_template = {"fields": 5}
    with pytest.raises(CheckpointError, match=r"response_template .* cannot be used"):
        http_server._response_template("DIR", tokenizer, plain[0].config)


TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
CALLS = {
    "start_anchor": "begin",
    "fields": {
        "content": {"content": "text"},
        "tool_calls": {
            "open": "7",
            "close": "11",
            "content": "text",
            "repeats": True,
            "transform": {"function": {"name": "look", "arguments": {"place": "{content}"}}},
        },
    },
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_in_an_answer_is_a_call_in_the_response(service, tokenizer, stream):
    """A call was text, and an agent never called."""
    tokenizer.response_template = CALLS
    text = ask(service, "completions", prompt="5 6 7", max_tokens=40)[1]["choices"][0]["text"]
    words = text.split()
    tokenizer.response_template = copy.deepcopy(CALLS)
    region = tokenizer.response_template["fields"]["tool_calls"]
    region["open"], region["close"] = words[1], words[4]
    _, answer = chat(service, tools=[TOOL], stream=stream, max_tokens=40)
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in answer]
        choice = {"message": merged(deltas), **answer[-1]["choices"][0]}
    else:
        choice = answer["choices"][0]
    message = choice["message"]
    (first, *_) = message["tool_calls"]
    place = {"place": " ".join(words[2:4])}
    assert first["function"] == {"name": "look", "arguments": json.dumps(place)}
    assert message["content"].startswith(words[0])
    assert choice["finish_reason"] in ("tool_calls", "length")


@pytest.fixture(scope="module")
def speaker(checkpoints, byte_tokenizer):
    """A service of a model whose tokens are bytes, so that grammars can bind them."""
    config = {**LLAMA, "vocab_size": 257, "num_hidden_layers": 1, "eos_token_id": 256}
    model, _ = checkpoints.make("bytes", "LlamaForCausalLM", **config)
    byte_tokenizer.chat_template = "{{ messages[0].content }}"
    limits = ServingLimits(max_length=700)
    with closing(app.Service(["llama"], model, byte_tokenizer, limits)) as service:
        yield service


NUMBER = {"$ref": "#/$defs/digit"}
COUNT = {
    "type": "object",
    "properties": {"n": NUMBER},
    "required": ["n"],
    "additionalProperties": False,
    "$defs": {"digit": {"enum": [1, 2]}},
}
NAMED = {"type": "function", "function": {"name": "count"}}
TOOLS = [TOOL, {"type": "function", "function": {"name": "count", "parameters": COUNT}}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["any", "named"])
def test_a_tool_that_must_be_called_is_called(speaker, choice, stream):
    """It was refused, so no agent that depends on it could be served."""
    pytest.importorskip("llguidance", reason="runs after `pip install llguidance`")
    tools = TOOLS[1:] if choice == "required" else TOOLS
    fields = {"tools": tools, "tool_choice": choice, "stream": stream, "max_tokens": 500}
    _, answer = chat(speaker, **fields, seed=4, temperature=1, parallel_tool_calls=False)
    if stream:
        message = merged(chunk["choices"][0]["delta"] for chunk in answer)
        reason = answer[-1]["choices"][0]["finish_reason"]
    else:
        (whole,) = answer["choices"]
        message, reason = whole["message"], whole["finish_reason"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "count" and reason == "tool_calls"
    assert json.loads(call["function"]["arguments"])["n"] in (1, 2)
    assert call["id"] and message["content"] is None


def test_a_schema_that_nothing_fulfils_is_the_mistake_of_the_request(speaker):
    """It was an error of the server, with the parser's inner state as its text."""
    pytest.importorskip("llguidance", reason="runs after `pip install llguidance`")
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": "#"}}}
    status, answer = chat(speaker, response_format=schema)
    assert status == 400 and answer["error"]["param"] == "response_format"
    assert answer["error"]["message"] == "response_format: no JSON can be of this schema"


def test_a_stream_that_waits_is_not_silent(tokenizer, monkeypatch):
    """Ranks that start again took longer than a proxy waits."""
    monkeypatch.setattr(timings, "TIMINGS", ModelTimings(ping_s=0.05, disconnect_poll_s=0.01))
    with closing(app.Service(["llama"], None, tokenizer, LIMITS)) as service:
        service.scheduler.vocabulary = 64
        threading.Timer(1, service.scheduler.close).start()  # there are no ranks, so all wait
        body = {"model": "llama", "prompt": "5 6 7", "stream": True}
        status, text = asyncio.run(respond(service, body))
    *pings, error = text.removesuffix("\n\n").split("\n\n")
    assert status == 200 and "being stopped" in error
    assert set(pings) == {": ping"} and len(pings) > 2
