"""What the clients of today send, and get, without the package of any of them."""

import asyncio
import copy
import importlib
import json
import re
import threading
import types
from contextlib import closing

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from drumline import timings
from drumline.errors import CheckpointError, DrumlineError
from drumline.serving import http_server
from drumline.serving.sampling import TokenLogprob
from drumline.serving.scheduler import ServingLimits
from drumline.timings import ModelTimings
from tests.drumline.serving.conftest import expected, respond

for package in ("fastapi", "prometheus_client"):
    pytest.importorskip(package, reason="runs after `pip install 'drumline[serve]'`")
app = importlib.import_module("drumline.serving.app")
message_parser = importlib.import_module("drumline.serving.answers.message_parser")
protocol = importlib.import_module("drumline.serving.protocol")
request_stream = importlib.import_module("drumline.serving.answers.request_stream")
logprobs_field = importlib.import_module("drumline.serving.answers.logprobs").logprobs_field
merged = message_parser.merged

LIMITS = ServingLimits(max_length=200)
USER = [{"role": "user", "content": "5 6 7"}]


@pytest.fixture
def tokenizer(plain):
    return PreTrainedTokenizerFast.from_pretrained(plain[1])


@pytest.fixture
def service(loaded, tokenizer):
    with closing(app.Service(["llama"], loaded, tokenizer, LIMITS)) as service:
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


def test_a_completion_may_have_its_most_tokens_by_the_name_that_chats_have(service):
    """A load client sends both names, and each of its requests was refused."""
    _, answer = ask(service, max_tokens=3, max_completion_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2


def test_special_tokens_are_part_of_the_text_if_the_request_asks_for_them(service):
    ends = {"logit_bias": {"2": 100}, "ignore_eos": True, "max_tokens": 2}
    texts = [
        ask(service, **ends, skip_special_tokens=skip)[1]["choices"][0]["text"].split()
        for skip in (True, False)
    ]
    assert texts == [[], ["end", "end"]]


def test_a_chat_has_the_tokenizers_own_beginning_if_the_request_asks_for_it(service, tokenizer):
    """The field was refused, also with its default."""
    beginning = processors.TemplateProcessing("begin $A", special_tokens=[("begin", 1)])
    tokenizer.backend_tokenizer.post_processor = beginning
    answers = [chat(service)] + [chat(service, add_special_tokens=wish) for wish in (False, True)]
    assert [answer["usage"]["prompt_tokens"] for _, answer in answers] == [3, 3, 4]


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
    plain, loaded, tokenizer
):
    """Its temperature was ignored, so that three equal chats had three texts."""
    defaults = {"temperature": 1e-4, "top_k": 1, "repetition_penalty": 1.0}
    with closing(app.Service(["llama"], loaded, tokenizer, LIMITS, sampling=defaults)) as service:
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
    settings = http_server.ServerSettings(str(plain[1]), port=0)
    with http_server.Endpoint.open(settings.model_path, settings).listener:
        pass


@pytest.mark.parametrize(
    ("template", "problem"),
    [("{% if %}", "line 1: "), ("{{ 5 | no_filter }}", "no_filter"), (5, "not a text")],
)
def test_a_chat_template_that_is_not_one_is_said_at_start(plain, tokenizer, template, problem):
    """The first request heard of it, as if it were to blame."""
    tokenizer.chat_template = {"default": "{{ messages[0].no.word }}", "tool_use": template}
    with pytest.raises(CheckpointError, match=rf"DIR has .* is not a chat template \(.*{problem}"):
        http_server._set_chat_template("DIR", tokenizer, None)
    settings = http_server.ServerSettings(str(plain[1]), port=0, chat_template="\n{% if %}")
    with pytest.raises(DrumlineError, match=r"--chat-template is .*\(line 2: "):
        http_server.Endpoint.open(settings.model_path, settings)


