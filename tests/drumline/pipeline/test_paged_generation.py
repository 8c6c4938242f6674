"""transformers' continuous batching over ranks gives each request the text that it has alone."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import drumline
from tests.drumline.conftest import LLAMA

PROGRAMS = Path(__file__).parents[1] / "programs"

GREEDY = GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=2, pad_token_id=0)
SHARED = [5 + n % 50 for n in range(21)]


def prompts(count=9):
    """Of mixed lengths; some have a beginning in common."""
    draw = random.Random(3)
    drawn = [[draw.randrange(3, 60) for _ in range(draw.randrange(1, 30))] for _ in range(count)]
    return [SHARED + prompt if at % 3 == 0 else prompt for at, prompt in enumerate(drawn)]


def alone(model, inputs, **changes):
    """The greedy texts of one process, one by one."""
    settings = GenerationConfig(**{**GREEDY.to_diff_dict(), **changes})
    texts = []
    for ids in inputs:
        tokens = torch.tensor([ids])
        texts.append(model.generate(tokens, generation_config=settings)[0, len(ids) :].tolist())
    return texts


def texts_of(model, inputs, generation=GREEDY, **settings):
    """The greedy texts of continuous batching, in the order of the prompts."""
    config = ContinuousBatchingConfig(**{"page_size": 8, **settings})
    outputs = model.generate_batch(
        inputs, generation_config=generation, continuous_batching_config=config
    )
    assert [output.error for output in outputs.values()] == [None] * len(outputs)
    return [output.generated_tokens for output in outputs.values()]


@pytest.fixture
def batched(on_master):
    """The texts of prompts batched over ranks."""

    def run(path, nprocs, inputs, options=None, **settings):
        return on_master(path, nprocs, lambda m: texts_of(m, inputs, **settings), **(options or {}))

    return run


@pytest.fixture(scope="module")
def llama(checkpoints):
    plain, path = checkpoints.llama()
    inputs = prompts()
    return path, inputs, alone(plain, inputs)


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_mixed_prompts_get_the_texts_that_they_have_alone(llama, batched, nprocs):
    path, inputs, texts = llama
    assert batched(path, nprocs, inputs) == texts


def test_a_prompt_in_chunks_between_the_tokens_of_others_is_the_same(llama, batched):
    path, inputs, texts = llama
    assert batched(path, 2, inputs, max_batch_tokens=11) == texts


def test_requests_that_do_not_fit_in_the_pool_take_turns(llama, batched):
    path, inputs, texts = llama
    assert batched(path, 2, inputs, num_blocks=12) == texts


def test_forks_of_a_request_copy_its_last_block_on_every_rank(llama, batched):
    path, inputs, texts = llama
    forked = GenerationConfig(**GREEDY.to_diff_dict())
    forked.num_return_sequences = 3
    outputs = batched(path, 3, inputs[:3], generation=forked)
    assert outputs == [text for text in texts[:3] for _ in range(3)]


SLIDING = {"sliding_window": 6, "num_hidden_layers": 4}
FULL, WINDOW = "full_attention", "sliding_attention"
WINDOWS = {
    "windows": ("MistralForCausalLM", {}),
    "windows and all": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "layer_types": [WINDOW, FULL, WINDOW, WINDOW]},
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("settings", [{}, {"max_batch_tokens": 11}, {"num_blocks": 8}])
def test_layers_with_windows_keep_the_last_tokens_alone(checkpoints, batched, name, settings):
    kind, config = WINDOWS[name]
    plain, path = checkpoints.make(f"{kind}-windows", kind, **{**LLAMA, **SLIDING, **config})
    inputs = prompts()[:6]
    assert batched(path, 2, inputs, **settings) == alone(plain, inputs)


def test_eager_attention_with_sinks_is_eager_over_pages(checkpoints, batched):
    config = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, **LLAMA, **SLIDING}
    plain, path = checkpoints.make("gpt-oss", "GptOssForCausalLM", **config)
    inputs = prompts()[:4]
    options = {"attn_implementation": "eager"}
    assert batched(path, 2, inputs, options, max_batch_tokens=13) == alone(plain, inputs)


def test_a_rank_that_is_killed_amid_batches_ends_every_wait(checkpoints, start):
    """transformers logs what ends its thread, and returns the requests that were done."""
    program = PROGRAMS / "kill_amid_batches.py"
    processes = start(program, 3, checkpoints.llama()[1], 1)
    out, err = processes[0].communicate(timeout=90)
    assert processes[0].returncode == 0, out + err
    assert "SIGKILL" in out
    assert [process.wait(timeout=40) for process in processes[1:]] == [-signal.SIGKILL, 1]


def test_settings_and_models_that_pages_cannot_have_are_refused_by_name(checkpoints, on_master):
    def work(model):
        config = ContinuousBatchingConfig(cpu_offload_space=1.0, use_async_batching=True)
        with pytest.raises(drumline.DrumlineError, match="use_async_batching=True, cpu_offload"):
            model.generate_batch([[5]], continuous_batching_config=config)
        config = ContinuousBatchingConfig(num_blocks=1 << 40)
        with pytest.raises(drumline.PlanError, match=r"rank .: cpu has memory"):
            model.generate_batch([[5]], continuous_batching_config=config)
        return texts_of(model, [[5, 6]])

    plain, path = checkpoints.llama()
    assert on_master(path, 2, work) == alone(plain, [[5, 6]])
