"""Groups of rows follow each other round the ring, and no token is another one for it."""

from __future__ import annotations

import itertools
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)

import drumline
import launcher
from drumline import DrumlineError
from drumline.contact.caches import cache_key, cache_of, with_cache, without_caches
from drumline.contact.generate_options import keeps_rows_apart, unread_options
from drumline.contact.passes import BY_ROW, join_chunks, join_rows, undivided_inputs
from drumline.pipeline import microbatch
from drumline.pipeline.microbatch_runner import Cancelled, MicrobatchRunner, MicrobatchThread
from drumline.stages.stage import Stage
from tests.cases import soak
from tests.communicator.backends.nccl import cuda_on_cpu

ROWS = 9


@given(st.integers(1, 200), st.integers(1, 50))
def test_groups_are_all_rows_once_in_order_and_nearly_equal(batch, groups):
    groups = min(batch, groups)
    found = microbatch.rows(batch, groups)
    assert [row for part in found for row in range(batch)[part]] == list(range(batch))
    sizes = {part.stop - part.start for part in found}
    assert len(found) == groups and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", ["rope_parameters", "positions_by_another_name"])
def test_positions_that_grow_with_the_text_keep_a_batch_whole_whatever_their_name(name):
    """Such a pass changes what the next one computes with, so rows must not follow each other."""
    kinds = {
        "dynamic": {"factor": 2.0},
        "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0},
        "linear": {"factor": 2.0},
        "default": {},
    }
    for kind, settings in kinds.items():
        by_layers = {"full_attention": {"rope_type": kind, **settings}}
        for value in (by_layers["full_attention"], by_layers):
            config = LlamaConfig()
            del config.rope_parameters
            setattr(config, name, value)
            assert microbatch.keeps_no_state(config) == (kind in ("linear", "default")), kind
    config.quantization_config = {"activation_scheme": "dynamic"}
    assert microbatch.keeps_no_state(config)


@given(st.integers(1, 500), st.integers(1, 4096), st.integers(2, 16))
def test_a_pass_is_cut_only_into_groups_that_are_worth_it(batch, tokens, stages):
    groups = microbatch.groups_of_pass(batch, tokens, stages)
    assert 1 <= groups <= batch
    assert groups == 1 or batch * tokens >= groups * microbatch.SMALLEST_PASS


