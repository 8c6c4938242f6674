"""A server on 2 ranks with OpenAI's own client. The last test ends the server."""

import asyncio
import http.client
import importlib
import json
import os
import re
import resource
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import launcher
from drumline import timings
from drumline.errors import DrumlineError
from drumline.serving import http_server as http_server
from drumline.serving import protocol, scheduler
from drumline.serving.sampling import SamplingParams
from drumline.serving.scheduler import Generation, ServingLimits
from drumline.serving.status import StatusReport
from drumline.timings import ModelTimings
from tests.drumline.serving.conftest import expected, respond
from tests.programs.chromium import Chromium

REASON = "runs after `pip install openai 'drumline[serve]'`"
openai = pytest.importorskip("openai", reason=REASON)
for package in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason=REASON)
app = importlib.import_module("drumline.serving.app")  # it needs these packages

ROOT = Path(__file__).parents[3]
KEY = "a key of the tests"
LIMITS = ServingLimits(max_length=2000)
# Seconds of work on any machine, so that what a test does to it comes before its end.
ENDLESS = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}
PROMPTS = ["5 6 7", "11 12 13 14 15 16", "40", "9 8 7 6 5 4 3 9 8"]


@pytest.fixture(scope="module")
def server(plain, warm, tmp_path_factory, kept_port):
    """The processes of the ranks, and the address of what they serve."""
    key_file = tmp_path_factory.mktemp("serve") / "key"
    key_file.write_text(f"{KEY}\n")
    options = ["--port", "0", "--api-key-file", key_file, "--max-length", "2000"]
    limits = ["--max-running", "6", "--max-waiting", "8"]
    command = ["-m", "drumline", "serve", "--model", plain[1], "--memory", "1GiB"]
    ranks, launch_id, port = [], f"serve-{os.getpid()}", kept_port()
    for rank in range(2):
        info = launcher.LaunchInfo(launch_id, 2, 2, rank, rank, "127.0.0.1", port)
        environ = {**os.environ, **info.to_env()}
        ranks.append(warm.start(*command, "1GiB", *options, *limits, env=environ, cwd=ROOT))
    line = ranks[0].stdout.readline()
    try:
        yield ranks, re.search(r"serving llama at (http://127\.0\.0\.1:\d+)/v1", line)[1]
    finally:
        for rank in ranks:
            rank.kill()
            print(rank.communicate()[1])


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server[1]}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def complete(client):
    def run(prompt, **options):
        options = {"max_tokens": 12, "temperature": 0, **options}
        return client.completions.create(model="llama", prompt=prompt, **options)

    return run


