"""The next token of each sequence of a batch, sampled with that sequence's own parameters.

sampler = TokenSampler(SamplingParams(temperature=0.7, top_p=0.9, seed=1))
token = sampler.sample(logits)  # [vocabulary]
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
import transformers

MIN_TEMPERATURE = torch.finfo(torch.float32).tiny  # below, a division by it overflows


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one sequence, with the meaning of OpenAI's API.

    temperature: 0 takes the most likely token. top_k: 0 allows all tokens.
    presence_penalty, frequency_penalty: subtracted from the logit of a token that the sequence has
    generated before, once and once per occurrence.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


class TokenSampler:
    """Samples the tokens of one sequence; equal seeds and logits give equal tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.counts: Counter[int] = Counter()
        self.generator = torch.Generator()
        if params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(params.seed)

    @property
    def is_greedy(self) -> bool:
        """True if the sampler always takes the token with the highest logit."""
        params = self.params
        return params.temperature == params.presence_penalty == params.frequency_penalty == 0

    def sample(self, logits: torch.Tensor) -> int:
        """The next token. logits: [vocabulary]."""
        logits = self._penalized(logits.float())
        if self.params.temperature == 0:
            token = int(logits.argmax())
        else:
            # The maximum is subtracted so that no temperature makes a logit infinite.
            logits = _warpers(self.params)(None, (logits - logits.max())[None])[0]
            probabilities = torch.softmax(logits, 0)
            token = int(torch.multinomial(probabilities.cpu(), 1, generator=self.generator))
        self.counts[token] += 1
        return token

    def _penalized(self, logits: torch.Tensor) -> torch.Tensor:
        presence, frequency = self.params.presence_penalty, self.params.frequency_penalty
        if not self.counts or presence == frequency == 0:
            return logits
        tokens, counts = (
            torch.tensor(list(values), device=logits.device)
            for values in zip(*self.counts.items(), strict=True)
        )
        return logits.index_add(0, tokens, -(presence + frequency * counts).to(logits.dtype))


def _warpers(params: SamplingParams) -> transformers.LogitsProcessorList:
    warpers = [transformers.TemperatureLogitsWarper(max(params.temperature, MIN_TEMPERATURE))]
    if params.top_k:
        warpers.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(params.top_p))
    return transformers.LogitsProcessorList(warpers)