@given(st.integers(1, 1 << 18), st.integers(1, 64), st.sampled_from([1, microbatch.ACCELERATED]))
def test_a_prompt_is_cut_only_into_chunks_that_are_worth_it(tokens, stages, scale):
    size, least = (
        microbatch.tokens_of_chunk(tokens, stages, scale),
        microbatch.SMALLEST_PASS * scale,
    )
    if not size:
        assert stages == 1 or tokens < microbatch.MIN_CHUNKS * least
        return
    most = microbatch.MAX_CHUNKS_PER_STAGE * stages
    assert size >= least and microbatch.MIN_CHUNKS <= -(-tokens // size) <= most


dims = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@given(st.integers(2, 6), st.sampled_from([*BY_ROW, "cu_seqlens", "pixel_values"]), dims)
def test_what_is_cut_has_a_row_for_each_sequence(batch, name, shape):
    inputs = {"input_ids": torch.zeros(batch, 3), name: torch.zeros(shape)}
    if undivided_inputs(inputs, batch):
        return
    assert name in BY_ROW and len(shape) in BY_ROW[name]
    parts = [microbatch.take_rows(inputs, group) for group in microbatch.rows(batch, 2)]
    if shape[0] == batch:
        assert torch.equal(torch.cat([part[name] for part in parts]), inputs[name])
    else:
        assert (name, shape[0]) == ("position_ids", 1) and parts[0][name] is inputs[name]


@pytest.mark.parametrize(
    "option",
    [
        {"do_sample": True},
        {"num_beams": 2},
        {"streamer": object()},
        {"return_dict_in_generate": True},
        {"logits_processor": [len]},
        {"max_time": 3.0},
        {"prompt_lookup_num_tokens": 3},
        {"past_key_values": object()},
    ],
    ids=str,
)
def test_a_generation_whose_rows_may_know_of_each_other_is_left_whole(option):
    ordinary = {"input_ids": torch.zeros(9, 3), "max_new_tokens": 4}
    assert keeps_rows_apart(ordinary, None)
    assert not keeps_rows_apart({**ordinary, **option}, None)


def test_a_default_that_the_given_settings_leave_open_counts_too():
    given, own = GenerationConfig(max_new_tokens=4), GenerationConfig(do_sample=True)
    assert not keeps_rows_apart({}, given, own)
    assert keeps_rows_apart({"do_sample": False}, given, own)


def test_an_option_that_was_not_read_keeps_a_batch_whole_and_is_told_once(
    checkpoints, on_master, small, groups
):
    """A number that was not known counted as harmless, so a new option could couple rows unseen."""
    assert unread_options({"max_new_tokens": 4, "new_option": 3}, None) == ["new_option"]
    assert not keeps_rows_apart({"max_new_tokens": 4, "new_option": 3}, None)

    def work(model):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch.no_grad():
                for _ in range(2):
                    model(**prompt(False), use_cache=False, new_option=True)
        return [str(one.message) for one in caught if "drumline" in str(one.message)]

    class TakesMore(LlamaForCausalLM):
        def forward(self, new_option=False, **kwargs):
            return super().forward(**kwargs)

    (told,) = on_master(checkpoints.llama()[1], 2, work, cls=TakesMore)
    assert "rank 0: a pass with new_option is computed whole" in told
    assert not groups


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_is_known_by_its_kind_whatever_a_caller_calls_it(name):
    """The newer name of transformers 5.24 left all batches whole, and the older one raised."""
    inputs = {"input_ids": torch.zeros(9, 3), name: DynamicCache()}
    assert undivided_inputs(inputs, 9) == [] and cache_key(inputs) == name
    assert undivided_inputs({**inputs, "another": DynamicCache()}, 9) == ["another"]
    other = DynamicCache()
    assert with_cache(inputs, other)[name] is other and cache_of(inputs) is not other
    assert list(without_caches(inputs)) == ["input_ids"]


def test_outputs_are_put_together_by_what_they_are():
    cache = DynamicCache()
    parts = [
        {"logits": torch.full((rows, 2, 5), rows), "anything": DynamicCache(), "more": ()}
        for rows in (2, 3)
    ]
    joined = join_rows(parts, cache)
    assert joined["logits"].shape == (5, 2, 5) and joined["anything"] is cache
    assert join_rows([tuple(part.values()) for part in parts], cache)[1] is cache
    with pytest.raises(DrumlineError, match="micro_batches = False"):
        join_rows([{"loss": 3.0}, {"loss": 3.0}], None)
    chunks = [{"logits": torch.zeros(1, count, 5), "loss": torch.zeros(())} for count in (4, 3)]
    assert join_chunks(chunks, [4, 3])["logits"].shape == (1, 7, 5)


def prompt(padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (ROWS, 7), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    if padded:
        for row in range(ROWS):
            mask[row, : row % 5] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.fixture
def small(monkeypatch):
    """Groups of any size are worth it."""
    monkeypatch.setattr(microbatch, "SMALLEST_PASS", 7)
    monkeypatch.setattr(microbatch, "SMALLEST_STREAM", 2)


@pytest.fixture
def groups(monkeypatch) -> list[int]:
    """How many groups went round, for each batch that was cut."""
    found: list[int] = []
    whole = MicrobatchRunner.map

    def count(self, work, items, *until):
        items = list(items)
        found.append(len(items))
        return whole(self, work, items, *until)

    monkeypatch.setattr(MicrobatchRunner, "map", count)
    return found


def greedy(model: Any) -> Any:
    return [
        model.generate(**prompt(padded), max_new_tokens=12, do_sample=False).tolist()
        for padded in (False, True)
    ]


def sampled(model: Any) -> Any:
    torch.manual_seed(3)
    return model.generate(**prompt(True), max_new_tokens=8, do_sample=True).tolist()


def beams(model: Any) -> Any:
    return model.generate(**prompt(True), max_new_tokens=8, num_beams=3, do_sample=False).tolist()


def a_static_cache(model: Any) -> Any:
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    return model.generate(**prompt(True), **options).tolist()


def one_pass(model: Any) -> Any:
    return model(**prompt(False), use_cache=False).logits


def no_cache(model: Any) -> Any:
    return model.generate(
        **prompt(True), max_new_tokens=4, do_sample=False, use_cache=False
    ).tolist()


@pytest.mark.parametrize("nprocs", [3, soak(2)])
@pytest.mark.parametrize("work", [soak(greedy), sampled, beams, a_static_cache, no_cache])
def test_tokens_of_groups_are_those_of_the_whole(
    checkpoints, on_master, small, groups, work, nprocs
):
    plain, path = checkpoints.llama()
    assert on_master(path, nprocs, work) == work(plain)
    assert groups and min(groups) > 1


def test_windows_that_slide_are_put_together_too(checkpoints, on_master, small, groups):
    plain, path = checkpoints.make(
        "mistral-window",
        "MistralForCausalLM",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=5,
        initializer_range=0.5,
        pad_token_id=0,
    )
    for work in (beams, a_static_cache):
        assert on_master(path, 2, work) == work(plain)
    assert groups


@pytest.mark.parametrize("work", [greedy, soak(no_cache), a_static_cache])
def test_layers_that_do_not_say_where_they_keep_their_keys_are_learned_of_by_each_group(
    checkpoints, on_master, small, groups, work
):
    """The groups of the first call are all under way before the first answer says it."""
    plain, path = checkpoints.make(
        "gpt-neo-groups",
        "GPTNeoForCausalLM",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=6,
        initializer_range=0.4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    remote = {"": 0, **{f"transformer.h.{layer}": 1 for layer in range(4)}}
    assert on_master(path, 2, work, device_map=remote) == work(plain)
    assert groups


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_filled_in_groups_goes_on_as_one(checkpoints, on_master, small, groups, kind):
    def work(model):
        cache = DynamicCache(config=model.config)
        if kind == "static":
            cache = StaticCache(config=model.config, max_cache_len=20)
        inputs = prompt(False)
        with torch.no_grad():
            first = model(**inputs, past_key_values=cache, output_hidden_states=True)
            assert first.past_key_values is cache and int(cache.get_seq_length(5)) == 7
            cache.reorder_cache(torch.arange(ROWS).flip(0))
            mask = torch.ones(ROWS, 8, dtype=torch.long)
            ids = inputs["input_ids"][:, :1]
            then = model(ids, past_key_values=cache, attention_mask=mask)
        return first.logits, torch.stack(first.hidden_states), then.logits

    plain, path = checkpoints.llama()
    for found, wanted in zip(on_master(path, 3, work), work(plain), strict=True):
        torch.testing.assert_close(found, wanted)
    assert groups[0] > 1


def test_batches_stay_whole_if_that_is_wanted(checkpoints, on_master, small, groups):
    def work(model):
        model.micro_batches = False
        return greedy(model)

    plain, path = checkpoints.llama()
    assert on_master(path, 2, work) == greedy(plain)
    assert not groups


def test_rows_that_end_early_are_padded_as_in_the_whole(checkpoints, on_master, small, groups):
    plain, path = checkpoints.llama()
    first = plain.generate(**prompt(False), max_new_tokens=3, do_sample=False)

    def work(model):
        ends = int(first[0, -1])  # the first row ends with its third token
        found = []
        for limit in (12, 40):
            options = {"max_new_tokens": limit, "do_sample": False, "eos_token_id": ends}
            found.append(model.generate(**prompt(False), **options).tolist())
        return found

    assert on_master(path, 2, work) == work(plain)
    assert groups


def test_an_error_in_one_group_is_raised_and_the_model_goes_on(checkpoints, on_master, small):
    def work(model):
        before = greedy(model)
        with pytest.raises(IndexError):
            model.generate(torch.full((ROWS, 7), 1000), max_new_tokens=3, do_sample=False)
        return before, greedy(model)

    before, after = on_master(checkpoints.llama()[1], 2, work)
    assert before == after


@given(st.integers(1, 40), st.integers(0, 9), st.integers(1, 12), st.integers(0, 3))
def test_chunks_are_all_tokens_once_in_order_with_what_came_before(tokens, past, size, keep):
    ids = torch.arange(tokens)[None]
    mask = torch.ones(1, past + tokens)
    inputs = {"input_ids": ids, "attention_mask": mask, "logits_to_keep": keep}
    parts = microbatch.chunks(inputs, past, size)
    assert torch.equal(torch.cat([part["input_ids"] for part in parts], dim=1), ids)
    assert all(part["input_ids"].shape[1] <= size for part in parts)
    seen = past
    for part in parts:
        seen += part["input_ids"].shape[1]
        assert part["attention_mask"].shape[1] == seen
    assert parts[-1]["logits_to_keep"] == keep


@pytest.mark.parametrize("nprocs", [3, soak(2)])
@pytest.mark.parametrize("implementation", [None, "static"])
def test_a_long_prompt_in_chunks_gives_the_same_tokens(
    checkpoints, on_master, monkeypatch, groups, nprocs, implementation
):
    ids = torch.randint(3, 64, (1, 41), generator=torch.Generator().manual_seed(5))
    spans = Spans(monkeypatch)

    def work(model):
        options = {"do_sample": False, "cache_implementation": implementation}
        for _ in range(2):  # the second time it is known what layers return
            spans.overlaps()
            found = model.generate(ids, max_new_tokens=6, **options).tolist()
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            logits = model(input_ids=ids, past_key_values=cache).logits
        return found, logits, spans.overlaps()

    def in_chunks(model):
        model.prefill_chunk = 8
        return work(model)

    plain, path = checkpoints.llama()
    wanted = work(plain)
    found = on_master(path, nprocs, in_chunks)
    assert found[0] == wanted[0]
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-3, atol=1e-4)
    assert groups == [6, 6, 6]
    assert found[2] >= (nprocs > 2)  # the master's own layers are not counted


def test_chunks_overlap_where_the_norm_and_the_head_are_on_the_last_rank(
    checkpoints, on_master, monkeypatch
):
    """Each waited for the answer of the one before, as the norm was the last that it called."""
    spans, ids = Spans(monkeypatch), torch.arange(3, 44)[None]
    last = dict.fromkeys(("model.layers.4", "model.layers.5", "model.norm", "lm_head"), 2)
    device_map = {"": 0, "model.layers.2": 1, "model.layers.3": 1, **last}

    def work(model):
        for model.prefill_chunk in (0, 8, 8):  # first it learns what layers return
            spans.overlaps()
            tokens = model.generate(ids, max_new_tokens=2, do_sample=False).tolist()
        return tokens, spans.overlaps()

    plain, path = checkpoints.llama()
    tokens, overlaps = on_master(path, 3, work, device_map=device_map)
    assert tokens == plain.generate(ids, max_new_tokens=2, do_sample=False).tolist()
    assert overlaps >= 3


WINDOWS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 5,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}


def long_prompt(model: Any) -> Any:
    ids = torch.randint(3, 64, (1, 31), generator=torch.Generator().manual_seed(5))
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
    return model.generate(ids, max_new_tokens=6, **options).tolist()


@pytest.mark.parametrize("nprocs", [3, soak(2)])
def test_a_long_prompt_goes_in_chunks_of_itself(checkpoints, on_master, small, groups, nprocs):
    plain, path = checkpoints.make("mistral-chunks", "MistralForCausalLM", **WINDOWS)
    assert on_master(path, nprocs, long_prompt) == long_prompt(plain)
    assert groups == [5]


def test_a_cache_that_holds_some_chunks_of_a_failed_call_is_refused(
    checkpoints, on_master, small, groups
):
    """The next call with it went on behind them, silently."""
    ids = torch.arange(3, 34)[None]
    wrong = ids.clone()
    wrong[0, 20] = 1000

    @torch.no_grad()
    def work(model):
        cache = DynamicCache(config=model.config)
        with pytest.raises(IndexError):
            model(input_ids=wrong, past_key_values=cache)
        with pytest.raises(DrumlineError, match="start from an empty cache"):
            model(input_ids=ids, past_key_values=cache)
        return long_prompt(model)

    plain, path = checkpoints.llama()
    assert on_master(path, 2, work) == long_prompt(plain)
    assert len(groups) == 3


@pytest.mark.parametrize(
    "family", ["BertLMHeadModel", soak("RemBertForCausalLM"), "MoshiForCausalLM"]
)
def test_a_prompt_whose_tokens_see_more_than_a_cache_says_stays_whole(
    checkpoints, on_master, small, groups, family
):
    plain, path = checkpoints.make(f"{family}-chunks", family, **WINDOWS)
    assert on_master(path, 2, long_prompt) == long_prompt(plain)
    assert not groups


def test_hidden_states_that_the_config_asks_for_are_those_of_all_tokens(
    checkpoints, on_master, small, groups
):
    """Those of the last span came alone, where the logits of only its last token were kept."""
    ids = torch.arange(3, 34)[None]

    @torch.no_grad()
    def work(model):
        cache = DynamicCache(config=model.config)
        model.config.output_hidden_states = True
        output = model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        model.config.output_hidden_states = False
        return [state.shape for state in output.hidden_states]

    plain, path = checkpoints.llama()
    assert on_master(path, 2, work) == work(plain)
    assert not groups


class OwnLlama(LlamaForCausalLM):
    """Whatever it does in its forward, nobody has looked at it."""


def test_a_prompt_for_code_that_is_not_of_transformers_stays_whole(
    checkpoints, on_master, small, groups
):
    plain, path = checkpoints.llama()
    assert on_master(path, 2, long_prompt, cls=OwnLlama) == long_prompt(plain)
    assert not groups


def test_a_prompt_or_batch_that_a_hook_looks_at_stays_whole(checkpoints, on_master, small, groups):
    """The hook saw a part of it at a time, and what it kept was the last."""

    def work(model):
        seen = []
        layer = model.model.layers[5]
        hook = layer.register_forward_hook(lambda *args: seen.append([*args[2].shape[:2]]))
        results = long_prompt(model), greedy(model), seen
        hook.remove()
        return results

    plain, path = checkpoints.llama()
    assert on_master(path, 2, work) == work(plain)
    assert not groups


@pytest.mark.parametrize("work", [greedy, long_prompt, one_pass])
def test_autocast_is_refused_of_a_batch_or_prompt_too(checkpoints, on_master, small, groups, work):
    """Its groups ran in threads, where there is no autocast."""

    def attempt(model):
        refused = pytest.raises(DrumlineError, match="autocast")
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), refused:
            work(model)

    on_master(checkpoints.make("mistral-chunks", "MistralForCausalLM", **WINDOWS)[1], 2, attempt)
    assert not groups