def test_a_response_template_that_is_not_one_is_said_at_start(plain, tokenizer):
    tokenizer.response_template = {"fields": 5}
    with pytest.raises(CheckpointError, match=r"response_template .* cannot be used"):
        http_server._set_response_template("DIR", tokenizer, plain[0].config)


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


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_a_call_may_come_in_place_of_json_where_it_begins_with_a_token_of_its_own(
    speaker, monkeypatch, path
):
    """JSON was forced from the first token, so that agents with a form of their answer never
    called a tool."""
    pytest.importorskip("llguidance", reason="runs after `pip install llguidance`")
    template = copy.deepcopy(CALLS)
    template["fields"]["tool_calls"] |= {"open": "<", "close": "<<"}
    monkeypatch.setattr(speaker.tokenizer, "response_template", template, raising=False)
    start = speaker.tokenizer.convert_tokens_to_ids("<")
    form = {"type": "json_schema", "name": "n", "schema": COUNT}
    if path == "responses":
        body = {"input": "5", "tools": [{"type": "function", **TOOL["function"]}]}
        body |= {"text": {"format": form}, "max_output_tokens": 9}
    else:
        body = {"messages": USER, "tools": [TOOL], "max_tokens": 9}
        body["response_format"] = {"type": form.pop("type"), "json_schema": form}
    answers = []
    for added, bias in ({}, 100), ({"<": start}, 100), ({"<": start}, -100):
        monkeypatch.setattr(speaker.tokenizer, "get_added_vocab", lambda own=added: own)
        fields = {"model": "llama", "temperature": 0, "logit_bias": {start: bias}, **body}
        text = asyncio.run(respond(speaker, fields, path=path))[1]
        answers.append(text.partition('"tools":')[0])  # which a response has behind its items
    refused, called, written = answers
    assert "begin with a token that tells them from JSON" in refused
    assert '"name":"look"' in called and r"{\"n\"" not in called
    assert '"name":"look"' not in written and r"{\"n\"" in written


def test_a_schema_that_nothing_fulfils_is_the_mistake_of_the_request(speaker):
    """It was an error of the server, with the parser's inner state as its text."""
    pytest.importorskip("llguidance", reason="runs after `pip install llguidance`")
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": "#"}}}
    status, answer = chat(speaker, response_format=schema)
    assert status == 400 and answer["error"]["param"] == "response_format"
    assert answer["error"]["message"] == "response_format: no JSON can be of this schema"


def test_a_stream_that_waits_is_not_silent(tokenizer, monkeypatch):
    """Ranks that start again took longer than a proxy waits. A client that strips what comes took
    a comment for the beginning of the next event."""
    monkeypatch.setattr(timings, "TIMINGS", ModelTimings(ping_s=0.05, disconnect_poll_s=0.01))
    with closing(app.Service(["llama"], None, tokenizer, LIMITS)) as service:
        service.scheduler.vocabulary = 64
        threading.Timer(1, service.scheduler.close).start()  # there are no ranks, so all wait
        body = {"model": "llama", "prompt": "5 6 7", "stream": True}
        status, text = asyncio.run(respond(service, body))
    pings, error = text.split("data: ")
    assert status == 200 and "being stopped" in error
    assert set(pings) == {"\n"} and len(pings) > 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_the_log_probabilities_of_a_prompt_are_those_of_one_pass(
    plain, service, stream, max_tokens
):
    """It was refused, so that no multiple-choice task could be evaluated."""
    prompt = [1, 5, 6, 2, 7, 40]  # with tokens that begin and end a text
    fields = {"prompt": [prompt, [9, 8]], "logprobs": 2, "echo": True, "max_tokens": max_tokens}
    _, answer = ask(service, **fields, stream=stream)
    chunks = answer if stream else [answer]
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == 0]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    values = [value for part in parts for value in part["token_logprobs"]]
    tops = [top for part in parts for top in part["top_logprobs"]]
    with torch.no_grad():
        tokens = plain[0].generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False)
        wanted = torch.log_softmax(plain[0](tokens).logits[0].float(), 1)
    assert len(values) == len(tops) == 6 + max_tokens and values[0] is tops[0] is None
    own = [float(wanted[n, tokens[0, n + 1]]) for n in range(len(values) - 1)]
    assert values[1:] == pytest.approx(own, abs=1e-4)
    for row, top in zip(wanted, tops[1:], strict=False):
        likely = texts_of(service, row.topk(2).indices.tolist())
        assert likely <= set(top) and len(top) <= 3
    text = "".join(choice["text"] for choice in choices)
    shown = expected(plain, "1 5 6 2 7 40", max_tokens)[0] if max_tokens else ""
    assert text.split() == ["5", "6", "7", "40", *shown.split()]
    assert choices[-1]["finish_reason"] == "length"
    if not stream:
        assert answer["usage"]["prompt_tokens"] == 8
        assert answer["usage"]["completion_tokens"] == 2 * max_tokens


