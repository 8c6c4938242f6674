"""A server with random requests, whose processes may go at random moments, as its clients see it.

SOAK_SEEDS=3 make soak TESTS=tests/drumline/serving/front/test_kills.py

Each text is that of transformers alone, or parts from it where the best two tokens are as good:
these are counted and printed.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

import launcher
from drumline.serving.protocol import CompletionRequest
from drumline.serving.sampling import TokenSampler

ROOT = Path(__file__).parents[4]
NUM_REQUESTS, NUM_CLIENTS, NUM_KILLS = 1000, 24, 40
SEEDS = range(int(os.environ.get("SOAK_SEEDS", "1")))
AS_GOOD = 1e-4  # of the logits of two tokens
BEGINNINGS = [[3 + (7 * n + seed) % 60 for n in range(64 + 30 * seed)] for seed in range(3)]
GREEDY = [
    *({}, {}, {"ignore_eos": True}, {"n": 2, "ignore_eos": True}, {"min_tokens": 6}),
    *({"stop": ["17 3", " 4"]}, {"stop": [" 25", " 36", " 47"]}, {"stop_token_ids": [30, 31, 32]}),
    *({"logit_bias": {"9": 5.0, "11": -100.0}}, {"repetition_penalty": 1.3}),
]
OTHERS = [
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "temperature": 0},
    {"temperature": 1.2, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "n": 2},
]


def random_request(rng):
    own = [rng.randrange(3, 64) for _ in range(rng.choice((1, 3, 20, 150)))]
    return {
        "model": "llama",
        "prompt": " ".join(map(str, [*rng.choice([[], [], *BEGINNINGS]), *own])),
        "max_tokens": rng.randrange(6, 60),
        "stream": rng.random() < 0.5,
        **rng.choice([*({"temperature": 0, **options} for options in GREEDY), *OTHERS]),
    }


class Alone:
    """transformers in this process; what it does not have is the server's sampler on its logits."""

    def __init__(self, model, path):
        self.model, self.tokenizer = model, AutoTokenizer.from_pretrained(path)

    def answer(self, body):
        """Of each choice, the text, and how much better the best token was than the next."""
        request = CompletionRequest.model_validate(body)
        return [self._choice(request, number) for number in range(request.n)]

    def _choice(self, request, number):
        prompt = self.tokenizer(request.prompt)["input_ids"]
        params = request.sampling_params(request.max_tokens, number, {}, 2)
        ends = params.stop_tokens | (set() if params.ignore_eos else {2})
        is_own = request.temperature == 0 and not request.presence_penalty
        settings = GenerationConfig(
            max_new_tokens=params.max_tokens,
            eos_token_id=[*ends] or [64],
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        if is_own:
            bias = {(token,): value for token, value in params.logit_bias}
            settings.update(
                min_new_tokens=params.min_tokens,
                repetition_penalty=params.repetition_penalty,
                sequence_bias=bias or None,
            )
        sampler, row = TokenSampler(params, prompt, ends), torch.tensor([prompt])

        def choose(_, scores):
            token = torch.tensor([sampler.sample(scores[0])])
            return torch.full_like(scores, -torch.inf).index_fill_(1, token, 0)

        output = self.model.generate(
            row,
            attention_mask=torch.ones_like(row),
            generation_config=settings,
            logits_processor=[] if is_own else [choose],
        )
        best = [scores[0].topk(2).values for scores in output.scores]
        tokens = output.sequences[0].tolist()
        text = self._text(tokens[: len(tokens) - (tokens[-1] in ends)])[len(self._text(prompt)) :]
        starts = [text.find(stop) for stop in params.stop if stop in text]
        return text[: min(starts, default=None)], [float(two[0] - two[1]) for two in best]

    def _text(self, tokens):
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


class Server:
    """A module that serves, below which any process may be killed at any time."""

    def __init__(self, *arguments):
        command = [sys.executable, "-m", *arguments]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environ
        )
        self.url = re.search(r"http://[\d.:]+", self.process.stdout.readline())[0]

    def open(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.urlopen(
            urllib.request.Request(self.url + path, data=data), timeout=300
        )

    def is_ready(self):
        with self.open("/health") as answer:
            return json.load(answer)["status"] == "ok"

    def metric(self, name):
        with self.open("/metrics") as answer:
            return float(re.search(rf"^{name} (.*)$", answer.read().decode(), re.M)[1])

    def complete(self, body, num_lines=None):
        """The text of each choice; of a client that leaves after some lines, what it has read."""
        texts = [""] * body.get("n", 1)
        with self.open("/v1/completions", body) as answer:
            for line in answer:
                if line.startswith((b"data: {", b"{")):
                    for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                        texts[choice["index"]] += choice["text"]
                    num_lines = num_lines and num_lines - 1
                if num_lines == 0:
                    break
        return texts


@contextlib.contextmanager
def serving(*arguments):
    server = Server(*arguments)
    try:
        yield server
        children = launcher.linux.descendants(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert not any(map(launcher.linux.process_stat, children))
    finally:
        server.process.kill()
        server.process.wait()


def differs_at_a_tie(found, wanted, has_left):
    """True if a text parts from the wanted one where two tokens are as good; asserts that it does
    not elsewhere."""
    text, gaps = wanted
    if found == text or (has_left and text.startswith(found)):
        return False
    words = zip(found.split(), text.split(), strict=False)
    place = next((i for i, pair in enumerate(words) if len({*pair}) == 2), 0)
    assert min(gaps[: place + 2]) < AS_GOOD, (found, text, min(gaps))
    return True


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("options", [("-n", "1"), ("-n", "2"), ("-n", "2", "--restarts", "1")])
def test_texts_in_every_mixture_are_those_of_transformers_alone(plain, options, seed):
    """Lengths, stops, n, bias, penalties, seeds, shared beginnings, and clients that leave."""
    rng = random.Random(seed)
    requests = [random_request(rng) for _ in range(NUM_REQUESTS)]
    lines = [rng.randrange(1, 20) if rng.random() < 0.15 else None for _ in requests]
    command = ("drumline", "serve", "--model", plain[1], "--port", "0", "--max-length", "400")
    with (
        serving(*command, "--max-running", "10", *options) as server,
        ThreadPoolExecutor(NUM_CLIENTS) as threads,
    ):
        answers = list(threads.map(server.complete, requests, lines))
    alone, num_at_ties = Alone(*plain), 0
    for request, left, found in zip(requests, lines, answers, strict=True):
        for pair in zip(found, alone.answer(request), strict=True):
            num_at_ties += differs_at_a_tie(*pair, has_left=left is not None)
    print(f"{NUM_REQUESTS} requests, {num_at_ties} texts part where two tokens are as good")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_request_is_lost_and_none_changes(plain, seed):
    """Ranks, and the fork server, go at any moment: each second one while ranks generate. There
    are pages for few tokens, so that sequences are put back, too."""
    rng, alone = random.Random(seed), Alone(*plain)
    requests = [random_request(rng) for _ in range(40)]
    expected = [alone.answer(request) for request in requests]
    has_ended, num_at_ties = threading.Event(), []
    with serving("tests.programs.few_pages", plain[1]) as server:

        def be_a_client(number):
            chosen = random.Random(number)
            while not has_ended.is_set():
                index = chosen.randrange(len(requests))
                found = server.complete(requests[index])
                for pair in zip(found, expected[index], strict=True):
                    num_at_ties.append(differs_at_a_tie(*pair, has_left=False))

        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            clients = [threads.submit(be_a_client, number) for number in range(NUM_CLIENTS)]
            try:
                _kill_at_random(server, rng)
            finally:
                has_ended.set()
            for client in clients:
                client.result()
        print(f"{len(num_at_ties)} texts, {sum(num_at_ties)} part where two tokens are as good")
        assert server.metric("drumline_restarts_total") > 0 and len(num_at_ties) >= NUM_CLIENTS


def _kill_at_random(server, rng):
    for number in range(NUM_KILLS):
        while number % 2 and not server.is_ready():
            time.sleep(0.1)
        time.sleep(rng.uniform(0, 2))
        while not (processes := sorted(launcher.linux.descendants(server.process.pid))):
            time.sleep(0.05)
        number = rng.choice((signal.SIGKILL, signal.SIGSTOP))
        launcher.linux.send_signal(rng.choice(processes), number)
