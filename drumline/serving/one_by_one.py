"""One sequence after the other, for models that cannot be batched over pages.

batch = OneByOne(model, choose)
batch.add_request([1, 5, 9], "a name")
for _ in batch: ...                     # until stop()
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import torch

from drumline.contact.loading.configs import generation_settings

ENDLESS = 1 << 30  # tokens, which no sequence gets


class OneByOne:
    """Stands in place of transformers' manager of continuous batches, and is used as it is.

    choose(names, names_with_token, logits): the tokens of these names; each is the only one here.
    names_in_step: the requests of the step that runs, or that failed. failure: the error that has
    ended the steps; here, where none is kept, the loop raises it.
    """

    failure: Exception | None = None
    pool_usage = 0.0

    def __init__(self, model: Any, choose: Callable[..., list[int]]):
        self.model, self._choose = model, choose
        self.names_in_step: list[str] = []
        self._cancelled: set[str] = set()

    @property
    def num_running(self) -> int:
        return len(self.names_in_step)

    def num_cached(self, name: str) -> int:
        return 0

    def start(self) -> None:
        self._requests: queue.SimpleQueue[tuple[list[int], str] | None] = queue.SimpleQueue()

    def is_running(self) -> bool:
        return True

    def stop(self, *, hard_stop: bool = False) -> None:
        """End the loop over this, once the sequence that runs was cancelled."""
        self._requests.put(None)

    def add_request(self, tokens: list[int], name: str) -> None:
        self._requests.put((tokens, name))

    def cancel_request(self, name: str) -> None:
        self._cancelled.add(name)

    def __iter__(self) -> Iterator[None]:
        """Generate until stop(). Raises what generate() raises."""
        while (request := self._requests.get()) is not None:
            self._generate(*request)
        yield from ()

    def _generate(self, tokens: list[int], name: str) -> None:
        row = torch.tensor([tokens], device=self.model.device)
        no_token = self.model.get_input_embeddings().num_embeddings
        settings = generation_settings(
            max_new_tokens=ENDLESS, do_sample=False, pad_token_id=0, eos_token_id=no_token
        )
        self.names_in_step = [name]
        if name not in self._cancelled:
            self.model.generate(
                row,
                attention_mask=torch.ones_like(row),
                generation_config=settings,
                logits_processor=[self._chosen],
                stopping_criteria=[self._is_cancelled],
            )
        self.names_in_step = []
        self._cancelled.discard(name)

    def _chosen(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """All logits -inf but that of the token that was chosen."""
        tokens = self._choose(self.names_in_step, self.names_in_step, scores)
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor(tokens), 0)

    def _is_cancelled(self, tokens: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.tensor([self.names_in_step[0] in self._cancelled], device=tokens.device)