def metric(server, name):
    request = urllib.request.Request(
        f"{server[1]}/metrics", headers={"Authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return float(re.search(rf"^{re.escape(name)} (.*)$", answer.read().decode(), re.M)[1])


def test_the_model_is_listed_by_its_name(client):
    (card,) = client.models.list().data
    assert card.id == "llama" and client.models.retrieve("llama").id == "llama"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_completion_equals_that_of_a_single_process(plain, complete, prompt):
    answer = complete(prompt)
    text, end = expected(plain, prompt)
    assert answer.choices[0].text.strip() == text and answer.choices[0].finish_reason == end
    assert answer.usage.prompt_tokens == len(prompt.split())


def test_a_prompt_may_be_tokens_and_a_request_may_hold_several(plain, complete):
    answer = complete([[5, 6, 7], [40]])
    texts = [choice.text.strip() for choice in answer.choices]
    assert texts == [expected(plain, prompt)[0] for prompt in ("5 6 7", "40")]


def test_a_response_is_what_the_client_reads_and_streams(plain, client):
    """There was no such route, which newer agents ask for."""
    text, _ = expected(plain, "5 6 7")
    fields = {"model": "llama", "input": "5 6 7", "temperature": 0, "max_output_tokens": 12}
    answer = client.responses.create(**fields)
    assert answer.output_text.strip() == text
    with client.responses.create(**fields, stream=True) as stream:
        *events, last = stream
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output_text == last.response.output_text


def test_a_chat_goes_through_the_chat_template(plain, client):
    messages = [
        {"role": "system", "content": "11 12 13"},
        {"role": "user", "content": [{"type": "text", "text": "14 15 16"}]},
    ]
    answer = client.chat.completions.create(
        model="llama", messages=messages, temperature=0, max_completion_tokens=12
    )
    assert answer.choices[0].message.content.strip() == expected(plain, PROMPTS[1])[0]
    assert answer.choices[0].message.role == "assistant"


def test_a_stream_has_the_same_text_in_pieces_and_ends_with_the_usage(plain, client):
    stream = client.chat.completions.create(
        model="llama",
        messages=[{"role": "user", "content": PROMPTS[1]}],
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    text, end = expected(plain, PROMPTS[1])
    assert "".join(pieces).strip() == text and len([piece for piece in pieces if piece]) > 3
    assert [e for e in ends if e] == [end] and chunks[-1].usage.prompt_tokens == 6


def test_concurrent_clients_share_batches_and_get_the_same_text_as_alone(plain, server, complete):
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(complete, PROMPTS[:3] * 4))
    texts = [answer.choices[0].text.strip() for answer in answers]
    assert texts == [expected(plain, prompt)[0] for prompt in PROMPTS[:3]] * 4
    assert metric(server, "drumline_largest_batch") > 1


def test_each_sequence_of_a_batch_has_its_own_sampling_parameters(complete):
    def text_with(options):
        return complete("5 6 7", **options).choices[0].text

    requests = [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 1},
        {"temperature": 1.5, "seed": 2},
        {"temperature": 1.5, "seed": 3, "extra_body": {"top_k": 1}},
        {"temperature": 1.5, "seed": 4, "top_p": 1e-6},
    ]
    alone = [text_with(options) for options in requests]
    with ThreadPoolExecutor(5) as threads:
        assert list(threads.map(text_with, requests)) == alone
    assert len(set(alone)) == 3 and alone[0] == alone[3] == alone[4]


def test_choices_differ_and_a_seed_reproduces_them(complete):
    first, again = (
        [c.text for c in complete("5 6 7", n=3, temperature=1.5, seed=7).choices] for _ in range(2)
    )
    assert first == again and len(set(first)) == 3


def test_the_text_ends_before_a_stop_string(plain, complete):
    words = expected(plain, PROMPTS[1])[0].split()
    stop = f"{words[3]} {words[4]}"
    before = expected(plain, PROMPTS[1])[0].partition(stop)[0]
    choice = complete(PROMPTS[1], stop=[stop, "never"]).choices[0]
    assert choice.text.strip() == before.strip() and choice.finish_reason == "stop"


def test_penalties_make_repeated_tokens_rarer(complete):
    penalized, free = (
        complete("5 6 7", presence_penalty=size, frequency_penalty=size, max_tokens=20)
        for size in (2, 0)
    )
    counts = [
        Counter(answer.choices[0].text.split()).most_common(1)[0][1] for answer in (penalized, free)
    ]
    assert counts[0] < counts[1]


def test_the_log_probability_of_each_token_is_that_of_a_single_process(plain, complete):
    prompt = [int(word) for word in PROMPTS[1].split()]
    answer = complete(prompt, logprobs=2).choices[0]
    logprobs = answer.logprobs
    tokens = [int(text) for text in logprobs.tokens]
    assert "".join(logprobs.tokens) == "".join(answer.text.split())
    rows = torch.tensor([prompt + tokens])
    with torch.no_grad():
        wanted = torch.log_softmax(plain[0](rows).logits[0, len(prompt) - 1 : -1].float(), 1)
    own = wanted.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert logprobs.token_logprobs == pytest.approx(own.tolist(), abs=1e-4)
    for row, top in zip(wanted, logprobs.top_logprobs, strict=True):
        assert {int(text) for text in top} == set(row.topk(2).indices.tolist())
    assert len(set(logprobs.text_offset)) == len(tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_the_log_probability_of_every_token(plain, client, stream):
    request = {"messages": [{"role": "user", "content": "5 6 7"}], "temperature": 0}
    options = {"logprobs": True, "top_logprobs": 3, "max_tokens": 6, "stream": stream}
    answer = client.chat.completions.create(model="llama", **request, **options)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    tokens = [item for choice in choices if choice.logprobs for item in choice.logprobs.content]
    assert [token.token for token in tokens] == expected(plain, "5 6 7", 6)[0].split()
    assert all(token.top_logprobs[0].logprob == token.logprob for token in tokens)
    assert all(len(token.top_logprobs) == 3 for token in tokens)


def test_tokens_that_end_a_sequence_are_chosen_by_the_request(plain, complete):
    words = expected(plain, "5 6 7")[0].split()
    first = words.index(words[4])
    cut = complete("5 6 7", extra_body={"stop_token_ids": [int(words[4])]}).choices[0]
    assert cut.text.split() == words[:first] and cut.finish_reason == "stop"
    late = complete("5 6 7", extra_body={"stop_token_ids": [int(words[4])], "min_tokens": 8})
    assert len(late.choices[0].text.split()) >= 8
    eos = {"logit_bias": {"2": 100}}
    assert complete("5 6 7", **eos).choices[0].text == ""
    kept = complete("5 6 7", **eos, extra_body={"ignore_eos": True})
    assert kept.usage.completion_tokens == 12 and kept.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_may_begin_with_its_prompt(plain, complete, stream):
    answer = complete("5 6 7", echo=True, stream=stream)
    texts = [chunk.choices[0].text for chunk in answer] if stream else [answer.choices[0].text]
    assert "".join(texts).split() == ["5", "6", "7", *expected(plain, "5 6 7")[0].split()]


def test_tools_reach_the_chat_template(plain, loaded):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(plain[1])
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}5"
    tool = {"type": "function", "function": {"name": "11 12", "parameters": {}}}
    body = {"model": "llama", "messages": [{"role": "user", "content": "5"}], "max_tokens": 1}
    with closing(app.Service(["llama"], loaded, tokenizer, LIMITS)) as service:
        usages = [
            json.loads(asyncio.run(respond(service, {**body, **more}, path="chat/completions"))[1])
            for more in ({"tools": [tool]}, {"tools": [tool], "tool_choice": "none"})
        ]
    assert [usage["usage"]["prompt_tokens"] for usage in usages] == [3, 1]


def test_text_and_tokens_are_told_and_the_version(server):
    told = json.loads(post_raw(server, "/tokenize", {"prompt": "5 6 7"}))
    assert told == {"tokens": [5, 6, 7], "count": 3, "max_model_len": 2000}
    assert json.loads(post_raw(server, "/detokenize", {"tokens": [5, 6]})) == {"prompt": "5 6"}
    assert json.loads(post_raw(server, "/version")) == {"version": launcher.__version__}


def post_raw(server, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(server[1] + path, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"model": "gpt"}, openai.NotFoundError, "'gpt' is not served here"),
        ({"max_tokens": 1999}, openai.BadRequestError, "context length is 2000 tokens. However"),
        ({"prompt": ""}, openai.BadRequestError, "no tokens"),
        ({"prompt": []}, openai.BadRequestError, "no tokens"),
        ({"prompt": [70]}, openai.BadRequestError, "70 is not a token"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"best_of": 2}, openai.BadRequestError, "best_of is not supported"),
        ({"logprobs": 21}, openai.BadRequestError, "logprobs: .*less than or equal to 20"),
        ({"max_tokens": 0}, openai.BadRequestError, "nothing would be generated"),
        (
            {"extra_body": {"min_tokens": 4}},
            openai.BadRequestError,
            "min_tokens=4 is more than the 3",
        ),
        (
            {"max_tokens": None, "extra_body": {"min_tokens": 17}},
            openai.BadRequestError,
            "min_tokens=17 is more than the 16",
        ),
        ({"logit_bias": {"70": 1}}, openai.BadRequestError, "70 is not a token"),
        ({"logit_bias": {"7": 101}}, openai.BadRequestError, "less than or equal to 100"),
        ({"prompt": ["5"] * 9}, openai.BadRequestError, "more than the 8"),
        ({"stop": ["5"] * 17}, openai.BadRequestError, "stop: .*more than 16"),
        ({"stop": ["5", "5" * 257]}, openai.BadRequestError, "stop: .*256 characters"),
        ({"stop": "5" * 257}, openai.BadRequestError, "stop: .*256 characters"),
        ({"prompt": [5, "x"]}, openai.BadRequestError, r"prompt.0: .* valid string"),
    ],
)
def test_an_invalid_request_is_an_error_in_openais_form(client, options, kind, message):
    request = {"model": "llama", "prompt": "5 6", "max_tokens": 3, **options}
    with pytest.raises(kind, match=message) as raised:
        client.completions.create(**request)
    assert raised.value.body["message"] and raised.value.body["type"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/v1/chat/completions",
            {"top_logprobs": 2},
            "top_logprobs is given without logprobs=true",
        ),
        ("/v1/chat/completions", {"max_completion_tokens": 2, "min_tokens": 3}, "than the 2"),
        (
            "/v1/chat/completions",
            {"max_completion_tokens": 2, "max_tokens": 9, "min_tokens": 3},
            "than the 2",
        ),
        ("/tokenize", {}, "messages is not supported"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"tokenize": True}}, "kwargs.tokenize"),
    ],
)
def test_fields_that_would_be_ignored_are_refused(server, path, body, message):
    messages = [{"role": "user", "content": "5"}]
    with pytest.raises(urllib.error.HTTPError) as refused:
        post_raw(server, path, {"model": "llama", "messages": messages, **body})
    assert message in json.loads(refused.value.read())["error"]["message"]


