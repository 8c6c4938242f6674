"""The next token of each row of a batch, each row with wishes of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How one row is continued. temperature 0 takes the likeliest token; top_k 0 allows all.

    presence and frequency are taken off the score of a token that the row already has, once and as
    often as it has it.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


class Chooser:
    """Chooses the tokens of one row; the same ones again for the same seed and scores."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.counts: Counter[int] = Counter()
        self.random = torch.Generator()
        if sampling.seed is None:
            self.random.seed()
        else:
            self.random.manual_seed(sampling.seed)

    @property
    def is_plain(self) -> bool:
        """Whether it always chooses the token with the highest score."""
        wishes = self.sampling
        return wishes.temperature == wishes.presence == wishes.frequency == 0

    def choose(self, scores: torch.Tensor) -> int:
        """The next token, from the scores of all: [vocabulary]."""
        scores = self._punished(scores.float())
        if self.sampling.temperature == 0:
            token = int(scores.argmax())
        else:
            least = torch.finfo(scores.dtype).tiny  # as good as 0, and dividing by that is not
            scores = (scores - scores.max()) / max(self.sampling.temperature, least)
            chances = torch.softmax(self._allowed(scores), 0)
            token = int(torch.multinomial(chances.cpu(), 1, generator=self.random))
        self.counts[token] += 1
        return token

    def _punished(self, scores: torch.Tensor) -> torch.Tensor:
        presence, frequency = self.sampling.presence, self.sampling.frequency
        if not self.counts or presence == frequency == 0:
            return scores
        tokens, counts = (
            torch.tensor(list(x), device=scores.device)
            for x in zip(*self.counts.items(), strict=True)
        )
        return scores.index_add(0, tokens, -(presence + frequency * counts).to(scores.dtype))

    def _allowed(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores of which top_k and top_p are left: the fewest likeliest tokens that make top_p."""
        top_k, top_p = self.sampling.top_k, self.sampling.top_p
        if 0 < top_k < len(scores):
            scores = scores.masked_fill(scores < scores.topk(top_k).values[-1], -torch.inf)
        if top_p < 1:
            ordered, places = scores.sort(descending=True)
            chances = ordered.softmax(0)
            is_beyond = chances.cumsum(0) - chances >= top_p
            is_beyond[0] = False
            scores = scores.index_fill(0, places[is_beyond], -torch.inf)
        return scores
