"""The ranks behind a front: rank 0 takes sequences from it, and sends their tokens.

args = (address, [2], 0, {"model_path": "checkpoint", "max_length": 4096})
launcher.start(serve_front, nprocs=2, args=args)
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections.abc import Sequence
from typing import Any

import launcher
from coordinator import Coordinator
from drumline.core.consistency import run_on_all_ranks
from drumline.errors import PeerLost
from drumline.planner.memory import sizes_of_ranks
from drumline.serving import http_server
from drumline.serving.front.json_lines import hang_up, messages, to_line
from drumline.serving.front.remote_scheduler import Message
from drumline.serving.grammar import GrammarCompiler
from drumline.serving.one_by_one import Prompt
from drumline.serving.sampling import SamplingParams
from drumline.serving.scheduler import (
    PAGE_SIZE,
    BatchScheduler,
    Generation,
    ServerStopping,
    ServingLimits,
)
from drumline.strategies.with_model import read_model_tokenizer


def serve_front(
    address: str, ranks_of_nodes: Sequence[int], node_rank: int, options: dict[str, Any]
) -> None:
    """Load the model over all ranks, and generate what the front asks for until it leaves.

    Collective. address: of the front's abstract socket (unix(7)) on rank 0's host. ranks_of_nodes:
    on all machines of the server, also those that are gone, of which this one is node_rank.
    options: as in http_server.serve(); memory is of all these ranks, or one size. Rank 0 decides
    ranks_of_nodes, memory and max_length.

    Raises PeerLost when a rank is lost, and PlanError where memory is of another number of ranks.
    """
    settings = http_server.ServerSettings.of(**options)
    # The front decides when the ranks end, so that they do not obey the signal themselves.
    with launcher.stop_signals.handled_by(lambda _: None), Coordinator() as coor:
        connection = run_on_all_ranks(coor, lambda: _connected(address, coor))
        length = coor.broadcast_object(settings.max_length)
        sizes = _memory_of_ranks(coor, ranks_of_nodes, node_rank, settings.memory)
        with (
            connection or contextlib.nullcontext(),
            settings.load(settings.model_path, coor, sizes, length) as model,
        ):
            assert connection is not None  # the other ranks never leave load()
            limits = http_server.limits_for(model, length, settings)
            read_tokenizer = functools.partial(
                read_model_tokenizer, settings.model_path, **settings.load_options
            )
            RankWorker(connection, coor, model, limits, read_tokenizer).run()


def _memory_of_ranks(
    coor: Coordinator, ranks_of_nodes: Sequence[int], node_rank: int, memory: Any
) -> list[str] | None:
    """The size of each rank that is here."""
    counts, memory = coor.broadcast_object((ranks_of_nodes, memory))
    sizes = sizes_of_ranks(memory, sum(counts))
    numbers = coor.allgather_object(sum(counts[:node_rank]) + coor.local_rank)
    return sizes and [sizes[number] for number in numbers]


def _connected(address: str, coor: Coordinator) -> socket.socket | None:
    if not coor.is_master():
        return None
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"\0{address}")
    return connection


class RankWorker:
    """Rank 0's end of the connection to the front."""

    def __init__(
        self,
        connection: socket.socket,
        coor: Coordinator,
        model: Any,
        limits: ServingLimits,
        read_tokenizer: Any,
    ) -> None:
        self._connection, self._coor, self._read_tokenizer = connection, coor, read_tokenizer
        self._send_lock = threading.Lock()
        self._running: dict[int, Generation] = {}
        self._scheduler = BatchScheduler(model, limits, lambda _: hang_up(connection))

    def run(self) -> None:
        """Generate until the front leaves. Raises PeerLost if a rank is lost."""
        failures = http_server.ended_by_failures(self._scheduler, self._coor)
        with contextlib.closing(self._scheduler), failures:
            names = "vocabulary", "device_map", "peers"
            info = {name: getattr(self._scheduler, name) for name in names}
            self._send({**info, "end_tokens": sorted(self._scheduler.end_tokens)})
            for message in messages(self._connection):
                self._receive(message)
        if self._scheduler.failure is not None:
            raise self._scheduler.failure

    def _send(self, message: Message) -> None:
        with contextlib.suppress(OSError), self._send_lock:  # the front has left
            self._connection.sendall(to_line(message))

    def _receive(self, message: Message) -> None:
        if "cancel" in message:
            if item := self._running.pop(message["cancel"], None):
                item.cancel()
            return
        for sequence in message["start"]:
            try:
                self._start(sequence)
            except Exception as error:  # of this sequence, such as one of its grammar
                self._send_error(sequence["id"], error)

    def _send_error(self, number: int, error: Exception) -> None:
        """Send an error that ends a sequence, unless other ranks can continue it."""
        if not isinstance(error, (PeerLost, ServerStopping)):
            self._send({"id": number, "error": str(error) or repr(error)})

    def _start(self, sequence: Message) -> None:
        number, text = sequence["id"], sequence["grammar"]

        def on_token(token: int) -> bool:
            message: Message = {"id": number, "token": token, "logprob": item.sampler.logprob}
            if len(item.new_tokens) == 1:
                message |= {"prompt_logprobs": item.prompt_logprobs, "num_cached": item.num_cached}
            if len(item.new_tokens) % PAGE_SIZE == 1:
                own = self._scheduler
                message["load"] = [own.num_running, own.pool_usage, own.largest_batch]
            self._send(message)
            return True

        def on_end(reason: str | Exception) -> None:
            self._running.pop(number, None)
            if reason == "stop":  # by a token that ends sequences, for which on_token is not called
                on_token(item.new_tokens[-1])
            elif isinstance(reason, Exception):
                self._send_error(number, reason)

        grammar = None if text is None else self._grammars.compiled(text)
        prompt = Prompt(sequence["prompt"], sequence["inputs"])
        ends, params = self._scheduler.end_tokens, SamplingParams(**sequence["params"])
        item = Generation(prompt, params, on_token, on_end, ends, grammar)
        item.resume(sequence["new_tokens"])
        self._running[number] = item
        self._scheduler.submit([item])

    @functools.cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self._read_tokenizer(), self._scheduler.vocabulary)
