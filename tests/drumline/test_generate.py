"""generate() over several ranks gives the tokens of one process, whatever is asked of it."""

from __future__ import annotations

import copy
import pickle
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import tokenizers
import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    QuantizedCache,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    pipeline,
)
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor
from transformers.generation.streamers import BaseStreamer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from drumline import DrumlineError
from drumline.kv_cache.owner import CacheRegistry
from tests.cases import soak, soak_all
from tests.drumline.conftest import LLAMA


def prompt(batch: int, padded: bool = False, length: int = 9) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    if padded:
        for row in range(1, batch):
            mask[row, : 2 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def tokens(model: Any, batch: int = 1, padded: bool = False, **options: Any) -> list[list[int]]:
    torch.manual_seed(11)
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    return model.generate(**prompt(batch, padded), **options).tolist()


@pytest.mark.parametrize(
    ("nprocs", "family"), [(3, "llama"), (2, "gpt2"), soak(2, "llama"), soak(3, "gpt2")]
)
def test_greedy_and_sampled_tokens_equal_those_of_one_process(
    checkpoints, on_master, family, nprocs
):
    def work(model):
        return [
            tokens(model, batch, padded, do_sample=sample)
            for batch, padded in ((1, False), (4, False), (4, True))
            for sample in (False, True)
        ]

    plain, path = getattr(checkpoints, family)()
    assert on_master(path, nprocs, work) == work(plain)


def beams(model):
    return tokens(model, 3, num_beams=4)


def beams_of_a_padded_batch(model):
    return tokens(model, 3, padded=True, num_beams=4, num_return_sequences=3)


def sampled_beams(model):
    return tokens(model, 3, padded=True, num_beams=3, do_sample=True)


def several_sequences_of_each_prompt(model):
    return tokens(model, 2, num_return_sequences=3, do_sample=True)


def no_cache_at_all(model):
    return tokens(model, 2, padded=True, use_cache=False)


def a_static_cache(model):
    return tokens(model, 1, cache_implementation="static")


def a_static_cache_and_a_padded_batch(model):
    return tokens(model, 3, padded=True, cache_implementation="static")


def prompt_lookup(model):
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    return model.generate(
        input_ids=ids, max_new_tokens=16, do_sample=False, prompt_lookup_num_tokens=3
    ).tolist()


def a_prompt_in_chunks(model):
    return tokens(model, 2, padded=True, prefill_chunk_size=4)


def a_prompt_in_chunks_and_a_static_cache(model):
    return tokens(model, 2, padded=True, prefill_chunk_size=4, cache_implementation="static")


def logits_of_every_step(model):
    out = model.generate(
        **prompt(2, True),
        max_new_tokens=6,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return [step.tolist() for step in out.logits]


def hidden_states_of_every_layer(model):
    with torch.no_grad():
        out = model(**prompt(2, True), output_hidden_states=True)
    return [state.tolist() for state in out.hidden_states]


def embeddings_in_place_of_tokens(model):
    embeds = model.get_input_embeddings()(prompt(2)["input_ids"])
    return model.generate(inputs_embeds=embeds, max_new_tokens=8, do_sample=False).tolist()


def a_processor_of_logits(model):
    return tokens(
        model, 2, logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])
    )


def a_chat_that_hands_its_cache_back(model):
    cache = DynamicCache(config=model.config)
    ids = prompt(1)["input_ids"]
    for _ in range(3):
        ids = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=5,
            do_sample=False,
            eos_token_id=None,
        )
        ids = torch.cat([ids, torch.tensor([[9, 10]])], dim=-1)
    return ids.tolist()


def a_common_prefix_copied_for_each_prompt(model):
    prefix = prompt(1)["input_ids"]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prefix, past_key_values=cache, use_cache=True)
    results = []
    for ending in ([[9, 10]], [[11, 12, 13]]):
        ids = torch.cat([prefix, torch.tensor(ending)], dim=-1)
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=copy.deepcopy(cache),
            max_new_tokens=6,
            do_sample=False,
        )
        results.append(out.tolist())
    return results


def a_cache_cropped_by_hand(model):
    ids = prompt(1)["input_ids"]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
        cache.crop(-4)
        assert cache.get_seq_length() == 5
        return model(ids[:, 5:7], past_key_values=cache, use_cache=True).logits.tolist()


