"""Sampling of tokens: the distribution, its limits, penalties and seeds."""

from collections import Counter

import pytest
import torch

from drumline.serving.sampling import SamplingParams, TokenSampler

LOGITS = torch.log(torch.tensor([0.1, 0.5, 0.05, 0.3, 0.05]))


def frequencies(num_samples=2000, **params):
    """The share of each token among many first tokens."""
    sampler = TokenSampler(SamplingParams(**{"seed": 0, **params}))
    counts = Counter()
    for _ in range(num_samples):
        sampler.counts.clear()
        counts[sampler.sample(LOGITS)] += 1
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
