"""transformers' continuous batching over ranks gives each request the text that it has alone."""

from __future__ import annotations

import gc
import random
import signal
import threading
import traceback
import weakref
from pathlib import Path

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import drumline
import launcher
from drumline.core.cpu.idle_threads import release_idle_threads
from drumline.errors import DrumlineError
from drumline.pipeline.paged_generation import PoolsOfRanks
from tests.cases import soak
from tests.drumline.conftest import LLAMA
from tests.drumline.openmp import compute_in_two_threads, has_ended
from tests.drumline.test_families import CAUSAL

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


@pytest.mark.parametrize("nprocs", [3, soak(1), soak(2)])
def test_mixed_prompts_get_the_texts_that_they_have_alone(llama, batched, nprocs):
    path, inputs, texts = llama
    assert batched(path, nprocs, inputs) == texts


def test_a_prompt_in_chunks_between_the_tokens_of_others_is_the_same(llama, batched):
    path, inputs, texts = llama
    assert batched(path, 2, inputs, max_batch_tokens=11) == texts


def test_requests_that_do_not_fit_in_the_pool_take_turns(llama, batched):
    path, inputs, texts = llama
    assert batched(path, 2, inputs, num_blocks=12) == texts


def test_a_beginning_that_requests_share_is_computed_once(llama, on_master):
    path, inputs, texts = llama
    num_tokens = []

    def count(module, args, kwargs):
        num_tokens.append(kwargs["input_ids"].shape[1])

    def work(model):
        model._batched_ranks.try_once()
        model.register_forward_pre_hook(count, with_kwargs=True)
        config = ContinuousBatchingConfig(page_size=4)
        with model.continuous_batching_context_manager(GREEDY, True, None, config) as manager:
            for prompt in (inputs[0], inputs[3]):  # the second one begins when the first has ended
                manager.add_request(prompt)
                yield manager.get_result(timeout=30).generated_tokens

    assert on_master(path, 2, lambda model: list(work(model))) == [texts[0], texts[3]]
    prefills = [count for count in num_tokens if count > 1]
    shared = len(SHARED) // 4 * 4
    assert prefills == [len(inputs[0]), len(inputs[3]) - shared]


def test_a_manager_that_goes_on_after_another_has_stopped_still_keeps_requests_apart(
    llama, on_master
):
    """The one that stopped gave the layers back the attention that they were loaded with."""
    path, inputs, texts = llama

    def served(manager):
        if not manager.is_running():
            manager.start()
        manager.add_requests(inputs[:4])
        results = [manager.get_result(timeout=30) for _ in range(4)]
        results.sort(key=lambda result: int(result.request_id[4:]))
        return [result.generated_tokens for result in results]

    def work(model):
        config = ContinuousBatchingConfig(page_size=8, max_requests_per_batch=8)
        first, second = (model.init_continuous_batching(GREEDY, config) for _ in range(2))
        assert served(first) == texts[:4]
        first.stop()
        assert served(first) == texts[:4]
        assert served(second) == texts[:4]
        second.stop()
        assert served(first) == texts[:4]
        first.stop()
        return model.config._attn_implementation

    assert on_master(path, 2, work) == "sdpa"


def test_forks_of_a_request_copy_its_last_block_on_every_rank(llama, batched):
    path, inputs, texts = llama
    forked = GenerationConfig(**GREEDY.to_diff_dict())
    forked.num_return_sequences = 3
    outputs = batched(path, 3, inputs[:3], generation=forked)
    assert outputs == [text for text in texts[:3] for _ in range(3)]


@pytest.mark.parametrize("nprocs", [4, soak(2)])
def test_ranks_that_share_layers_keep_the_pages_of_their_heads(llama, nprocs):
    path, inputs, texts = llama

    def rank():
        torch.set_num_threads(1)
        with drumline.load(path, tp=2, device_map="auto", max_memory=[1 << 30] * nprocs) as model:
            return texts_of(model, inputs, max_batch_tokens=31)

    assert launcher.launch(rank, nprocs=nprocs, launcher="threads", timeout_s=60)[0] == texts


def test_ranks_that_all_make_the_calls_are_told_to_let_one_schedule(llama):
    """Each would batch what has come to it by then, and wait in layers for others that did not."""

    def rank():
        refusal = pytest.raises(drumline.DrumlineError, match='add device_map="auto"')
        with drumline.load(llama[0], tp=2) as model, refusal:
            model.generate_batch([[5, 6]], generation_config=GREEDY)

    launcher.launch(rank, nprocs=2, launcher="threads", timeout_s=60)


