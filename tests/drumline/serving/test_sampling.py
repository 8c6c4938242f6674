"""Sampling of tokens: the distribution, its limits, penalties and seeds."""

from collections import Counter

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from drumline.contact.generate_options import truncated
from drumline.serving.sampling import SamplingParams, TokenSampler

LOGITS = torch.log(torch.tensor([0.1, 0.5, 0.05, 0.3, 0.05]))


def frequencies(num_samples=2000, **params):
    """The share of each token among many first tokens."""
    samplers = (TokenSampler(SamplingParams(seed=n, **params)) for n in range(num_samples))
    counts = Counter(sampler.sample(LOGITS) for sampler in samplers)
    return {token: count / num_samples for token, count in counts.items()}


def test_tokens_are_sampled_with_their_probabilities():
    assert frequencies() == pytest.approx({0: 0.1, 1: 0.5, 2: 0.05, 3: 0.3, 4: 0.05}, abs=0.04)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 0}, {1}),
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.5}, {1}),
        ({"top_p": 0.51}, {1, 3}),
        ({"top_p": 0.85}, {0, 1, 3}),
        ({"top_k": 3, "top_p": 0.6}, {1, 3}),
        ({"temperature": 1e-40}, {1}),
        ({"temperature": 1e-300}, {1}),
        ({"top_p": 1e-300}, {1}),
        ({"min_p": 0.59}, {1, 3}),
        ({"logit_bias": ((4, 100.0),)}, {4}),
        ({"logit_bias": ((1, -100.0), (3, -100.0))}, {0, 2, 4}),
    ],
)
def test_only_what_is_allowed_is_frequencies(params, expected):
    assert set(frequencies(300, **params)) == expected


def test_a_higher_temperature_flattens_the_distribution():
    hot, cold = frequencies(temperature=2.0)[1], frequencies(temperature=0.5)[1]
    assert cold > 0.6 > 0.45 > hot


def test_penalties_grow_with_each_occurrence():
    sampler = TokenSampler(
        SamplingParams(temperature=0, presence_penalty=0.2, frequency_penalty=0.4)
    )
    # 1 has -0.69, and -0.6 and then -0.4 more with each time; 3 has -1.2, and so on
    assert [sampler.sample(LOGITS) for _ in range(5)] == [1, 3, 1, 1, 3]


def test_a_seed_gives_the_same_tokens_again():
    runs = [
        [sampler.sample(LOGITS) for _ in range(30)]
        for sampler in (TokenSampler(SamplingParams(seed=seed)) for seed in (1, 1, 2, None, None))
    ]
    assert runs[0] == runs[1]
    assert len({tuple(run) for run in runs[1:]}) == 4


def test_a_repetition_penalty_counts_the_prompt_and_the_new_tokens():
    sampler = TokenSampler(SamplingParams(temperature=0, repetition_penalty=2.0), prompt=[1])
    # 1 has 2 x -0.69, below 3's -1.2, which then has 2 x that
    assert [sampler.sample(LOGITS) for _ in range(3)] == [3, 1, 1]


def test_no_end_comes_before_min_tokens():
    sampler = TokenSampler(SamplingParams(temperature=0, min_tokens=2), end_tokens={1, 3})
    assert [sampler.sample(LOGITS) for _ in range(3)] == [0, 0, 1]


def test_log_probabilities_are_those_of_the_model_before_any_change():
    params = SamplingParams(temperature=0, logit_bias=((4, 100.0),), num_logprobs=2)
    sampler = TokenSampler(params)
    sampler.sample(LOGITS)
    token, logprob, top = sampler.logprob
    assert token == 4 and logprob == pytest.approx(-2.9957, abs=1e-4)
    assert [index for index, _ in top] == [1, 3]
    assert [value for _, value in top] == pytest.approx([-0.6931, -1.2040], abs=1e-4)
    assert not sampler.is_greedy and TokenSampler(SamplingParams(temperature=0)).is_greedy


@pytest.mark.parametrize("top_k", [0, 1, 7, 200])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_the_tokens_that_are_left_out_are_those_of_transformers(top_k, top_p, min_p):
    logits = torch.randn(101, generator=torch.Generator().manual_seed(top_k)).round(decimals=1)
    warpers = [TemperatureLogitsWarper(0.7)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    expected = LogitsProcessorList(warpers)(None, logits[None])
    assert torch.equal(truncated(logits[None], 0.7, top_k, top_p, min_p), expected)


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_no_numbers_are_an_error(temperature):
    """Without a temperature there were tokens, and log-probabilities that are no JSON."""
    sampler = TokenSampler(SamplingParams(temperature=temperature, num_logprobs=1))
    with pytest.raises(RuntimeError, match="nan"):
        sampler.sample(LOGITS * torch.nan)