def until_none_is_left(server):
    """Wait until the requests of clients that have gone have ended."""
    until = time.monotonic() + 60
    while metric(server, "drumline_requests_running") + metric(server, "drumline_requests_waiting"):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_full_queue_answers_that_the_server_is_busy(server, complete):
    until_none_is_left(server)
    with complete("15", n=8, stream=True, **ENDLESS) as running:
        next(iter(running))  # 6 of the 8 run, and 2 wait
        with pytest.raises(openai.RateLimitError, match="limit of 8"):
            complete("15", n=8)
    until_none_is_left(server)
    assert complete("15", n=8, max_tokens=95).choices[7].finish_reason == "length"


def test_unsupported_fields_with_their_disabled_values_are_accepted(complete):
    """Some clients send all the fields they know."""
    disabled = {"echo": False, "best_of": 1, "suffix": None, "logit_bias": {}, "logprobs": None}
    chats = {"metadata": {}, "tool_choice": "none", "tools": [], "service_tier": "auto"}
    stream = complete(
        "5 6 7",
        **disabled,
        extra_body={**chats, "top_logprobs": 0, "top_k": -1, "modalities": ["text"]},
        stream=True,
        stream_options={"include_obfuscation": False},
    )
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == complete("5 6 7").choices[0].text


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[" * 200_000,
        b'{"model": "llama", "prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"model": "llama", "prompt": "\\ud800"}',
        b'{"model": "llama", "prompt": "\xff"}',
        b'{"model": "llama", "prompt": "5", "temperature": NaN}',
    ],
    ids=["cut off", "deep", "a deep prompt", "half a character", "no text", "no number"],
)
def test_an_unreadable_body_is_an_error_in_openais_form(server, body):
    """Depth without end, and halves of characters, were once answered as mistakes of the server."""
    request = urllib.request.Request(
        f"{server[1]}/v1/completions", data=body, headers={"Authorization": f"Bearer {KEY}"}
    )
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=10)
    assert raised.value.code == 400
    assert json.load(raised.value)["error"]["type"] == "invalid_request_error"


