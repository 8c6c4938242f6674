"""OpenAI's own client at a server of 2 ranks. The last test ends it."""

import importlib
import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import launcher
from coordinator import Coordinator
from drumline.serving.sampling import Sampling
from drumline.serving.scheduler import Batcher, Limits, Row
from launcher.timings import TIMINGS

openai = pytest.importorskip("openai", reason="runs after `pip install openai fastapi uvicorn`")
pytest.importorskip("uvicorn", reason="runs after `pip install openai fastapi uvicorn`")
serve = importlib.import_module("drumline.serving.server")  # which is a function's name too
Service = importlib.import_module("drumline.serving.app").Service

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
KEY = "a key of the tests"
LONG = Limits(max_length=2000)
PROMPTS = ["5 6 7", "11 12 13 14 15 16", "40", "9 8 7 6 5 4 3 9 8"]


@pytest.fixture(scope="module")
def plain(checkpoints):
    """The model in this process, beside its directory with a tokenizer of 64 words."""
    model, path = checkpoints.llama()
    names = ["nothing", "begin", "end", *map(str, range(3, 64))]
    words = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="nothing"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "nothing", "bos_token": "begin", "eos_token": "end"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return model, path


@pytest.fixture(scope="module")
def server(plain, warm, tmp_path_factory):
    """The processes of the ranks, and the address of what they serve."""
    key_file = tmp_path_factory.mktemp("serve") / "key"
    key_file.write_text(f"{KEY}\n")
    options = ["--port", "0", "--api-key-file", key_file, "--max-length", "100"]
    limits = ["--max-running", "6", "--max-waiting", "8"]
    command = ["-m", "drumline", "serve", "--model", plain[1], "--memory", "1GiB"]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks, launch_id = [], f"serve-{os.getpid()}"
    for rank in range(2):
        info = launcher.LaunchInfo(launch_id, 2, 2, rank, rank, "127.0.0.1", port)
        environ = {**os.environ, **info.to_env()}
        ranks.append(warm.start(*command, "1GiB", *options, *limits, env=environ, cwd=ROOT))
    said = ranks[0].stdout.readline()
    try:
        yield ranks, re.search(r"serving llama at (http://127\.0\.0\.1:\d+)/v1", said)[1]
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


def expected(plain, prompt, num_new=12):
    """Greedy tokens of one process, as text, and how they end."""
    tokens = torch.tensor([[int(word) for word in prompt.split()]])
    found = plain[0].generate(tokens, max_new_tokens=num_new, do_sample=False)[0].tolist()
    new = found[tokens.shape[1] :]
    end = "stop" if 2 in new else "length"
    return " ".join(str(n) for n in new if n > 2), end


def test_the_model_is_listed_by_its_name(client):
    (card,) = client.models.list().data
    assert card.id == "llama" and client.models.retrieve("llama").id == "llama"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_completion_is_what_one_process_says(plain, complete, prompt):
    answer = complete(prompt)
    text, end = expected(plain, prompt)
    assert answer.choices[0].text.strip() == text and answer.choices[0].finish_reason == end
    assert answer.usage.prompt_tokens == len(prompt.split())


def test_tokens_are_a_prompt_too_and_so_are_several(plain, complete):
    answer = complete([[5, 6, 7], [40]])
    said = [choice.text.strip() for choice in answer.choices]
    assert said == [expected(plain, prompt)[0] for prompt in ("5 6 7", "40")]


def test_a_chat_goes_through_the_template(plain, client):
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


def test_clients_at_the_same_time_share_batches_and_get_what_each_gets_alone(
    plain, server, complete
):
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(complete, PROMPTS[:3] * 4))
    said = [answer.choices[0].text.strip() for answer in answers]
    assert said == [expected(plain, prompt)[0] for prompt in PROMPTS[:3]] * 4
    assert metric(server, "drumline_largest_batch") > 1


def test_a_short_request_does_not_wait_for_long_ones_that_came_before(
    plain, server, client, complete
):
    """The server has two threads, and each of the long ones is all that one of them does."""
    long = ["15", "17"]
    asked = {"model": "llama", "max_tokens": 95, "temperature": 0, "stream": True}
    streams = [iter(client.completions.create(prompt=prompt, **asked)) for prompt in long]
    said = [next(stream).choices[0].text for stream in streams]
    assert complete("5 6 7").choices[0].text.strip() == expected(plain, "5 6 7")[0]
    assert metric(server, "drumline_requests_running") == 2
    later = [[chunk.choices[0].text for chunk in stream] for stream in streams]
    for prompt, first, rest in zip(long, said, later, strict=True):
        assert (first + "".join(rest)).strip() == expected(plain, prompt, 95)[0]