def a_static_cache_used_again_after_reset(model):
    cache = StaticCache(config=model.config, max_cache_len=32)
    first = tokens(model, 1, past_key_values=cache)
    cache.reset()
    return first, tokens(model, 1, past_key_values=cache)


def contrastive_search_as_a_function_of_ones_own(model):
    """transformers has it on the Hub only; it repeats and selects rows, and reads hidden states."""

    def search(model, input_ids, **_):
        cache = DynamicCache(config=model.config)
        step = {"past_key_values": cache, "use_cache": True, "output_hidden_states": True}
        out = model(input_ids, **step)
        seen, scores = out.hidden_states[-1], out.logits[:, -1]
        for _ in range(6):
            likely, words = scores.softmax(-1).topk(3)
            cache.batch_repeat_interleave(3)
            out = model(words.view(-1, 1), **step)
            states, before = out.hidden_states[-1], seen.repeat_interleave(3, dim=0)
            similarity = torch.cosine_similarity(states, before, dim=-1).amax(-1).view(-1, 3)
            best = (0.4 * likely - 0.6 * similarity).argmax(-1)
            rows = torch.arange(len(best)) * 3 + best
            cache.batch_select_indices(rows)
            seen = torch.cat([seen, states[rows]], dim=1)
            scores = out.logits[rows, -1]
            input_ids = torch.cat([input_ids, words.gather(1, best[:, None])], dim=1)
        return input_ids

    return tokens(model, 2, custom_generate=search)


def quantized_keys_and_values(model):
    quantized = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    greedy = tokens(model, 3, padded=True, **quantized)
    return greedy, tokens(model, 3, padded=True, num_beams=3, **quantized)


def two_batches_of_different_size_in_turn(model):
    return tokens(model, 3, padded=True), tokens(model, 1), tokens(model, 3, padded=True)


def a_draft_model_that_assists(model):
    draft = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": 1}))
    return tokens(model, 1, assistant_model=draft.eval())


def a_streamer_that_sees_every_token(model):
    streamer = Collector()
    found = tokens(model, 1, streamer=streamer)
    assert streamer.seen == found[0]
    return found


def a_pipeline(model):
    steps = pipeline("text-generation", model=model, tokenizer=Digits())
    return steps("7 8 9", max_new_tokens=6, do_sample=False)


def generations_in_several_threads(model):
    """Each thread with a cache of its own; the tokens of one must not leak into another."""

    def talk(length):
        ids = prompt(1, length=length)["input_ids"]
        return model.generate(ids, max_new_tokens=10, do_sample=False).tolist()

    with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        return list(threads.map(talk, [5, 9, 6, 7, 8, 9]))


def criteria_that_stop(model):
    class AfterTwelve(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 12)

    return tokens(model, 2, stopping_criteria=StoppingCriteriaList([AfterTwelve()]))


def a_tokenizer_for_stop_strings(model):
    """generate() hands it on to every layer, and it could not be sent: the server of transformers
    failed at the first request."""
    return tokens(model, 2, tokenizer=Digits())


class Collector(BaseStreamer):
    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.extend(value.flatten().tolist())

    def end(self):
        pass


def Digits():
    """A tokenizer whose words are numbers."""
    words = {str(number): number for number in range(64)}
    words["[UNK]"] = 64
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="0", eos_token="2")


FEATURES = [
    a_draft_model_that_assists,
    a_streamer_that_sees_every_token,
    a_pipeline,
    generations_in_several_threads,
    a_tokenizer_for_stop_strings,
    criteria_that_stop,
    beams,
    beams_of_a_padded_batch,
    sampled_beams,
    several_sequences_of_each_prompt,
    no_cache_at_all,
    a_static_cache,
    a_static_cache_and_a_padded_batch,
    prompt_lookup,
    a_prompt_in_chunks,
    a_prompt_in_chunks_and_a_static_cache,
    logits_of_every_step,
    hidden_states_of_every_layer,
    embeddings_in_place_of_tokens,
    a_processor_of_logits,
    a_chat_that_hands_its_cache_back,
    a_common_prefix_copied_for_each_prompt,
    a_cache_cropped_by_hand,
    a_static_cache_used_again_after_reset,
    quantized_keys_and_values,
    contrastive_search_as_a_function_of_ones_own,
    two_batches_of_different_size_in_turn,
]
COVERED = [  # each by another one that does this and more, or by test_uses.py
    beams,
    sampled_beams,
    a_static_cache,
    a_prompt_in_chunks,
    a_processor_of_logits,
    criteria_that_stop,
    several_sequences_of_each_prompt,
]
IN_CI = [feature for feature in FEATURES if feature not in COVERED]


