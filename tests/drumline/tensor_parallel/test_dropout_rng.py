"""Ranks that share a model leave out the same of what all of them have."""

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import drumline
from communicator import Communicator
from coordinator import Coordinator
from drumline import DrumlineError

HERE = Path(__file__).parent
PHI = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.2,
    "attention_dropout": 0.3,
}


@pytest.fixture(scope="module")
def found(warm, checkpoints):
    """By rank, losses and gradients of two ranks that were seeded differently."""
    _, path = checkpoints.make("dropping phi", "PhiForCausalLM", **PHI)
    done = warm.run("-m", "launcher", "run", "-n", "2", HERE / "dropout_ranks.py", path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition("found ")[2] for line in done.stdout.splitlines() if "found " in line]
    return json.loads(lines[0])


def test_ranks_train_one_model(found):
    """Each left out other numbers of what all have, and nobody was told."""
    assert found[0]["steps"] == found[1]["steps"]
    first, second = found[0]["steps"]
    assert first != second, "two steps left out the same"


def test_whoever_calls_the_trunk_trains_one_model_too(found):
    """The model's own hook is passed by, as by losses of one's own and by PEFT."""
    assert found[0]["trunk"] == found[1]["trunk"]


def test_what_is_computed_again_leaves_out_the_same_again(found):
    for rank in found:
        torch.testing.assert_close(torch.tensor(rank["once"][1]), torch.tensor(rank["again"][1]))
        assert rank["once"][0] == pytest.approx(rank["again"][0])


def test_a_rank_draws_for_itself_what_it_has_alone(found):
    assert found[0]["own"] != found[1]["own"]
    assert found[0]["y"] == found[1]["y"]


def test_threads_cannot_synchronise_dropout_and_say_so(ranks_or_errors, checkpoints):
    _, path = checkpoints.make("dropping phi", "PhiForCausalLM", **PHI)

    def rank(info):
        with Coordinator(info, timeout_s=30) as coor:
            model = drumline.load(path, coor=coor, tp=2)
            model(torch.ones(1, 3, dtype=torch.int64))  # nothing is left out here
            model.train()(torch.ones(1, 3, dtype=torch.int64))

    for error in ranks_or_errors(rank, 2):
        assert isinstance(error, DrumlineError) and "start ranks as processes" in str(error)


def test_a_cut_model_goes_with_its_last_user(ranks):
    """What was to begin its passes once held it until the next collection of garbage."""

    def rank(info):
        with Coordinator(info, timeout_s=30) as coor, Communicator(coor, backend="tcp") as comm:
            pair = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))
            drumline.parallelize(pair, {"0": "colwise", "2": "rowwise"}, comm)
            pair.eval()(torch.ones(1, 4))
            seen = weakref.ref(pair)
            del pair
            return seen() is None

    gc.disable()
    try:
        assert ranks(rank, 2) == [True, True]
    finally:
        gc.enable()