async def _is_disconnected():
    return False


CONNECTED = SimpleNamespace(is_disconnected=_is_disconnected)


def test_the_state_is_reported_once_more_as_soon_as_a_rank_fails():
    """It came up to a second later, when the server may have ended."""

    async def reports():
        loop, ranks = asyncio.get_running_loop(), SimpleNamespace(failure=None)
        status = SimpleNamespace(to_json=lambda: "{}")
        service = SimpleNamespace(scheduler=ranks, status=status, is_stopping=False)
        response = await app.Service.get_status(service, CONNECTED)
        loop.call_later(0.05, setattr, ranks, "failure", "rank 1 is gone")
        began_s = loop.time()
        return [loop.time() - began_s async for _ in response.body_iterator]

    times_s = asyncio.run(reports())
    assert len(times_s) == 2 and times_s[1] < 0.6


def test_latencies_are_those_that_requests_had():
    report = StatusReport(SimpleNamespace(num_new_tokens=0))
    for seconds in (1.0, 2.0):
        report.observe(seconds, seconds)
    assert report._percentiles()["request_s"] == {"p50": 1.0, "p90": 2.0, "p99": 2.0}


def test_a_mark_of_its_encoding_may_be_before_a_body():
    """PowerShell writes one into files that are then sent."""
    assert protocol.parse(b'\xef\xbb\xbf{"prompt": "5"}') == {"prompt": "5"}


