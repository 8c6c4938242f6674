"""Options of generate(): under which a row's tokens depend on that row alone, and when it stops.

An option that is not listed may couple rows, so a batch with one is generated whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from drumline.contact import transformers_api as api
from drumline.contact.caches import is_cache

USUAL: dict[str, tuple[Any, ...]] = {
    "assistant_early_exit": (None,),
    "assistant_model": (None,),
    "cache_implementation": (None, "dynamic"),
    "constraints": (None,),
    "continuous_batching_config": (None,),
    "custom_generate": (None,),
    "do_sample": (None, False),
    "dola_layers": (None,),
    "force_words_ids": (None,),
    "guidance_scale": (None, 1, 1.0),
    "logits_processor": (None,),
    "max_time": (None,),
    "negative_prompt_attention_mask": (None,),
    "negative_prompt_ids": (None,),
    "num_beam_groups": (None, 1),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None,),
    "prefix_allowed_tokens_fn": (None,),
    "prompt_lookup_num_tokens": (None,),
    "return_dict_in_generate": (None, False),
    "stop_strings": (None,),
    "stopping_criteria": (None,),
    "streamer": (None,),
    "synced_gpus": (None, False),
    "token_healing": (None, False),
    "use_mtp": (None, False),
    "watermarking_config": (None,),
}
"""The values of an option that leave the rows apart; with others they may know of each other."""

ALONE = {
    "assistant_confidence_threshold",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "attention_mask",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_config",
    "compile_config",
    "decoder_start_token_id",
    "disable_compile",
    "diversity_penalty",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "eos_token_id",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "input_ids",
    "inputs_embeds",
    "is_assistant",
    "length_penalty",
    "logits_to_keep",
    "low_memory",
    "max_cache_len",
    "max_length",
    "max_matching_ngram_size",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "position_ids",
    "prefill_chunk_size",
    "remove_invalid_values",
    "renormalize_logits",
    "repetition_penalty",
    "return_dict",
    "sequence_bias",
    "speculation_type",
    "suppress_tokens",
    "target_lookbehind",
    "temperature",
    "tokenizer",
    "top_h",
    "top_k",
    "top_p",
    "transformers_version",
    "typical_p",
    "use_cache",
    "use_model_defaults",
}
"""Options that concern each row by itself, or all in the same way, whatever their value."""


def keeps_rows_apart(options: Mapping[str, Any], *defaults: Any) -> bool:
    """True if generate() with these options chooses the tokens of each row for itself.

    defaults: the configs that hold where an option is not given; all must be usual. Sampling is
    not: all rows share one stream of random numbers.
    """
    if unread_options(options, *defaults) or any(map(is_cache, options.values())):
        return False
    return all(
        value in usual
        for name, usual in USUAL.items()
        for value in (
            [options[name]] if name in options else [getattr(d, name, None) for d in defaults]
        )
    )


def unread_options(options: Mapping[str, Any], *defaults: Any) -> list[str]:
    """The options that were set and are not listed here: what they do to rows is not known."""
    names = {name for name, value in options.items() if value is not None and not is_cache(value)}
    for config in [config for config in defaults if config is not None]:
        kind: Any = type(config)
        names |= {name for name in _option_names(kind) if getattr(config, name, None) is not None}
    return sorted(names - USUAL.keys() - ALONE)


@functools.cache
def _option_names(kind: Callable[[], Any]) -> frozenset[str]:
    """The options that a config of generate() has; a file may hold more, which nothing reads."""
    return frozenset(name for name in vars(kind()) if not name.startswith("_"))


Criterion: TypeAlias = api.StoppingCriteria
"""Called with the tokens so far and their scores; returns which rows are done."""

Criteria: TypeAlias = list[Criterion]
"""Of the kind that transformers makes, which can be called."""

DETERMINISTIC = (api.MaxLengthCriteria, api.EosTokenCriteria, api.StopStringCriteria)


def wrap_undetermined(criteria: Criteria, wrap: Callable[[Any], Any]) -> Criteria:
    """The criteria, each wrapped unless it depends on tokens alone.

    Others may read a clock, or be of the script's own code."""
    return type(criteria)(item if type(item) in DETERMINISTIC else wrap(item) for item in criteria)