SLIDING = {"sliding_window": 6, "num_hidden_layers": 4}
FULL, WINDOW = "full_attention", "sliding_attention"
WINDOWS = {
    "windows": ("MistralForCausalLM", {}),
    "windows and all": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "layer_types": [WINDOW, FULL, WINDOW, WINDOW]},
    ),
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("windows", {"max_batch_tokens": 11}),
        soak("windows and all", {}),
        ("windows and all", {"num_blocks": 8}),
    ],
)
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


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        ("BloomForCausalLM", {"n_layer": 4, "n_head": 4}, "written into its layers"),
        ("MambaForCausalLM", {"num_hidden_layers": 4, "state_size": 4}, "linear_attention"),
    ],
)
def test_models_without_attention_over_pages_are_refused_by_name(
    checkpoints, on_master, kind, config, reason
):
    def work(model):
        with pytest.raises((drumline.DrumlineError, ValueError), match=reason):
            model.generate_batch([[5, 6]], generation_config=GREEDY)

    _, path = checkpoints.make(kind, kind, vocab_size=64, hidden_size=32, **config)
    on_master(path, 2, work)


def test_settings_that_pages_cannot_have_are_refused_by_name(checkpoints, on_master):
    def work(model):
        config = ContinuousBatchingConfig(cpu_offload_space=1.0, use_async_batching=True)
        with pytest.raises(drumline.DrumlineError, match="use_async_batching=True, cpu_offload"):
            model.generate_batch([[5]], continuous_batching_config=config)
        config = ContinuousBatchingConfig(num_blocks=1 << 40)
        with pytest.raises(drumline.PlanError, match=r"rank .: cpu has memory"):
            model.generate_batch([[5]], continuous_batching_config=config)
        assert model.config._attn_implementation == "sdpa"
        return texts_of(model, [[5, 6]])

    plain, path = checkpoints.llama()
    assert on_master(path, 2, work) == alone(plain, [[5, 6]])


class Log:
    """A driver that is told nothing."""

    def next_cache(self):
        return 1

    def record(self, *operation):
        pass


def test_pools_of_a_driver_that_failed_die_with_it():
    """What had been noted for the end of the pools kept both until the end of the process."""
    log = Log()
    log.failure = PoolsOfRanks(log, [0], [8], [0])  # as the traceback of an error holds it
    gone = weakref.ref(log)
    del log
    gc.collect()
    assert gone() is None


def lose(manager):
    """Have the manager's next step find a rank lost."""

    def check_there():
        raise drumline.PeerLost("rank 0 lost rank 1")

    manager.ranks.check_there = check_there


def test_every_way_to_wait_for_results_ends_with_the_failure(llama, on_master):
    """Loops over results ended as if all had come, and a result that had come was not given."""

    def failed(model):
        manager = model.init_continuous_batching(GREEDY)
        manager.warmup()
        lose(manager)
        names = manager.add_requests([[5], [6]])
        manager.start()
        manager._generation_thread.join(20)
        return manager, names

    def work(model):
        manager, (first, second) = failed(model)
        assert [manager.get_result(name).request_id for name in (second, first)] == [second, first]
        for wait in (
            manager.get_result,
            lambda: list(manager),
            lambda: list(manager.request_id_iter(first)),
            lambda: manager.add_request([5]),
            manager.stop,
        ):
            with pytest.raises(drumline.PeerLost, match="lost rank 1"):
                wait()
        assert model.config._attn_implementation == "sdpa"

    on_master(llama[0], 2, work)


def test_a_lost_rank_is_logged_without_the_calls_that_led_there(llama, on_master):
    """The same error stood there twice, with sixty calls of libraries."""

    def lost(*_, **__):
        try:
            raise drumline.PeerLost("the ring broke")
        except drumline.PeerLost as error:
            raise drumline.PeerLost("rank 0 lost rank 1") from error

    def work(model):
        manager = model.init_continuous_batching(GREEDY)
        manager.warmup()
        manager.batch_processor._generation_step = lost
        manager.add_requests([[5]])
        manager.start()
        manager._generation_thread.join(20)
        error = manager.failure
        assert error.__cause__ is None and error.__suppress_context__
        traceback_text = "".join(traceback.format_exception(error))
        assert traceback_text.count("lost rank 1") == 1 and "the ring broke" not in traceback_text
        assert len(traceback.extract_tb(error.__traceback__)) <= 4

    on_master(llama[0], 2, work)


def test_a_wait_without_a_timeout_ends_when_the_thread_has_failed(llama, on_master):
    """It waited for a result for ever where no request was left that could fail."""

    def work(model):
        manager = model.init_continuous_batching(GREEDY)
        manager.start()
        error = drumline.PeerLost("rank 0 lost rank 1")
        fail = manager.background_thread_status.record_fatal_error
        timer = threading.Timer(0.3, fail, [error])
        timer.start()
        with pytest.raises(drumline.PeerLost):
            manager.get_result()
        with pytest.raises(drumline.PeerLost):
            manager.stop()

    on_master(llama[0], 2, work)


def test_the_thread_that_starts_a_manager_keeps_no_idle_threads(llama, on_master):
    """OpenMP let those of the manager sleep between two operations while others were there."""

    def work(model):
        num_before = torch.get_num_threads()
        manager = model.init_continuous_batching(GREEDY)
        release_idle_threads()
        (idle,) = compute_in_two_threads()
        manager.start()
        try:
            return has_ended(idle)
        finally:
            manager.stop()
            torch.set_num_threads(num_before)

    path, _, _ = llama
    assert on_master(path, 1, work)


