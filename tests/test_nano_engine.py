"""The example of an engine generates what transformers does, with requests that come and go."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from communicator import Communicator
from coordinator import Coordinator
from tests.programs.operator_tape import OperatorTape

FOLDER = Path(__file__).parent.parent / "examples" / "nano_engine"
PROMPTS = [[5], [3, 1, 4, 1, 5, 9, 2, 6], [7, 7], [8, 2, 8], [1, 2, 3, 4, 5]]
NEW_TOKENS = 7


@pytest.fixture
def nano(monkeypatch):
    """The modules of the example, as a script in its folder imports them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import engine

    yield engine
    for name in ("engine", "llama"):
        del sys.modules[name]


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    shape = {"hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    llama = LlamaForCausalLM(LlamaConfig(**shape, **heads)).eval()
    llama.save_pretrained(tmp_path)
    return llama


def tokens_of(llama, prompt):
    whole = llama.generate(
        torch.tensor([prompt]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("world_size", [1, 2])
def test_tokens_are_those_of_transformers(ranks, nano, model, tmp_path, world_size):
    """Of more prompts than there are slots or pages, so that some wait until others have ended, and
    of one that is longer than a page."""

    def body(info):
        with Coordinator(info, timeout_s=60) as coor, Communicator(coor, timeout_s=60) as comm:
            engine = nano.Engine(tmp_path, coor, comm, slots=3, length=64, pages=4)
            return engine.generate(prompts, NEW_TOKENS)

    prompts = [*PROMPTS, list(range(1, 31))]
    expected = [tokens_of(model, prompt) for prompt in prompts]
    assert ranks(body, world_size)[0] == expected


def test_a_pass_that_reads_no_value_is_replayed_with_other_inputs(
    nano, model, tmp_path, monkeypatch
):
    """By a tape of operators in place of a CUDA graph; tests/gpu has the real one."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", OperatorTape)
    monkeypatch.setattr(torch.cuda, "graph", OperatorTape.recording)
    with Coordinator() as coor, Communicator(coor) as comm:
        engine = nano.Engine(tmp_path, coor, comm, slots=3, length=16)
        engine.uses_graphs, comm.check = True, lambda: None
        assert engine.generate(PROMPTS, NEW_TOKENS) == [tokens_of(model, p) for p in PROMPTS]
        assert sorted(engine.graphs) == [1, 2, 3]
        engine.close()


def test_a_request_ends_at_its_last_token_and_frees_its_slot_and_its_pages(nano):
    scheduler = nano.Scheduler(slots=1, length=32, pages=3, ends=frozenset({42}))
    scheduler.add(nano.Request([1] * 15, 5))
    scheduler.add(nano.Request([3], 1))
    assert scheduler.plan() == [[0], [1] * 15, [[2, 1]]]
    scheduler.take([9])
    assert scheduler.plan() == [[15], [9], [[2, 1]]]
    scheduler.take([42])
    assert scheduler.plan() == [[0], [3], [[1, 0]]]
    scheduler.take([4])
    assert scheduler.plan() is nano.STOP and sorted(scheduler.free_pages) == [0, 1, 2]


def test_a_request_waits_for_pages(nano):
    scheduler = nano.Scheduler(slots=2, length=32, pages=2)
    for _ in range(2):
        scheduler.add(nano.Request([1] * 10, 10))
    scheduler.plan()
    scheduler.take([5])
    assert scheduler.plan()[0] == [10] and len(scheduler.waiting) == 1


@pytest.mark.parametrize(("prompt", "max_new_tokens"), [([1] * 5, 4), ([], 4), ([1], 0)])
def test_a_request_that_does_not_fit_is_refused(nano, prompt, max_new_tokens):
    with pytest.raises(ValueError, match="larger length"):
        nano.Scheduler(slots=1, length=8, pages=1).add(nano.Request(prompt, max_new_tokens))


@pytest.mark.parametrize("token", [-1, 96])
def test_a_token_that_is_not_in_the_vocabulary_is_refused(nano, model, tmp_path, token):
    with Coordinator() as coor, Communicator(coor) as comm:
        engine = nano.Engine(tmp_path, coor, comm)
        with pytest.raises(ValueError, match="the vocabulary has 96 tokens"):
            engine.generate([[token]], 1)


def test_the_engine_is_read_in_one_sitting():
    lines = [len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")]
    assert sum(lines) <= 450
