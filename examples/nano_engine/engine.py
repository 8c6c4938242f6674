"""An inference engine with tensor parallelism and continuous batching, on the three lower layers.

The launcher starts the ranks, rank 0's Coordinator tells the others what to compute next, and the
Communicator moves the tensors of the layers (llama.py). Every rank samples for itself: the logits
have the same bits everywhere.

drumline run -n 2 examples/nano_engine/engine.py CHECKPOINT 12,7,99 4,8
drumline run -n 2 examples/nano_engine/engine.py CHECKPOINT "Once upon a time"
"""

import contextlib
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
from llama import Llama

from communicator import Communicator
from coordinator import Coordinator

STOP = None  # the plan after the last one


@dataclass
class Request:
    """A prompt, and what was generated for it so far."""

    prompt: list[int]
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)


class Scheduler:
    """Rank 0's choice of what to compute next: waiting requests first, into slots that are free."""

    def __init__(self, slots: int, length: int, ends: frozenset[int] = frozenset()) -> None:
        self.free, self.length, self.ends = list(range(slots)), length, ends
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # by slot

    def add(self, request: Request) -> None:
        counts = len(request.prompt), request.max_new_tokens
        if min(counts) < 1 or sum(counts) > self.length:
            raise ValueError(
                f"{counts[0]} tokens and {counts[1]} new ones: needs one of each at least, and "
                f"{self.length} together at most. Start the engine with a larger length=."
            )
        self.waiting.append(request)

    def plan(self) -> list[list[int]] | None:
        """The slots, first positions and tokens of the next pass; STOP if nothing is left."""
        if self.waiting and self.free:
            slot, request = self.free.pop(), self.waiting.popleft()
            self.running[slot] = request
            return [[slot], [0], request.prompt]
        if not self.running:
            return STOP
        slots, requests = list(self.running), self.running.values()
        positions = [len(request.prompt) + len(request.tokens) - 1 for request in requests]
        return [slots, positions, [request.tokens[-1] for request in requests]]

    def take(self, slots: list[int], tokens: list[int]) -> None:
        """Give each slot's request its next token, and free the slots of those that are done."""
        for slot, token in zip(slots, tokens, strict=True):
            request = self.running[slot]
            request.tokens.append(token)
            if len(request.tokens) == request.max_new_tokens or token in self.ends:
                del self.running[slot]
                self.free.append(slot)


class DecodeGraph:
    """A CUDA graph of the pass that gives each of some sequences its next token."""

    def __init__(self, model: Llama, *inputs: torch.Tensor) -> None:
        """Capture it. The same pass has run outside before, as the Communicator needs."""
        self.inputs, self.graph = inputs, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.hidden = model.hidden(*inputs, whole=True)

    def replay(self, *inputs: torch.Tensor) -> torch.Tensor:
        for own, new in zip(self.inputs, inputs, strict=True):
            own.copy_(new)
        self.graph.replay()
        return self.hidden


class Engine:
    """slots: sequences that are generated at once. length: the most tokens of one.

    Close it before its Communicator, which its graphs hold.
    """

    def __init__(
        self,
        folder: str | Path,
        coor: Coordinator,
        comm: Communicator,
        dtype: torch.dtype = torch.float32,
        slots: int = 8,
        length: int = 512,
    ) -> None:
        self.coor, self.comm, self.device = coor, comm, comm.device
        self.uses_graphs = comm.device.type == "cuda"
        self.graphs: dict[int, DecodeGraph] = {}  # by the number of sequences
        self.slots, self.length = slots, length
        self.model = Llama(Path(folder), comm, dtype, slots, length)

    def close(self) -> None:
        self.graphs.clear()

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, ends: frozenset[int] = frozenset()
    ) -> list[list[int]]:
        """The new tokens of each prompt, greedily. Collective; rank 0's arguments count.

        Empty on the other ranks.
        """
        requests = [Request(prompt, max_new_tokens) for prompt in prompts]
        scheduler = Scheduler(self.slots, self.length, ends)
        if self.coor.is_master():
            num_words = self.model.shape.vocab
            for request in requests:
                if not all(0 <= token < num_words for token in request.prompt):
                    raise ValueError(f"{request.prompt}: the vocabulary has {num_words} tokens")
                scheduler.add(request)
        while True:
            plan = self.coor.broadcast_object(scheduler.plan() if self.coor.is_master() else None)
            if plan is STOP:
                return [request.tokens for request in requests if self.coor.is_master()]
            tokens = self._next_tokens(*plan)
            if self.coor.is_master():
                scheduler.take(plan[0], tokens)

    def _next_tokens(self, slots: list[int], first: list[int], tokens: list[int]) -> list[int]:
        """The next token of each slot, after as many new ones for each."""
        rows = torch.tensor(tokens, device=self.device).view(len(slots), -1)
        places = torch.arange(rows.shape[1], device=self.device)
        positions = torch.tensor(first, device=self.device)[:, None] + places
        hidden = self._hidden(rows, positions, torch.tensor(slots, device=self.device))
        next_tokens = self.model.vocabulary.logits(hidden).argmax(-1).tolist()
        if self.graphs:
            self.comm.check()  # a replay raises nothing
        return next_tokens

    def _hidden(self, *inputs: torch.Tensor) -> torch.Tensor:
        count, num_tokens = inputs[0].shape
        if num_tokens > 1 or not self.uses_graphs:
            return self.model.hidden(*inputs, whole=False)
        if count in self.graphs:
            return self.graphs[count].replay(*inputs)
        hidden = self.model.hidden(*inputs, whole=True)
        self.graphs[count] = DecodeGraph(self.model, *inputs)
        return hidden


def main(folder: str, *texts: str) -> None:
    tokenizer = _tokenizer(folder)
    prompts = [
        tokenizer.encode(text).ids if tokenizer else [int(token) for token in text.split(",")]
        for text in texts
    ]
    with contextlib.ExitStack() as stack:
        coor = stack.enter_context(Coordinator())
        comm = stack.enter_context(Communicator(coor))
        engine = stack.enter_context(contextlib.closing(Engine(folder, coor, comm)))
        for tokens in engine.generate(prompts, max_new_tokens=32):
            print(tokenizer.decode(tokens) if tokenizer else tokens)


def _tokenizer(folder: str):
    path = Path(folder, "tokenizer.json")
    if not path.exists():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


if __name__ == "__main__":
    main(*sys.argv[1:])