def test_the_groups_of_a_batch_use_the_stream_of_the_thread_that_wants_them(monkeypatch):
    cuda, own = cuda_on_cpu.install(monkeypatch), cuda_on_cpu.Stream()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with cuda.stream(own):
        streams = MicrobatchRunner().map(lambda item: torch.cuda.current_stream(), range(2))
    assert streams == [own, own]


def test_a_group_that_is_dropped_before_its_turn_does_not_begin():
    microbatches, begun = MicrobatchRunner(), []
    thread = MicrobatchThread(microbatches, begun.append, 1, None)
    with microbatches.turn:
        thread.start()
        thread.is_cancelled = True
    thread.join(20)
    assert isinstance(thread.future.exception(), Cancelled) and not begun


def test_chunks_are_not_made_where_layers_come_back_to_the_master(checkpoints, on_master, groups):
    device_map = {"": 0, "model.layers.3": 1}

    def work(model):
        model.prefill_chunk = 4
        return model.generate(prompt(True)["input_ids"][:1], max_new_tokens=4).tolist()

    plain, path = checkpoints.llama()
    assert on_master(path, 2, work, device_map=device_map) == work(plain)
    assert not groups


class Spans:
    """When each stage worked; every piece of work is made long enough to be seen."""

    def __init__(self, monkeypatch):
        self.found: list[tuple[float, float]] = []
        reply = Stage._reply

        def timed(stage, message):
            begun = time.monotonic()
            time.sleep(0.01)
            answer = reply(stage, message)
            self.found.append((begun, time.monotonic()))
            return answer

        monkeypatch.setattr(Stage, "_reply", timed)

    def overlaps(self) -> int:
        """How often a stage began before another, that had begun earlier, was done."""
        spans = sorted(self.found)
        self.found = []
        return sum(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))