def test_the_token_that_ends_a_text_has_its_log_probability_too(service):
    """Clients that leave out the last one, of the token behind a prompt, lost one of the prompt."""
    ends = {"logit_bias": {"2": 100}, "logprobs": 1}
    for fields, num in ({"echo": True, "max_tokens": 1}, 3 + 1), ({"echo": True}, 3 + 1), ({}, 1):
        choice = ask(service, **ends, **fields)[1]["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["logprobs"]["tokens"][-1] == "end"
        assert len(choice["logprobs"]["token_logprobs"]) == num


def scored(tokenizer, prompt, tokens, **fields):
    """A completion of these tokens with their log-probabilities, whole and in chunks."""

    async def stays():
        return False

    async def read():
        stream = request_stream.RequestStream(tokenizer)
        body = protocol.CompletionRequest(model="m", prompt=prompt, logprobs=1, **fields)
        params = body.sampling_params(len(tokens), 0, {}, None)
        stream.add(body, prompt, params, set(), None, message_parser.PlainText())
        (choice,) = stream.generations
        choice.prompt_logprobs = [TokenLogprob(token, -1.0, ()) for token in prompt[1:]]
        for token in tokens:
            choice.sampler.logprob = TokenLogprob(token, -1.0, ((token, -1.0),))
            choice.append(token)
        pieces = [p async for p in stream.pieces(types.SimpleNamespace(is_disconnected=stays))]
        return body, pieces

    body, pieces = asyncio.run(read())
    builder = app.ResponseBuilder("m", "r", body, 1, tokenizer)
    chunks = [json.loads(event[6:]) for p in pieces for event in builder.add(p, {})]
    return builder.whole([pieces], {})["choices"][0], [c["choices"][0] for c in chunks]


@pytest.mark.parametrize("fields", [{}, {"stop": "cx"}])
def test_a_token_is_found_in_the_text_at_its_offset(fields):
    """The space before a word was not counted, as a word alone has none, and a token that is no
    text was."""
    words = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581bb": 1, "c": 2, "start": 3}))
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="start")
    whole, chunks = scored(tokenizer, [3, 0, 1], [1, 2, 0, 2], echo=True, **fields)
    offsets = [offset for c in chunks for offset in c["logprobs"]["text_offset"]]
    assert whole["text"] == "a bb bbc ac" == "".join(chunk["text"] for chunk in chunks)
    assert offsets == whole["logprobs"]["text_offset"] == [0, 0, 1, 4, 7, 8, 10]
    assert scored(tokenizer, [3, 0], [1, 2, 0])[0]["logprobs"]["text_offset"] == [0, 3, 4]


def test_a_token_that_is_a_part_of_a_character_has_its_own_bytes(byte_tokenizer):
    """Each had those of U+FFFD, and a client that joined them had no text."""

    def bytes_of(tokenizer, *tokens):
        logprobs = [(TokenLogprob(token, -1.0, ()), 0) for token in tokens]
        return [each["bytes"] for each in logprobs_field(tokenizer, True, logprobs)["content"]]

    words = Tokenizer(models.WordLevel({"<0xE4>": 0, "<0xBD>": 1, "\ufffd!": 2, "a": 3}))
    words.decoder = decoders.ByteFallback()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert bytes_of(tokenizer, 0, 1, 3, 2) == [[0xE4], [0xBD], [97], [*"\ufffd!".encode()]]
    tokenizer.convert_ids_to_tokens = lambda token: b"\xe4"  # as code of a checkpoint's own
    tokenizer.decode = lambda tokens: "\ufffd"
    assert bytes_of(tokenizer, 0) == [[0xE4]]
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokens = byte_tokenizer.convert_tokens_to_ids(sorted(letters))
    made = bytes_of(byte_tokenizer, *tokens)
    assert sorted(made) == [[byte] for byte in range(256)]
    assert bytes_of(byte_tokenizer, *byte_tokenizer("ä 你")["input_ids"]) == [
        [byte] for byte in "ä 你".encode()
    ]