HUGE = {  # 80 kB to 4 MB: more than the server takes, in each place that takes many
    "prompts and choices": ("completions", {"n": 128, "prompt": [[1]] * 20_000}),
    "prompts": ("completions", {"prompt": [[1]] * 200_000}),
    "objects": ("completions", {"prompt": [{}] * 100_000}),
    "fields": ("completions", {"prompt": "5", **{f"x{i}": 1 for i in range(300_000)}}),
    "messages": ("chat/completions", {"messages": [{}] * 1_000_000}),
}


def post(server, path, body):
    """The status of the answer, and its error."""
    request = urllib.request.Request(
        f"{server[1]}/v1/{path}",
        data=json.dumps(body, separators=(",", ":")).encode(),
        headers={"Authorization": f"Bearer {KEY}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, None
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


@pytest.mark.parametrize(("path", "fields"), HUGE.values(), ids=HUGE)
def test_a_huge_request_is_rejected_while_others_are_answered(server, path, fields):
    """80 kB made the server deaf for minutes, and took 5 GiB of its memory."""
    statm = Path(f"/proc/{server[0][0].pid}/statm")

    def memory_nbytes():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = most = memory_nbytes()
    with ThreadPoolExecutor(1) as thread:
        body = {"model": "llama", "max_tokens": 1, **fields}
        answer = thread.submit(post, server, path, body)
        while not answer.done():
            with urllib.request.urlopen(f"{server[1]}/health", timeout=10) as health:
                assert health.status == 200
            most = max(most, memory_nbytes())
            time.sleep(0.01)
    status, error = answer.result()
    assert status == 400 and error["type"] == "invalid_request_error" and error["message"]
    assert max(most, memory_nbytes()) - before < 200 << 20


def test_a_host_that_no_name_has_is_refused():
    """It was a traceback."""
    with pytest.raises(DrumlineError, match="cannot serve at"):
        http_server._bound("a..b", 0)


def test_nine_hundred_half_requests_leave_the_server_reachable(server):
    """Each kept a descriptor, of which a process often has 1024."""
    ranks, url = server
    fds = Path(f"/proc/{ranks[0].pid}/fd")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2048)), hard))
    resource.prlimit(ranks[0].pid, resource.RLIMIT_NOFILE, (1024, hard))
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    with ExitStack() as clients:
        for number in range(900):
            client = clients.enter_context(socket.create_connection(address, timeout=60))
            path = (b"POST /v1/completions", b"GET /health")[number % 2]
            client.sendall(path + b" HTTP/1.1\r\nHost: x\r\n")
        for _ in range(5):
            with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
                assert answer.status == 200
            assert len(list(fds.iterdir())) < 500
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class HeldTokenizer(PreTrainedTokenizerFast):
    """Takes long texts only after `release` is set."""

    def __call__(self, text, **options):
        assert len(text) < 1000 or self.release.wait(60)
        return super().__call__(text[:10], **options)


@pytest.fixture
def held(plain, loaded):
    """A service whose tokenizer is busy with long texts until `tokenizer.release` is set."""
    tokenizer = HeldTokenizer.from_pretrained(plain[1])
    tokenizer.release = threading.Event()
    with closing(app.Service(["llama"], loaded, tokenizer, LIMITS)) as service:
        service.prompts.longest_token = 1000
        yield service
        tokenizer.release.set()


LONG = {"model": "llama", "prompt": "5 " * 40_000, "max_tokens": 1}
SHORT = {"model": "llama", "prompt": "5", "max_tokens": 1}


