"""generate() over several ranks gives the tokens of one process, whatever is asked of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessorList, StaticCache
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

RANKS = [2, 3]


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


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("nprocs", RANKS)
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


def a_conversation_that_hands_its_cache_back(model):
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


def two_batches_of_different_size_in_turn(model):
    return tokens(model, 3, padded=True), tokens(model, 1), tokens(model, 3, padded=True)


FEATURES = [
    beams,
    beams_of_a_padded_batch,
    sampled_beams,
    several_sequences_of_each_prompt,
    no_cache_at_all,
    a_static_cache,
    a_static_cache_and_a_padded_batch,
    prompt_lookup,
    a_prompt_in_chunks,
    logits_of_every_step,
    hidden_states_of_every_layer,
    embeddings_in_place_of_tokens,
    a_processor_of_logits,
    a_conversation_that_hands_its_cache_back,
    a_common_prefix_copied_for_each_prompt,
    a_cache_cropped_by_hand,
    a_static_cache_used_again_after_reset,
    two_batches_of_different_size_in_turn,
]


@pytest.mark.parametrize("nprocs", RANKS)
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
def test_generate_is_exact_with(checkpoints, on_master, feature, nprocs):
    plain, path = checkpoints.llama()
    assert on_master(path, nprocs, feature) == feature(plain)