def texts_of(service, tokens):
    return {service.tokenizer.decode([token]) for token in tokens}


def test_a_prompt_alone_may_be_echoed(service):
    for prompt in ("5 6 7", "5"):
        _, answer = ask(service, prompt=prompt, echo=True, max_tokens=0)
        assert answer["choices"][0]["text"].strip() == prompt
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0


def test_sampling_behind_an_echoed_prompt_is_what_it_is_without(service):
    sampled = {"temperature": 1.5, "seed": 3, "presence_penalty": 1, "stop": "6 "}
    plain = ask(service, **sampled)[1]["choices"][0]
    echoed = ask(service, **sampled, echo=True, logprobs=1)[1]["choices"][0]
    assert echoed["text"].split() == ["5", "6", "7", *plain["text"].split()]
    assert echoed["finish_reason"] == plain["finish_reason"]


def test_a_prompt_that_is_too_long_is_an_error_that_clients_know(service):
    """litellm's fallbacks for it never ran: it looks for the sentence, others for the code."""
    for fields in ({"max_tokens": 199}, {"prompt": [5] * 201}, {"prompt": "5" * 9999}):
        status, answer = ask(service, **fields)
        message = answer["error"]["message"]
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        assert message.startswith("This model's maximum context length is 200 tokens. However, ")


def test_a_text_of_a_token_that_the_model_lacks_is_refused_alone(service, tokenizer):
    """It failed each request of its step, with an error of torch."""
    tokenizer.add_tokens(["extra"])
    text = "5 extra 6"
    answers = ask(service, prompt=text), chat(service, [{"role": "user", "content": text}])
    for (status, answer), field in zip(answers, ("prompt", "messages"), strict=True):
        assert status == 400 and answer["error"]["param"] == field
        assert f"{len(tokenizer) - 1} is not a token of this model" in answer["error"]["message"]


def test_tokens_that_the_model_lacks_are_refused_by_the_name_of_their_field(service):
    for field, tokens in (("logit_bias", {"99999": 1}), ("stop_token_ids", [99999])):
        status, answer = ask(service, **{field: tokens})
        assert status == 400 and answer["error"]["param"] == field


def test_a_template_that_does_not_end_ends_its_request_alone(service, tokenizer, monkeypatch):
    """One chat kept a thread for ever."""
    monkeypatch.setattr(timings, "TIMINGS", ModelTimings(template_s=0.3))
    tokenizer.chat_template = (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )

    async def run():
        body = {"model": "llama", "messages": USER, "max_tokens": 1}
        endless = [
            asyncio.create_task(respond(service, body, path="chat/completions")) for _ in range(3)
        ]
        short = await respond(service, {"model": "llama", "prompt": "5", "max_tokens": 1})
        return short, await asyncio.gather(*endless)

    short, endless = asyncio.run(run())
    assert short[0] == 200 and {status for status, _ in endless} == {400}
    assert all("did not end within 0.3 s" in text for _, text in endless)