def test_long_prompts_do_not_keep_a_short_one_waiting(held):
    """They took every thread, for a minute, and 300 MiB each."""

    async def run():
        long = [asyncio.create_task(respond(held, LONG)) for _ in range(40)]
        short = await asyncio.wait_for(respond(held, SHORT), 60)
        assert not any(task.done() for task in long)
        held.tokenizer.release.set()
        return [short, *await asyncio.gather(*long)]

    assert {status for status, _ in asyncio.run(run())} == {200}
    assert held._bodies_nbytes == 0


def test_more_long_bodies_than_the_server_holds_are_refused(held, monkeypatch):
    monkeypatch.setattr(app, "MAX_BODIES_NBYTES", 100_000)

    async def run():
        first = asyncio.create_task(respond(held, LONG))
        while not held._bodies_nbytes:
            await asyncio.sleep(0.01)
        refused, short = await respond(held, LONG), await respond(held, SHORT)
        held.tokenizer.release.set()
        return [refused[0], short[0], (await first)[0], (await respond(held, LONG))[0]]

    assert asyncio.run(run()) == [429, 200, 200, 200]


def test_a_text_of_more_characters_than_the_tokens_can_hold_is_not_tokenized(held):
    del held.prompts.longest_token
    for path, prompt in (
        ("completions", {"prompt": "5" * 20_000}),
        ("chat/completions", {"messages": [{"role": "user", "content": "5" * 20_000}]}),
    ):
        body = {"model": "llama", "max_tokens": 1, **prompt}
        status, text = asyncio.run(respond(held, body, path=path))
        assert status == 400 and "context_length_exceeded" in text


def test_many_validation_errors_are_counted_and_not_listed(server):
    body = {"model": "llama", "messages": [{"role": "user", "content": [{}] * 100}] * 50}
    status, error = post(server, "chat/completions", body)
    assert status == 400 and "5050 errors" in error["message"]


def test_a_prompt_of_too_many_tokens_exceeds_the_context_length(server):
    for prompt in ([5] * 2000, [5] * 2001, [[5] * 20000]):  # with those to come, and by itself
        status, error = post(server, "completions", {"model": "llama", "prompt": prompt})
        assert status == 400 and error["code"] == "context_length_exceeded"


def test_a_request_with_too_many_choices_is_rejected_before_any_is_created(loaded, monkeypatch):
    def fail(*_):
        raise AssertionError("a generation was created")

    monkeypatch.setattr(scheduler, "TokenSampler", fail)
    body = {"model": "llama", "prompt": [[5]] * 40, "n": 2}
    with closing(app.Service(["llama"], loaded, None, LIMITS)) as service:
        status, text = asyncio.run(respond(service, body))
    assert status == 400 and "80 prompts at a time are more than the 64" in text


def test_nothing_is_created_for_a_client_that_has_disconnected(loaded, monkeypatch):
    created = []
    monkeypatch.setattr(scheduler, "TokenSampler", created.append)
    body = {"model": "llama", "prompt": [5]}
    with closing(app.Service(["llama"], loaded, None, LIMITS)) as service:
        status, _ = asyncio.run(respond(service, body, is_disconnected=True))
    assert status == 499 and not created


def test_a_client_with_a_wrong_key_is_rejected(server):
    stranger = openai.OpenAI(base_url=f"{server[1]}/v1", api_key="guess", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError, match="missing or wrong"):
        stranger.models.list()