def test_each_row_of_a_batch_samples_as_it_was_asked_to(complete):
    def ask(options):
        return complete("5 6 7", **options).choices[0].text

    wishes = [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 1},
        {"temperature": 1.5, "seed": 2},
        {"temperature": 1.5, "seed": 3, "extra_body": {"top_k": 1}},
        {"temperature": 1.5, "seed": 4, "top_p": 1e-6},
    ]
    alone = [ask(wish) for wish in wishes]
    with ThreadPoolExecutor(5) as threads:
        assert list(threads.map(ask, wishes)) == alone
    assert len(set(alone)) == 3 and alone[0] == alone[3] == alone[4]


def test_choices_differ_and_a_seed_brings_them_back(complete):
    first, again = (
        [c.text for c in complete("5 6 7", n=3, temperature=1.5, seed=7).choices] for _ in range(2)
    )
    assert first == again and len(set(first)) == 3


def test_text_ends_before_a_stop(plain, complete):
    words = expected(plain, PROMPTS[1])[0].split()
    stop = f"{words[3]} {words[4]}"
    before = expected(plain, PROMPTS[1])[0].partition(stop)[0]
    choice = complete(PROMPTS[1], stop=[stop, "never"]).choices[0]
    assert choice.text.strip() == before.strip() and choice.finish_reason == "stop"


def test_a_penalty_keeps_tokens_from_coming_again(complete):
    punished, free = (
        complete("5 6 7", presence_penalty=size, frequency_penalty=size, max_tokens=20)
        for size in (2, 0)
    )
    most = [Counter(each.choices[0].text.split()).most_common(1)[0][1] for each in (punished, free)]
    assert most[0] < most[1]


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"model": "gpt"}, openai.NotFoundError, "'gpt' is not served here"),
        ({"max_tokens": 99}, openai.BadRequestError, "more than the 100"),
        ({"prompt": ""}, openai.BadRequestError, "no tokens"),
        ({"prompt": []}, openai.BadRequestError, "no tokens"),
        ({"prompt": [70]}, openai.BadRequestError, "70 is no token"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"logprobs": 2}, openai.BadRequestError, "logprobs is not supported"),
        ({"prompt": ["5"] * 9}, openai.BadRequestError, "more than the 8"),
        ({"prompt": [5, "x"]}, openai.BadRequestError, r"prompt.list\[str\].0: .* valid string"),
    ],
)
def test_what_cannot_be_answered_is_an_error_of_openais_form(client, options, kind, said):
    asked = {"model": "llama", "prompt": "5 6", "max_tokens": 3, **options}
    with pytest.raises(kind, match=said) as raised:
        client.completions.create(**asked)
    assert raised.value.body["message"] and raised.value.body["type"]


def test_who_finds_too_many_in_line_is_told_to_come_again(complete):
    def ask(_):
        try:
            return complete("15", n=8, max_tokens=95).choices[7].finish_reason
        except openai.RateLimitError as error:
            return re.search("limit of 8", str(error))[0]

    with ThreadPoolExecutor(10) as threads:
        assert {*threads.map(ask, range(10))} == {"length", "limit of 8"}


def test_fields_that_ask_for_nothing_are_as_good_as_none(complete):
    """Some clients send all the fields they know."""
    nothing = {"echo": False, "best_of": 1, "suffix": None, "logit_bias": {}, "logprobs": None}
    chats = {"metadata": {}, "tool_choice": "none", "tools": [], "service_tier": "auto"}
    stream = complete(
        "5 6 7",
        **nothing,
        extra_body={**chats, "top_logprobs": 0, "modalities": ["text"]},
        stream=True,
        stream_options={"include_obfuscation": False},
    )
    said = "".join(chunk.choices[0].text for chunk in stream)
    assert said == complete("5 6 7").choices[0].text


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
def test_a_body_that_makes_no_sense_is_an_error_of_openais_form(server, body):
    """Depth without end, and halves of characters, were once answered as mistakes of the server."""
    request = urllib.request.Request(
        f"{server[1]}/v1/completions", data=body, headers={"Authorization": f"Bearer {KEY}"}
    )
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=10)
    assert raised.value.code == 400
    assert json.load(raised.value)["error"]["type"] == "invalid_request_error"


def test_who_does_not_know_the_key_is_told_so(server):
    stranger = openai.OpenAI(base_url=f"{server[1]}/v1", api_key="guess", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError, match="missing or wrong"):
        stranger.models.list()