def headers_of(service, headers=(), method="POST", origins=None, path="/v1/completions", key=None):
    """The status and the headers of an answer."""
    sent = []
    body = json.dumps({"model": "llama", "prompt": "5", "max_tokens": 1}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [*headers]}
    made = app.application(service, key, origins)
    asyncio.run(made({**scope, "query_string": b""}, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"])


@pytest.mark.parametrize("sent", [b"", b"abc-1", b"two words", b"5" * 201, b"\xff"])
def test_each_answer_has_the_id_of_its_request(service, sent):
    """No answer could be found in the log."""
    status, headers = headers_of(service, [(b"x-request-id", sent)])
    is_kept = sent == b"abc-1"
    assert status == 200 and (headers[b"x-request-id"] == sent) == is_kept
    assert is_kept or len(headers[b"x-request-id"]) == 32


def test_the_id_of_a_request_is_in_the_log_and_the_answer(service, caplog):
    with caplog.at_level("INFO", "drumline.requests"):
        number = ask(service, max_tokens=1)[1]["id"].removeprefix("cmpl-")
    assert f"/v1/completions, id {number}: 3 tokens of prompt, 1 new" in caplog.text


def test_pages_of_allowed_origins_may_send_requests_and_no_others(service):
    """A browser's question was answered 405, and there was no option."""
    origin = b"http://localhost:3000"
    asked = [(b"origin", origin), (b"access-control-request-method", b"POST")]
    asked.append((b"access-control-request-headers", b"authorization"))
    status, headers = headers_of(service, asked, "OPTIONS", [origin.decode()])
    assert status == 200 and headers[b"access-control-allow-origin"] == origin
    status, headers = headers_of(service, asked, "OPTIONS", ["http://other"])
    assert status == 400 and b"access-control-allow-origin" not in headers
    status, headers = headers_of(service, asked, "OPTIONS")
    assert status == 405 and headers[b"allow"] == b"POST"  # RFC 9110, 15.5.6
    _, headers = headers_of(service, [(b"origin", origin)], origins=["*"])
    assert headers[b"access-control-allow-origin"] == b"*"


def test_what_is_read_may_be_asked_for_by_its_headers_alone(service):
    """A check of /health by HEAD was answered 405."""
    for path in ("/health", "/", "/metrics", "/version", "/v1/models", "/v1/models/llama"):
        head, get = (headers_of(service, method=name, path=path) for name in ("HEAD", "GET"))
        assert head[0] == get[0] == 200 and head[1].keys() == get[1].keys()


@pytest.mark.parametrize(
    "name", ["localhost:80", "127.0.0.1", "[::1]:80", "nas.local", "serve", "page.com"]
)
def test_without_a_key_no_page_reaches_the_server_by_a_name_of_its_own(service, name):
    """A page whose name was pointed at 127.0.0.1 read every answer."""
    for key in (None, "secret"):
        sent = [(b"host", name.encode()), (b"x-api-key", b"secret")]
        is_refused = key is None and name == "page.com"
        assert headers_of(service, sent, key=key)[0] == (403 if is_refused else 200)


def test_a_client_that_leaves_before_its_answer_has_no_place_among_the_times(service, monkeypatch):
    """Each that had given up made the mean time to the first token shorter, by 0 s."""
    checks = iter([False, True])

    async def is_disconnected(_):
        return next(checks)

    monkeypatch.setattr(app.Request, "is_disconnected", is_disconnected)
    ask(service, max_tokens=190)
    text = service.metrics.exposition().decode()
    for name in ("drumline_first_token_seconds_count", "drumline_request_seconds_count"):
        assert f"{name} 0.0" in text


def test_metrics_have_the_time_between_tokens_and_the_names_of_vllm(service):
    ask(service)
    text = service.metrics.exposition().decode()
    for name in ("drumline_token_gap_seconds_count", "drumline_new_tokens_total"):
        assert re.search(rf"^{name} [1-9]", text, re.M), name
    for name in ("time_to_first_token_seconds_count", "inter_token_latency_seconds_count"):
        assert re.search(rf'^vllm:{name}{{model_name="llama"}} [1-9]', text, re.M), name
    label = 'finished_reason="length",model_name="llama"'
    assert f"vllm:request_success_total{{{label}}} 1.0" in text
    for name in ("num_requests_waiting", "kv_cache_usage_perc"):
        assert f'vllm:{name}{{model_name="llama"}} 0.0' in text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "secret"}, 200),
        ({"authorization": "Bearer secret"}, 200),
        ({"authorization": "bearer  secret"}, 200),
        ({"authorization": "Bearer secret", "x-api-key": "guess"}, 200),
        ({"x-api-key": "guess"}, 401),
        ({"x-api-key": "Bearer secret"}, 401),
        ({"authorization": "secret"}, 401),
        ({"authorization": "Basic secret"}, 401),
        ({}, 401),
    ],
)
def test_a_key_may_be_sent_as_anthropics_clients_do(service, headers, status):
    """They were answered 401, whatever key they had."""
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    answered, fields = headers_of(service, raw, "GET", path="/v1/models", key="secret")
    assert answered == status and (fields.get(b"www-authenticate") == b"Bearer") == (status == 401)