@pytest.mark.parametrize("nprocs", [3, soak(2)])
@pytest.mark.parametrize(
    "feature", soak_all(FEATURES, but=IN_CI), ids=lambda feature: feature.__name__
)
def test_generate_is_exact_with(checkpoints, on_master, feature, nprocs):
    plain, path = checkpoints.llama()
    assert on_master(path, nprocs, feature) == feature(plain)


def test_a_cache_filled_elsewhere_is_refused(checkpoints, on_master):
    """Its keys would be used by the master's layers alone, and the tokens be silently wrong."""

    def work(model):
        layers = [(torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 8)) for _ in range(6)]
        with torch.no_grad(), pytest.raises(DrumlineError, match="came with 5 tokens in layer 3"):
            model(torch.tensor([[7]]), past_key_values=DynamicCache(layers))
        return tokens(model)

    plain, path = checkpoints.llama()
    assert on_master(path, 2, work) == tokens(plain)


def cut(cache):
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :-3], layer.values[:, :, :-3]


def cut_rows(cache):
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:1], layer.values[:1]


BY_HAND = {
    "cropped layers": lambda cache: [layer.crop(-3) for layer in cache.layers],
    "cut keys": cut,
    "cut rows": cut_rows,
    "empty layers": lambda cache: [layer.reset() for layer in cache.layers],
}


def set_a_token(layer):
    layer.keys[:, :, 2] = 1


WRITES = [
    lambda layer: layer.keys.zero_(),
    lambda layer: layer.values.copy_(layer.values),
    lambda layer: layer.keys.data.fill_(1),
    set_a_token,
]
"""Into memory that stays the same, so that nobody could tell later."""


def test_an_operation_that_fails_here_fails_nobody_elses_call(checkpoints, on_master):
    def work(model):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt(1)["input_ids"], past_key_values=cache)
            with pytest.raises(IndexError):
                cache.batch_select_indices(torch.tensor([7]))
            with pytest.raises(DrumlineError, match="empty cache"):
                model(prompt(1)["input_ids"], past_key_values=cache)
        return tokens(model)

    plain, path = checkpoints.llama()
    assert on_master(path, 2, work) == tokens(plain)


def test_a_quantized_cache_is_not_cut_in_part(checkpoints, on_master):
    def work(model):
        cache = QuantizedCache("fp8", model.config)
        with torch.no_grad():
            model(prompt(2)["input_ids"], past_key_values=cache)
        with pytest.raises(DrumlineError, match=r"crop\(\) of a quantized cache"):
            cache.crop(-2)
        return cache.get_seq_length()

    assert on_master(checkpoints.llama()[1], 2, work) == 9


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_layers_of_a_cache_changed_by_hand_are_refused(checkpoints, on_master, kind):
    """Their ranks would not hear of it and keep what was cut, and the tokens be silently wrong."""

    def filled(model):
        cache = StaticCache(config=model.config, max_cache_len=20)
        cache = DynamicCache(config=model.config) if kind == "dynamic" else cache
        model(**prompt(2), past_key_values=cache)
        return cache

    def work(model):
        for change in BY_HAND.values() if kind == "dynamic" else ():
            cache = filled(model)
            change(cache)
            rows = cache.layers[0].keys.shape[0] if cache.layers[0].keys is not None else 2
            for use in (
                lambda: model(torch.full((rows, 1), 7), past_key_values=cache),  # noqa: B023
                lambda: cache.batch_repeat_interleave(2),  # noqa: B023
            ):
                with pytest.raises(DrumlineError, match=r"layer 3 .* by hand.*cache\.crop"):
                    use()
            cache.reset()
            model(**prompt(2), past_key_values=cache)
        cache = filled(model)
        for write in WRITES:
            with pytest.raises(DrumlineError, match="on another rank, where they stay"):
                write(cache.layers[5])
        keys = torch.ones(2, 2, 1, 8)
        with pytest.raises(DrumlineError, match="call the model with the tokens"):
            cache.update(keys, keys, 3)
        return tokens(model)

    plain, path = checkpoints.llama()
    with torch.no_grad():
        assert on_master(path, 2, torch.no_grad()(work)) == tokens(plain)


