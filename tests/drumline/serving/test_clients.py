"""What the clients of today send, and get, without the package of any of them."""

import asyncio
import importlib
import json
from contextlib import closing

import pytest
from transformers import PreTrainedTokenizerFast

from drumline.serving.scheduler import ServingLimits
from tests.drumline.serving.conftest import expected, respond

for package in ("fastapi", "prometheus_client"):
    pytest.importorskip(package, reason="runs after `pip install 'drumline[serve]'`")
app = importlib.import_module("drumline.serving.app")

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
