"""Sixteen uses of a model over ranks: the tokens of one process, and the fast path if there is one.

A release of transformers that renames what drumline looks at makes a use slow and not wrong, and
nobody notices; the sizes here are those from which a user's batch or prompt is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from drumline.pipeline.microbatch_runner import MicrobatchRunner

Use = Callable[[Any], Any]
GREEDY = {"do_sample": False, "max_new_tokens": 4}


def ids(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(3, 64, (rows, tokens), generator=torch.Generator().manual_seed(5))


def generate(rows: int, tokens: int, **options: Any) -> Use:
    def use(model: Any) -> Any:
        torch.manual_seed(3)
        inputs = {"input_ids": ids(rows, tokens)}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return model.generate(**inputs, **{**GREEDY, **options}).tolist()

    return use


def with_cache(kind: type, *size: int) -> Use:
    def use(model: Any) -> Any:
        cache = kind(model.config, *size) if size else kind(config=model.config)
        with torch.no_grad():
            model(input_ids=ids(8, 128), past_key_values=cache, use_cache=True)
            logits = model(input_ids=ids(8, 1), past_key_values=cache, use_cache=True).logits
        return logits.argmax(-1).tolist(), int(cache.get_seq_length())

    return use


def padded(model: Any) -> Any:
    inputs = {"input_ids": ids(8, 128), "attention_mask": torch.ones(8, 128, dtype=torch.long)}
    inputs["attention_mask"][::2, :9] = 0
    return model.generate(**inputs, **GREEDY).tolist()


def without_cache(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=ids(8, 128), use_cache=False).logits.argmax(-1).tolist()


def with_scores(model: Any) -> Any:
    options = {"return_dict_in_generate": True, "output_scores": True}
    found = model.generate(ids(1, 9), **GREEDY, **options)
    return found.sequences.tolist(), [score.argmax(-1).tolist() for score in found.scores]


def from_embeddings(model: Any) -> Any:
    embeddings = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(5))
    return model.generate(inputs_embeds=embeddings, **GREEDY).tolist()


def hidden_states(model: Any) -> Any:
    with torch.no_grad():
        found = model(input_ids=ids(1, 9), output_hidden_states=True)
    return [state.abs().argmax(-1).tolist() for state in found.hidden_states]


def loss(model: Any) -> Any:
    with torch.no_grad():
        return round(float(model(input_ids=ids(2, 9), labels=ids(2, 9)).loss), 3)


IN_GROUPS: dict[str, Use] = {
    "a greedy batch": generate(8, 128),
    "a padded batch": padded,
    "a sampled batch": generate(8, 128, do_sample=True),
    "beams of a batch": generate(4, 128, num_beams=3),
    "a batch with a static cache": generate(8, 128, cache_implementation="static"),
    "a batch without a cache": without_cache,
    "a batch with a cache of the script": with_cache(DynamicCache),
    "a batch with a static cache of the script": with_cache(StaticCache, 130),
    "a long prompt": generate(1, 1100),
}
WHOLE: dict[str, Use] = {
    "a short prompt": generate(1, 9),
    "a short sampled prompt": generate(1, 9, do_sample=True),
    "tokens guessed from the prompt": generate(1, 9, prompt_lookup_num_tokens=3),
    "scores": with_scores,
    "embeddings": from_embeddings,
    "hidden states": hidden_states,
    "a loss": loss,
}


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many groups went round, for each batch or prompt that was cut."""
    counts: list[int] = []
    whole = MicrobatchRunner.map

    def count(self: Any, work: Any, items: Any, *until: Any) -> Any:
        items = list(items)
        counts.append(len(items))
        return whole(self, work, items, *until)

    monkeypatch.setattr(MicrobatchRunner, "map", count)
    return counts


@pytest.mark.parametrize("name", [*IN_GROUPS, *WHOLE])
def test_a_use_has_the_tokens_of_one_process_and_its_fast_path(
    checkpoints, on_master, groups, name
):
    """transformers 5.24 renamed `past_key_values`: tokens were right, and batches never cut."""
    use = {**IN_GROUPS, **WHOLE}[name]
    plain, path = checkpoints.llama()
    assert on_master(path, 2, use) == use(plain)
    assert (name in IN_GROUPS) == any(count > 1 for count in groups)