def test_five_ranks_are_exact(checkpoints, on_master):
    def work(model):
        return beams_of_a_padded_batch(model), a_static_cache_and_a_padded_batch(model)

    device_map = {"": 0, **{f"model.layers.{i}": i for i in range(5)}}
    plain, path = checkpoints.llama()
    assert on_master(path, 5, work, device_map=device_map) == work(plain)


@pytest.mark.parametrize("disable_mmap", [False, True], ids=["mapped", "aligned"])
def test_every_bit_of_the_logits_is_that_of_one_process_with_weights_that_lie_the_same(
    checkpoints, on_master, disable_mmap
):
    """Sums over rows of odd sizes depend on where in memory these begin, as in a mapped file."""
    odd = {"vocab_size": 61, "hidden_size": 52, "intermediate_size": 91, "num_attention_heads": 2}
    plain, path = checkpoints.make("odd sizes", "LlamaForCausalLM", **{**LLAMA, **odd})
    reference = type(plain).from_pretrained(path, dtype=torch.float32)
    if disable_mmap:
        for weight in reference.parameters():
            weight.data = weight.data.clone()
            assert weight.data_ptr() % 64 == 0
    tokens = torch.arange(3, 60)[None]

    @torch.no_grad()
    def is_equal(model):  # with as many threads for both
        return torch.equal(model(tokens).logits, reference(tokens).logits)

    assert on_master(path, 3, is_equal, dtype=torch.float32, disable_mmap=disable_mmap)


def test_layers_placed_back_and_forth_are_exact(checkpoints, on_master):
    """A token passes the ring once for each time that the layers go back to an earlier rank."""
    ranks = [1, 0, 2, 1, 0, 2]
    device_map = {"": 0, **{f"model.layers.{i}": rank for i, rank in enumerate(ranks)}}
    plain, path = checkpoints.llama()
    found = on_master(path, 3, beams_of_a_padded_batch, device_map=device_map)
    assert found == beams_of_a_padded_batch(plain)


@pytest.mark.parametrize("part", ["model.embed_tokens", "model.norm", "lm_head"])
def test_a_part_around_the_layers_may_be_elsewhere_too(checkpoints, on_master, part):
    device_map = {"": 0, part: 1, "model.layers.3": 1}
    plain, path = checkpoints.llama()
    found = on_master(path, 2, beams_of_a_padded_batch, device_map=device_map)
    assert found == beams_of_a_padded_batch(plain)


def test_hidden_states_that_nobody_holds_stay_where_they_are(checkpoints, on_master):
    """Every one of them came back: the calls that were written down held them."""

    def work(model):
        ring, sizes = model._driver.ring, []
        receive = ring.receive

        def counting(*how):
            reply = receive(*how)
            sizes.append(len(reply.tensors))
            return reply

        ring.receive = counting
        tokens(model)
        held = len(sizes)
        with torch.no_grad():
            for _ in range(2):  # the first time, it is learnt what the layers return
                model(**prompt(1), output_hidden_states=True)
        return sizes[-1], sizes[held - 6 : held]

    kept, decoded = on_master(checkpoints.llama()[1], 2, work)
    assert decoded == [1] * 6
    assert kept == 3


def test_a_norm_after_remote_layers_is_given_plain_memory(checkpoints, on_master):
    """Each operation of it on a lazy tensor took longer than all of them on a plain one."""

    def work(model):
        kinds = []
        model.model.norm.register_forward_pre_hook(lambda _, given: kinds.append(type(given[0])))
        tokens(model)
        return set(kinds)

    assert on_master(checkpoints.llama()[1], 2, work) == {torch.Tensor}


READS = {
    "tolist": lambda state: state.tolist(),
    "numpy": lambda state: state.cpu().numpy().tolist(),
    "array": lambda state: numpy.asarray(state).tolist(),
    "dlpack": lambda state: torch.from_dlpack(state).tolist(),
    "deepcopy": lambda state: copy.deepcopy(state).tolist(),
    "pickle": lambda state: pickle.loads(pickle.dumps(state)).tolist(),
    "memory": lambda state: state.share_memory_().data_ptr() > 0,
}


