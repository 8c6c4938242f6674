"""Which token is chosen."""

from collections import Counter

import pytest
import torch

from drumline.serving.sampling import Chooser, Sampling

SCORES = torch.log(torch.tensor([0.1, 0.5, 0.05, 0.3, 0.05]))


def drawn(num=2000, **wishes):
    """The share of each token among many draws, each by a chooser that has drawn nothing yet."""
    wishes = {"seed": 0, **wishes}
    chooser = Chooser(Sampling(**wishes))
    counts = Counter()
    for _ in range(num):
        chooser.counts.clear()
        counts[chooser.choose(SCORES)] += 1
    return {token: count / num for token, count in counts.items()}


def test_tokens_come_as_often_as_they_are_likely():
    assert drawn() == pytest.approx({0: 0.1, 1: 0.5, 2: 0.05, 3: 0.3, 4: 0.05}, abs=0.04)


@pytest.mark.parametrize(
    ("wishes", "left"),
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
def test_only_what_is_allowed_is_drawn(wishes, left):
    assert set(drawn(300, **wishes)) == left


def test_a_temperature_flattens():
    hot, cold = drawn(temperature=2.0)[1], drawn(temperature=0.5)[1]
    assert cold > 0.6 > 0.45 > hot


def test_penalties_add_up_with_each_time():
    chooser = Chooser(Sampling(temperature=0, presence=0.2, frequency=0.4))
    # 1 has -0.69, and -0.6 and then -0.4 more with each time; 3 has -1.2, and so on
    assert [chooser.choose(SCORES) for _ in range(5)] == [1, 3, 1, 1, 3]


def test_a_seed_gives_the_same_tokens_again():
    many = [
        [chooser.choose(SCORES) for _ in range(30)]
        for chooser in (Chooser(Sampling(seed=seed)) for seed in (1, 1, 2, None, None))
    ]
    assert many[0] == many[1]
    assert len({tuple(run) for run in many[1:]}) == 4
