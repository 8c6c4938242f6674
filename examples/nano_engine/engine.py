"""An inference engine with tensor parallelism, continuous batching and a paged cache, on the three
lower layers.

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
from llama import PAGE, Llama

from communicator import Communicator
from coordinator import Coordinator

STOP = None  # the plan after the last one


@dataclass(eq=False)
class Request:
    """A prompt, what was generated for it so far, and the pages of the cache that it has."""

    prompt: list[int]
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class Scheduler:
    """Rank 0's choice of what to compute next: waiting requests first, if there is room for them.

    slots: requests that run at once. pages: of the cache; a request gets those of all its tokens as
    it starts, so that none has to be put back.
    """

    def __init__(
        self, slots: int, length: int, pages: int, ends: frozenset[int] = frozenset()
    ) -> None:
        self.slots, self.length, self.ends = slots, length, ends
        self.width = -(-length // PAGE)  # of the table of a request's pages
        self.free_pages = list(range(pages))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.planned: list[Request] = []  # those of the pass that was planned last

    def add(self, request: Request) -> None:
        counts = len(request.prompt), request.max_new_tokens
        longest = min(self.length, PAGE * len(self.free_pages))
        if min(counts) < 1 or sum(counts) > longest:
            raise ValueError(
                f"{counts[0]} tokens and {counts[1]} new ones: needs one of each at least, and "
                f"{longest} together at most. Start the engine with a larger length= or pages=."
            )
        self.waiting.append(request)

    def plan(self) -> list[list[int]] | None:
        """The first positions, tokens and pages of the next pass; STOP if nothing is left."""
        if self.waiting and self._starts(self.waiting[0]):
            self.planned = [self.waiting.popleft()]
            self.running += self.planned
            return [[0], self.planned[0].prompt, self._tables()]
        if not self.running:
            return STOP
        self.planned = list(self.running)
        positions = [len(request.prompt) + len(request.tokens) - 1 for request in self.planned]
        return [positions, [request.tokens[-1] for request in self.planned], self._tables()]

    def _starts(self, request: Request) -> bool:
        """Give the request its pages, if there are as many and a slot."""
        count = -(-(len(request.prompt) + request.max_new_tokens) // PAGE)
        if len(self.running) == self.slots or len(self.free_pages) < count:
            return False
        request.pages = [self.free_pages.pop() for _ in range(count)]
        return True

    def _tables(self) -> list[list[int]]:
        """Of equal width: what is behind a request's pages is masked."""
        return [r.pages + [0] * (self.width - len(r.pages)) for r in self.planned]

    def take(self, tokens: list[int]) -> None:
        """Give each planned request its next token, and free the pages of those that are done."""
        for request, token in zip(self.planned, tokens, strict=True):
            request.tokens.append(token)
            if len(request.tokens) == request.max_new_tokens or token in self.ends:
                self.running.remove(request)
                self.free_pages += request.pages


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
    """slots: sequences that are generated at once. length: the most tokens of one. pages: of the
    cache, of PAGE tokens each; enough for slots of that length if it is not given.

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
        pages: int | None = None,
    ) -> None:
        self.coor, self.comm, self.device = coor, comm, comm.device
        self.uses_graphs = comm.device.type == "cuda"
        self.graphs: dict[int, DecodeGraph] = {}  # by the number of sequences
        self.slots, self.length = slots, length
        self.pages = pages or slots * -(-length // PAGE)
        self.model = Llama(Path(folder), comm, dtype, self.pages)

    def close(self) -> None:
        self.graphs.clear()

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, ends: frozenset[int] = frozenset()
    ) -> list[list[int]]:
        """The new tokens of each prompt, greedily. Collective; rank 0's arguments count.

        Empty on the other ranks.
        """
        requests = [Request(prompt, max_new_tokens) for prompt in prompts]
        scheduler = Scheduler(self.slots, self.length, self.pages, ends)
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
                scheduler.take(tokens)

    def _next_tokens(
        self, first: list[int], tokens: list[int], tables: list[list[int]]
    ) -> list[int]:
        """The next token of each sequence, after as many new ones for each."""
        rows = torch.tensor(tokens, device=self.device).view(len(first), -1)
        places = torch.arange(rows.shape[1], device=self.device)
        positions = torch.tensor(first, device=self.device)[:, None] + places
        hidden = self._hidden(rows, positions, torch.tensor(tables, device=self.device))
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