def test_several_generations_keep_several_ranks_at_work(checkpoints, on_master, monkeypatch):
    spans = Spans(monkeypatch)

    def talk(model):
        torch.set_num_threads(1)
        ids = prompt(False)["input_ids"][:1]
        return model.generate(ids, max_new_tokens=10, do_sample=False).tolist()

    def work(model):
        alone, overlaps = talk(model), spans.overlaps()
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(talk, [model, model])) == [alone, alone]
        return overlaps, spans.overlaps()

    one, two = on_master(checkpoints.llama()[1], 3, work)
    assert one == 0 and two >= 5


def test_groups_of_a_batch_keep_several_ranks_at_work(checkpoints, on_master, monkeypatch, small):
    spans = Spans(monkeypatch)

    def short(model):
        model.generate(**prompt(False), max_new_tokens=4, do_sample=False)
        return spans.overlaps()

    def work(model):
        for model.micro_batches in (False, True):
            short(model)  # learns what layers return
            yield short(model)

    whole, groups = on_master(checkpoints.llama()[1], 3, lambda model: list(work(model)))
    assert whole == 0 and groups >= 3


def test_logits_that_a_tensor_names_keep_a_prompt_whole():
    """It was asked for its truth, of which several values have none."""
    inputs = {"input_ids": torch.zeros(1, 9), "logits_to_keep": torch.tensor([7, 8])}
    assert not microbatch.may_be_chunked(inputs, 0, 4)


class Bare(nn.Module):
    """A model without a config, of which nothing is known but its parts."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, input_ids, use_cache=None):
        return self.second(self.first(input_ids))


def test_a_long_batch_for_a_module_without_a_config_stays_whole():
    def rank():
        model = Bare().requires_grad_(False)
        with drumline.dispatch(model, {"first": 0, "second": 1}) as split, torch.no_grad():
            return split(input_ids=torch.ones(4, 512, dtype=torch.long), use_cache=False).shape

    shape = launcher.launch(rank, nprocs=2, launcher="threads", timeout_s=60)[0]
    assert shape == (4, 512, 4)