def test_a_body_that_is_too_large_is_not_read_to_its_end(server):
    request = urllib.request.Request(
        f"{server[1]}/v1/completions",
        data=b" " * (5 << 20),
        headers={"Authorization": f"Bearer {KEY}"},
    )
    with pytest.raises((urllib.error.URLError, ConnectionError)) as raised:
        urllib.request.urlopen(request, timeout=30)
    # The connection may be closed while the body is sent, before the answer is read.
    is_closed = isinstance(getattr(raised.value, "reason", raised.value), ConnectionError)
    assert is_closed or raised.value.code == 413


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_ends_its_generations(server, stream):
    until_none_is_left(server)
    before = metric(server, "drumline_new_tokens_total")
    body = {"model": "llama", "prompt": "15", "n": 4, "max_tokens": 1900, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    with closing(http.client.HTTPConnection(server[1].removeprefix("http://"))) as impatient:
        impatient.request(
            "POST", "/v1/completions", json.dumps({**body, "stream": stream}), headers
        )
        until = time.monotonic() + 60
        while metric(server, "drumline_new_tokens_total") == before:
            assert time.monotonic() < until
    until_none_is_left(server)
    assert metric(server, "drumline_new_tokens_total") - before < 4 * 1900


def test_a_request_that_outlasts_the_grace_period_ends_with_an_error(plain, loaded, monkeypatch):
    """A stream was cut off, without a word, and the log was full of tracebacks."""
    monkeypatch.setattr(loaded.generation_config, "eos_token_id", None)  # it never ends itself
    has_ended, reasons = threading.Event(), []

    def on_end(reason) -> None:
        reasons.append(str(reason))
        has_ended.set()

    tokenizer = PreTrainedTokenizerFast.from_pretrained(plain[1])
    monkeypatch.setattr(timings, "TIMINGS", ModelTimings(drain_s=0))
    service = app.Service(["llama"], loaded, tokenizer, LIMITS)
    with closing(service):
        params = SamplingParams(max_tokens=1900, temperature=0)
        generation = Generation([15], params, lambda _: True, on_end)
        service.scheduler.submit([generation])
        with http_server._monitored(service, SimpleNamespace(should_exit=True)):
            assert has_ended.wait(30)
    assert "is being stopped" in reasons[0] and len(generation.new_tokens) < 1900


def test_a_long_body_that_comes_while_the_server_stops_is_refused_by_503(held, monkeypatch):
    """It was answered as a mistake of the server."""
    monkeypatch.setattr(timings, "TIMINGS", ModelTimings(drain_s=0))
    with http_server._monitored(held, SimpleNamespace(should_exit=True)):
        until = time.monotonic() + 30
        while held.scheduler._closed_by is None and time.monotonic() < until:
            time.sleep(0.01)
    status, text = asyncio.run(respond(held, LONG))
    assert status == 503 and "is being stopped" in text


def test_the_reports_end_as_soon_as_the_server_stops(held):
    """A page that was open kept the server for seconds, and ended with a traceback in its log."""

    async def reports():
        server = SimpleNamespace(should_exit=False)
        response = await held.get_status(CONNECTED)
        with http_server._monitored(held, server):
            await anext(response.body_iterator)
            server.should_exit = True
            return [report async for report in response.body_iterator]

    assert len(asyncio.run(asyncio.wait_for(reports(), 30))) == 1


def test_tokens_are_counted_and_told_while_the_queue_is_full(held, monkeypatch):
    """They were refused, as if they were to wait in it."""

    def refuse(_):
        raise scheduler.ServerBusy("full")

    def answer(handler, body):
        async def stream():
            yield json.dumps(body).encode()

        return asyncio.run(handler(SimpleNamespace(stream=stream)))

    monkeypatch.setattr(held.scheduler, "check_capacity", refuse)
    messages = [{"role": "user", "content": "5 6"}]
    chat = {"model": "llama", "messages": messages, "max_tokens": 1}
    assert answer(held.tokenize, {"prompt": "5 6"})["tokens"] == [5, 6]
    assert answer(held.detokenize, {"tokens": [5, 6]}) == {"prompt": "5 6"}
    assert answer(held.count_tokens, chat) == {"input_tokens": 2}
    with pytest.raises(scheduler.ServerBusy):
        answer(held.create_message, chat)


def test_health_and_metrics_report_the_requests_so_far(server, complete):
    with urllib.request.urlopen(f"{server[1]}/health", timeout=10) as answer:
        assert json.load(answer) == {"status": "ok", "ranks_missing": 0}
    before = metric(server, "drumline_new_tokens_total")
    answer = complete(PROMPTS[1], max_tokens=4)
    assert metric(server, "drumline_new_tokens_total") - before == answer.usage.completion_tokens
    count = metric(server, 'drumline_requests_total{path="/v1/completions",status="200"}')
    assert count >= 1 and metric(server, "drumline_request_seconds_count") >= 1


def test_the_page_needs_no_key_and_holds_nothing_of_the_model(server):
    with urllib.request.urlopen(server[1], timeout=10) as answer:
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        page = answer.read().decode()
    assert "llama" not in page and "://" not in page  # and fetches nothing from elsewhere
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{server[1]}/status", timeout=10)


@pytest.fixture
def reports(server):
    """The reports of the server's page, as they come."""
    headers = {"Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{server[1]}/status", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        yield (json.loads(line.removeprefix(b"data: ")) for line in answer if line.strip())


def test_a_report_has_the_device_map_the_ranks_and_the_load(plain, server, complete, reports):
    complete("5 6 7")
    for report in reports:
        if report["latency"]:
            break
    assert [rank["pid"] for rank in report["ranks"]] == [rank.pid for rank in server[0]]
    assert {rank["state"] for rank in report["ranks"]} == {"alive"}
    modules, free = report["device_map"]
    num_layers = plain[0].config.num_hidden_layers
    assert {f"model.layers.{index}" for index in range(num_layers)} <= {row[0] for row in modules}
    assert {rank for _, rank, _, _ in modules} == {rank for rank, _, _ in free} == {0, 1}
    assert all({"tokens_per_s", "num_waiting"} <= sample.keys() for sample in report["samples"])
    assert report["latency"]["request_s"]["p50"] >= report["latency"]["first_token_s"]["p50"] > 0


NAMES = "[...document.querySelectorAll('[data-module]')].map(part => part.dataset.module)"
RANKS = "document.getElementById('ranks').innerText"
needs_browser = pytest.mark.skipif(
    Chromium.PROGRAM is None, reason="runs after `apt install chromium`"
)


@pytest.fixture
def browser(server, tmp_path):
    """A browser that shows the server's page; None where none is installed."""
    if Chromium.PROGRAM is None:
        yield None
        return
    with Chromium(str(tmp_path)) as browser:
        browser.open(server[1])
        browser.wait_for("!document.getElementById('key-line').hidden")
        browser.evaluate(f"document.getElementById('key').value = {KEY!r}")
        browser.evaluate("document.getElementById('use-key').click()")
        browser.wait_for(f"{NAMES}.length > 0 && {RANKS}")
        yield browser


@needs_browser
def test_the_page_in_a_browser_shows_the_map_and_streams_an_answer(plain, server, browser):
    num_layers = plain[0].config.num_hidden_layers
    names = browser.evaluate(NAMES)
    assert {f"model.layers.{index}" for index in range(num_layers)} <= set(names)
    assert all(f"pid {rank.pid}" in browser.evaluate(RANKS) for rank in server[0])
    browser.evaluate("document.getElementById('prompt').value = '5 6 7'")
    browser.evaluate("document.getElementById('max-tokens').value = 4")
    browser.evaluate("document.getElementById('send').click()")
    text = "document.getElementById('answer').innerText"
    browser.wait_for(f"{text}.trim()")  # sampled, so it may end soon


@needs_browser
def test_the_page_reads_on_in_a_stream_that_waited(browser):
    """The lines in between were read as events, and the answer stayed empty."""
    stream = "new Response('\\n\\n\\ndata: 5\\n\\n\\ndata: 6\\n\\n')"
    browser.evaluate(f"texts = []; eachEvent({stream}, text => texts.push(text)); 0")
    assert browser.wait_for("texts.length > 1 && texts") == ["5", "6"]


def test_the_death_of_a_rank_is_status_503_and_the_end_of_the_server(
    server, client, reports, browser
):
    ranks, _ = server
    assert next(reports)["ranks"][1]["state"] == "alive"
    request = {"model": "llama", "prompt": "15", "n": 4, "temperature": 0, **ENDLESS}
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(client.completions.create, **request)
        while not metric(server, "drumline_requests_running"):
            pass
        ranks[1].kill()
        if browser is not None:
            browser.wait_for(f"{RANKS}.includes('killed') || {RANKS}.includes('SIGKILL')")
        error = answer.exception(timeout=30)
    assert isinstance(error, openai.InternalServerError) and error.status_code == 503
    assert error.code == "server_unavailable"
    assert f"rank 1 (host {socket.gethostname()}, pid {ranks[1].pid}, " in error.body["message"]
    assert "rank 1" in list(reports)[-1]["ranks"][1]["state"]
    assert ranks[0].wait(timeout=30) == 1
    assert "rank 1" in ranks[0].stderr.read()