def test_a_stop_that_does_not_wait_leaves_the_step_its_attention(llama, on_master):
    """It was given back while the thread was in a step, so its other layers had another."""

    def work(model):
        manager = model.init_continuous_batching(GREEDY)
        manager.warmup()
        is_in_step, may_go_on = threading.Event(), threading.Event()

        def wait(*_):
            is_in_step.set()
            may_go_on.wait(20)

        model.register_forward_pre_hook(wait)
        manager.start()
        manager.add_request([5, 6])
        assert is_in_step.wait(20)
        thread = manager._generation_thread
        manager.stop(block=False)
        assert model.config._attn_implementation != "sdpa"
        with pytest.raises(drumline.DrumlineError, match="is stopping"):
            manager.add_request([5])
        may_go_on.set()
        thread.join(20)
        assert model.config._attn_implementation == "sdpa"
        assert "stop() did not wait" in manager.get_result().error

    on_master(llama[0], 2, work)


def test_a_manager_that_cannot_be_made_leaves_the_layers_as_they_were(llama, on_master):
    def work(model):
        model._batched_ranks.try_once()

        def fail(*_):
            raise KeyError("a processor")

        model._get_logits_processor = fail
        with pytest.raises(KeyError):
            model.init_continuous_batching(GREEDY)
        assert model.config._attn_implementation == "sdpa"

    on_master(llama[0], 2, work)


def test_settings_are_refused_wherever_they_are(llama, on_master, caplog):
    """Those of the generation were dropped, those beside a kept manager not looked at, and a
    scheduler that is not known became another."""
    refused = ContinuousBatchingConfig(use_async_batching=True)
    unknown = ContinuousBatchingConfig(scheduler_type="lifo")
    within = GenerationConfig(**GREEDY.to_diff_dict())
    within.continuous_batching_config = refused

    def work(model):
        for arguments, reason in (
            ((within,), "use_async_batching=True"),
            ((GREEDY, unknown), "'lifo'.* 'fifo', 'prefill_first'"),
        ):
            with pytest.raises(drumline.DrumlineError, match=reason):
                model.init_continuous_batching(*arguments)
        model.generate_batch([[5]], generation_config=GREEDY, persistent_manager=True)
        with pytest.raises(drumline.DrumlineError, match="use_async_batching=True"):
            model.init_continuous_batching(GREEDY, refused)
        with caplog.at_level("INFO", "drumline"):
            kept = model.init_continuous_batching(GREEDY)
        assert "is used again" in caplog.text
        assert kept is model._cached_continuous_batching_manager
        model.destroy_cached_continuous_batching_manager()

    on_master(llama[0], 2, work)


def test_a_model_whose_pages_give_other_logits_is_refused_before_it_gives_a_text(checkpoints):
    """Gemma 3n reads the keys of other layers, and its texts were wrong without a word."""
    kind, config = CAUSAL["gemma3n"]
    _, path = checkpoints.make("gemma3n", kind, **config)

    def rank():
        with drumline.load(path, max_memory=[1 << 30] * 2) as model:
            with pytest.raises(DrumlineError, match=r"use generate\(\)"):
                model.generate_batch([[5, 6, 7]], max_new_tokens=2)
            return model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2).shape

    assert launcher.launch(rank, nprocs=2, launcher="threads", timeout_s=60)[0] == (1, 5)


@pytest.mark.parametrize(
    "recommended",
    [{"repetition_penalty": 9.0}, {"num_beams": 2}, {"no_repeat_ngram_size": 1}],
    ids=lambda recommended: next(iter(recommended)),
)
def test_settings_that_a_checkpoint_recommends_do_not_keep_it_from_being_batched(
    checkpoints, on_master, recommended
):
    """Other tokens than the likeliest were tried in generate(), and so had other logits."""
    kind, config = CAUSAL["llama_tied"]  # which says the last token again
    _, path = checkpoints.make("llama_tied", kind, **config)

    def work(model):
        model.generation_config.update(**recommended)
        model._batched_ranks.try_once()
        assert model.generation_config.to_diff_dict().items() >= recommended.items()

    on_master(path, 2, work)


def test_a_manager_that_is_dropped_leaves_the_layers_as_they_were(llama, on_master):
    """Without a stop(), all later passes and the config kept the attention over pages."""

    def work(model):
        manager = model.init_continuous_batching(GREEDY)
        manager.warmup()
        assert model.config._attn_implementation == "paged_sdpa"
        del manager
        gc.collect()
        model.generate(torch.tensor([[5]]), max_new_tokens=1)
        assert model.config._attn_implementation == "sdpa"

    on_master(llama[0], 2, work)


def test_results_that_came_just_before_the_end_are_given(llama, on_master):
    """A loop looked whether the thread ran, and not whether it had left results."""

    def work(model):
        manager = model.init_continuous_batching(GREEDY)
        names = manager.add_requests([[5], [6]])
        manager.start()
        manager.stop()
        (output,) = manager.request_id_iter(names[1])
        assert output.request_id == names[1]
        assert [output.request_id for output in manager] == [names[0]]

    on_master(llama[0], 2, work)
