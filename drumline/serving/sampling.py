"""The next token of each sequence of a batch, sampled with that sequence's own parameters.

sampler = TokenSampler(SamplingParams(temperature=0.7, top_p=0.9, seed=1))
token = sampler.sample(logits)  # [vocabulary]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from drumline.contact.generate_options import truncated
from drumline.serving.grammar import JsonGrammar

MIN_TEMPERATURE = torch.finfo(torch.float32).tiny  # below, a division by it overflows

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters for which a checkpoint may have recommendations."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one sequence, with the meaning of OpenAI's API and of `vllm serve`.

    temperature: 0 takes the most likely token. top_k: 0 allows all tokens. min_p: allows tokens
    that are at least so likely, as a fraction of the most likely one's probability.
    presence_penalty, frequency_penalty: subtracted from the logit of a token that the sequence has
    generated before, once and once per occurrence. repetition_penalty: divides the positive logits
    of tokens of the prompt and the sequence, and multiplies the negative ones.
    logit_bias: added to the logits of these tokens.
    stop_tokens: end the sequence, as the model's own do unless ignore_eos; none of them comes among
    the first min_tokens tokens, unless a grammar has nothing else to go on with.
    num_logprobs: of how many most likely tokens the log-probabilities are kept; None keeps none.
    scores_prompt: whether the log-probabilities of the prompt are wanted, too.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Iterable[tuple[int, float]] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: Iterable[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    num_logprobs: int | None = None
    scores_prompt: bool = False


class TokenLogprob(NamedTuple):
    """The log-probability of a token, and those of the most likely ones in its place."""

    token: int
    logprob: float | None
    """None of the first token of a prompt, before which there is nothing."""
    top: Sequence[tuple[int, float]]

    @classmethod
    def of(cls, token: int, logits: torch.Tensor, num_top: int) -> TokenLogprob:
        """That of a token by the logits of its place, [vocabulary]."""
        logprobs = torch.log_softmax(logits.float(), 0)
        values, tokens = logprobs.topk(min(num_top, len(logits)))
        top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
        return cls(token, float(logprobs[token]), top)


class TokenSampler:
    """Samples the tokens of one sequence; equal seeds and logits give equal tokens.

    Each draw depends on the seed and its position alone, so that a sequence can go on elsewhere.
    prompt: its tokens, for repetition_penalty. end_tokens: those that end the sequence.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        end_tokens: Iterable[int] = (),
        grammar: JsonGrammar | None = None,
    ) -> None:
        self.params, self.grammar = params, grammar
        self.counts: Counter[int] = Counter()
        self.logprob: TokenLogprob | None = None  # of the last token
        self._end_tokens = sorted(end_tokens)
        self._seen = set(prompt) if params.repetition_penalty != 1 else set()
        self.generator = torch.Generator()
        self.seed = self.generator.seed() if params.seed is None else params.seed

    @cached_property
    def is_greedy(self) -> bool:
        """True if the sampler always takes the token with the highest logit, and keeps nothing."""
        params = self.params
        penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1
        others = params.temperature, params.logit_bias, params.min_tokens, self.grammar
        return params.num_logprobs is None and not any((*penalties, *others))

    def replay(self, tokens: Iterable[int]) -> None:
        """Take tokens that were sampled, here or elsewhere."""
        for token in tokens:
            self.counts[token] += 1
            if self.grammar is not None:
                self.grammar.advance(token)

    def sample(self, logits: torch.Tensor) -> int:
        """The next token. logits: [vocabulary]."""
        raw = logits.float()
        logits = self._changed(raw)
        token = best_tokens(logits[None])[0] if self.params.temperature == 0 else -1
        if token < 0:  # it is drawn, which is an error where logits are NaN
            # The maximum is subtracted so that no temperature makes a logit infinite.
            own = self.params
            most = max(own.temperature, MIN_TEMPERATURE), own.top_k, own.top_p, own.min_p
            (logits,) = truncated(logits[None] - logits.max(), *most)
            probabilities = torch.softmax(logits, 0)
            self.generator.manual_seed(hash((self.seed, self.counts.total())))
            token = int(torch.multinomial(probabilities.cpu(), 1, generator=self.generator))
        self.replay([token])
        if self.params.num_logprobs is not None:
            self.logprob = TokenLogprob.of(token, raw, self.params.num_logprobs)
        return token

    def _changed(self, logits: torch.Tensor) -> torch.Tensor:
        """With bias, penalties, and without what may not come next."""
        params, device, bias = self.params, logits.device, dict(self.params.logit_bias)
        if (penalty := params.repetition_penalty) != 1:
            seen = torch.tensor(sorted(self._seen | self.counts.keys()), device=device)
            values = logits[seen]
            values = torch.where(values > 0, values / penalty, values * penalty)
            logits = logits.index_copy(0, seen, values)
        if params.presence_penalty or params.frequency_penalty:
            tokens = torch.tensor([*self.counts], dtype=torch.long, device=device)
            counts = torch.tensor([*self.counts.values()], dtype=logits.dtype, device=device)
            less = params.presence_penalty + params.frequency_penalty * counts
            logits = logits.index_add(0, tokens, less, alpha=-1)
        if self.counts.total() < params.min_tokens:
            bias |= dict.fromkeys(self._end_tokens, -1e30)  # by -inf, nothing could end whole JSON
        if bias:
            tokens = torch.tensor([*bias], device=device)
            logits = logits.index_add(0, tokens, torch.tensor([*bias.values()], device=device))
        return logits if self.grammar is None else self.grammar.mask(logits)


def best_tokens(logits: torch.Tensor) -> list[int]:
    """The most likely token of each row, -1 of one that has NaN. logits: [rows, vocabulary]."""
    values, tokens = logits.max(-1)
    best: list[int] = tokens.masked_fill(values.isnan(), -1).tolist()
    return best