@pytest.mark.parametrize("read", READS)
def test_a_hook_reads_the_memory_of_a_hidden_state_that_was_elsewhere(checkpoints, on_master, read):
    """It had no memory here, and some of these ended the process."""

    def work(model):
        seen = []
        hook = model.model.layers[4].register_forward_hook(
            lambda module, given, state: seen.append(READS[read](state))
        )
        with torch.no_grad():
            logits = model(**prompt(2, True)).logits.tolist()
        hook.remove()
        return seen, logits

    plain, path = checkpoints.llama()
    assert on_master(path, 2, work) == work(plain)


@pytest.mark.parametrize("nprocs", [3, soak(2)])
def test_a_decoded_token_is_one_frame_a_hop(checkpoints, on_master, nprocs):
    def work(model):
        tokens(model, 1, max_new_tokens=4, eos_token_id=None)
        link = model._driver.ring.next
        messages, frames = link.num_messages, link.num_frames
        tokens(model, 1, max_new_tokens=33, eos_token_id=None)
        return link.num_messages - messages, link.num_frames - frames

    messages, frames = on_master(checkpoints.llama()[1], nprocs, work)
    assert messages == 33
    assert frames <= 35  # the prompt is longer than a token, and may need a second frame


def test_caches_are_freed_on_their_ranks_with_the_masters(checkpoints, on_master, monkeypatch):
    registries = []
    build = CacheRegistry.__init__

    def remember(self, config):
        build(self, config)
        registries.append(self)

    monkeypatch.setattr(CacheRegistry, "__init__", remember)

    def work(model):
        for _ in range(3):
            tokens(model, 2)
        with torch.no_grad():
            model(prompt(1)["input_ids"], use_cache=False)  # takes the news along
        return [len(caches.by_number) for caches in registries]

    assert on_master(checkpoints.llama()[1], 3, work) == [0, 0]


def test_a_rank_holds_what_one_layer_is_given_and_nothing_between_two_passes(
    checkpoints, on_master, monkeypatch
):
    held, counts, forward = [], [], LlamaDecoderLayer.forward

    def noted(self, hidden, *args, **kwargs):
        if threading.current_thread().name != "rank-1":
            return forward(self, hidden, *args, **kwargs)
        held.append(weakref.ref(hidden))
        counts.append(num_held() - 1)  # beside the tensors of the message
        return forward(self, hidden, *args, **kwargs)

    def num_held():
        return sum(ref() is not None for ref in held)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", noted)

    def work(model):
        with torch.no_grad():
            for _ in range(2):  # the first one asks a layer by itself
                model(**prompt(1))
        deadline = time.monotonic() + 20
        while num_held() and time.monotonic() < deadline:
            time.sleep(0.01)
        return num_held()

    assert on_master(checkpoints.llama()[1], 2, work) == 0
    assert len(counts) == 6 and max(counts) <= 1


def test_attention_weights_are_refused_rather_than_returned_in_part(checkpoints, on_master):
    def work(model):
        with pytest.raises(DrumlineError, match="output_attentions"):
            model(**prompt(1), output_attentions=True)

    on_master(checkpoints.llama()[1], 2, work, attn_implementation="eager")


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_keys_on_another_rank_can_be_counted_but_not_read(checkpoints, on_master, kind):
    def work(model):
        cache = DynamicCache(config=model.config)
        if kind == "static":
            cache = StaticCache(config=model.config, max_cache_len=20)
        with torch.no_grad():
            model(**prompt(2), past_key_values=cache)
        assert cache.get_seq_length(5) == 9 and cache.layers[5].keys.shape[0] == 2
        assert cache.layers[0].keys.float().abs().sum() > 0  # of a layer that is here
        assert cache.layers[5].keys.shape == cache.layers[0].keys.shape  # one head of width one
        assert "rank 1" in f"{cache.layers[5].keys}{cache.layers[5].values!r}"  # it raised
        for read in (torch.sum, torch.Tensor.float, torch.Tensor.tolist):
            with pytest.raises(DrumlineError, match="another rank"):
                read(cache.layers[5].keys)

    on_master(checkpoints.llama()[1], 2, work)