def test_a_body_that_never_ends_is_not_read_to_its_end(server):
    request = urllib.request.Request(
        f"{server[1]}/v1/completions",
        data=b" " * (5 << 20),
        headers={"Authorization": f"Bearer {KEY}"},
    )
    with pytest.raises((urllib.error.HTTPError, ConnectionError)) as raised:
        urllib.request.urlopen(request, timeout=10)
    assert getattr(raised.value, "code", 413) == 413


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_stops_what_runs_for_it(plain, server, stream):
    prompt, num_new = "15", 95
    assert expected(plain, prompt, num_new)[1] == "length"
    before = metric(server, "drumline_new_tokens_total")
    impatient = openai.OpenAI(base_url=f"{server[1]}/v1", api_key=KEY, max_retries=0)
    asked = {"model": "llama", "prompt": prompt, "max_tokens": num_new, "temperature": 0, "n": 4}
    with impatient:
        if stream:
            answer = impatient.completions.create(**asked, stream=True)
            next(iter(answer))
            answer.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                impatient.completions.create(**asked, timeout=0.15)
    until = time.monotonic() + 10
    while metric(server, "drumline_requests_running") and time.monotonic() < until:
        time.sleep(0.05)
    assert metric(server, "drumline_requests_running") == 0
    assert metric(server, "drumline_new_tokens_total") - before < 4 * num_new


def test_a_row_that_fails_ends_alone(plain):
    """Scores that are no numbers, or a text that cannot be made, ended all rows of the batch."""
    new, how, all_there = [], [], threading.Barrier(2)

    def hear(token: int) -> bool:
        new.append(token)
        return True

    def fail(_: int) -> bool:
        raise ValueError("no text")

    wild = Sampling(max_tokens=9, temperature=float("nan"))
    rows = [
        Row([5], Sampling(max_tokens=9, temperature=0), fail, how.append),
        Row([5], wild, hear, how.append),
        Row([5, 6, 7], Sampling(max_tokens=9, temperature=0), hear, lambda end: all_there.wait(30)),
    ]
    batcher = Batcher(plain[0], Limits(max_length=100))
    batcher.submit(rows)
    all_there.wait(30)
    batcher.close()
    assert [type(error) for error in how] == [RuntimeError, ValueError]
    assert " ".join(map(str, new)) == expected(plain, "5 6 7", 9)[0] and batcher.largest_batch == 3


def test_what_runs_for_a_client_that_reads_nothing_ends_with_the_server(plain):
    """It ran to its last token before the server ended, which the launcher did not wait for."""
    began, how = threading.Event(), []

    def hear(_: int) -> bool:
        began.set()
        return True

    batcher = Batcher(plain[0], LONG)
    row = Row([15], Sampling(max_tokens=1900, temperature=0), hear, how.append)
    batcher.submit([row])
    assert began.wait(30)
    batcher.close()
    assert "is being stopped" in str(how[0]) and len(row.new) < 1900


def test_who_waits_when_the_grace_is_over_hears_that_the_server_ends(plain, monkeypatch):
    """A stream was cut off, without a word, and the log was full of tracebacks."""
    monkeypatch.setattr(serve, "GRACE_S", 0)
    monkeypatch.setattr(plain[0].generation_config, "eos_token_id", None)  # it goes on and on
    has_ended, how = threading.Event(), []

    def end(why) -> None:
        how.append(str(why))
        has_ended.set()

    tokenizer = PreTrainedTokenizerFast.from_pretrained(plain[1])
    with Coordinator() as coor, closing(Service("llama", plain[0], tokenizer, LONG)) as service:
        row = Row([15], Sampling(max_tokens=1900, temperature=0), lambda _: True, end)
        service.batcher.submit([row])
        with serve._watching(coor, service, SimpleNamespace(should_exit=True)):
            assert has_ended.wait(30)
    assert "is being stopped" in how[0] and len(row.new) < 1900


def test_who_waits_hears_that_the_server_ends_before_an_engines_launcher_kills_it():
    """Answers had five seconds to end, as many as the launcher grants before it kills."""
    assert TIMINGS.backend_grace_s > serve.GRACE_S + serve.WATCH_S + serve.REGRET_S


def test_health_and_metrics_tell_what_was_done(server, complete):
    with urllib.request.urlopen(f"{server[1]}/health", timeout=10) as answer:
        assert json.load(answer) == {"status": "ok"}
    before = metric(server, "drumline_new_tokens_total")
    answer = complete(PROMPTS[1], max_tokens=4)
    assert metric(server, "drumline_new_tokens_total") - before == answer.usage.completion_tokens
    count = metric(server, 'drumline_requests_total{path="/v1/completions",status="200"}')
    assert count >= 1 and metric(server, "drumline_request_seconds_count") >= 1


def test_a_rank_that_dies_is_an_answer_of_500_and_the_end_of_the_server(server, client):
    ranks, _ = server
    asked = {"model": "llama", "prompt": "15", "max_tokens": 95, "n": 4, "temperature": 0}
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(client.completions.create, **asked)
        time.sleep(0.1)
        ranks[1].kill()
        error = answer.exception(timeout=10)
    assert isinstance(error, openai.InternalServerError) and error.status_code == 500
    assert f"rank 1 (host {socket.gethostname()}, pid {ranks[1].pid})" in error.body["message"]
    assert ranks[0].wait(timeout=10) == 1
    assert "rank 1" in ranks[0].stderr.read()
