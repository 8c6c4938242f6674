"""A server whose processes are killed and suspended at random moments, as its clients see it."""

import itertools
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

import launcher

ROOT = Path(__file__).parents[4]
NUM_CLIENTS, NUM_KILLS = 8, 40
PROMPTS = ["5 6 7", "11 12 13 14 15 16", "40", "9 8 7 6 5 4 3 9 8"]
SAMPLINGS = [
    {"temperature": 0},
    {"temperature": 0, "stop": ["17 3"], "repetition_penalty": 1.1},
    {"temperature": 1.2, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "presence_penalty": 0.5, "n": 2},
]
REQUESTS = [
    {
        "model": "llama",
        "prompt": prompt,
        "max_tokens": 60,
        "ignore_eos": len(prompt) < 10,
        "stream": stream,
        **sampling,
    }
    for prompt, sampling, stream in itertools.product(PROMPTS, SAMPLINGS, (False, True))
]


class Server:
    """`drumline serve`, below which any process may be killed at any time."""

    def __init__(self, path, *options):
        command = [sys.executable, "-m", "drumline", "serve", "--model", path, "-n", "2", "--port"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [*command, "0", *options], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environ
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

    def complete(self, body):
        """The text of each choice of a request."""
        texts = [""] * body.get("n", 1)
        with self.open("/v1/completions", body) as answer:
            lines = [line for line in answer if line.strip() and not line.startswith(b": ")]
        if body["stream"]:
            assert lines.pop() == b"data: [DONE]\n"
        for line in lines:
            for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                texts[choice["index"]] += choice["text"]
        return texts


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_request_is_lost_and_none_changes(plain):
    """Ranks, and the fork server, go at any moment: each second one while ranks generate."""
    server = Server(plain[1], "--restarts", "1000", "--max-length", "200")
    try:
        expected = [server.complete(request) for request in REQUESTS]
        has_ended, rng, num_answers = threading.Event(), random.Random(0), itertools.count()

        def be_a_client(number):
            requests = random.Random(number)
            while not has_ended.is_set():
                index = requests.randrange(len(REQUESTS))
                assert server.complete(REQUESTS[index]) == expected[index], REQUESTS[index]
                next(num_answers)

        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            clients = [threads.submit(be_a_client, number) for number in range(NUM_CLIENTS)]
            for number in range(NUM_KILLS):
                while number % 2 and not server.is_ready():
                    time.sleep(0.1)
                time.sleep(rng.uniform(0, 2))
                while not (processes := sorted(launcher.linux.descendants(server.process.pid))):
                    time.sleep(0.05)
                launcher.linux.send_signal(
                    rng.choice(processes), rng.choice((signal.SIGKILL, signal.SIGSTOP))
                )
            has_ended.set()
            for client in clients:
                client.result()
        with server.open("/metrics") as answer:
            num_restarts = re.search(
                r"^drumline_restarts_total (.*)$", answer.read().decode(), re.M
            )
        assert float(num_restarts[1]) > 0 and next(num_answers) >= NUM_CLIENTS
        children = launcher.linux.descendants(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert not any(map(launcher.linux.process_stat, children))
    finally:
        server.process.kill()
        server.process.wait()
