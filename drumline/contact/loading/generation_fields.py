"""The kinds of values that fields of generation_config.json have.

misfit({"num_beams": "2"})                 # "num_beams='2', which is not an integer of 32 bits"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

MAX_INTEGER = (1 << 31) - 1
MAX_INT64 = (1 << 63) - 1


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) <= MAX_INTEGER


def _is_number(value: Any) -> bool:
    """True for what torch can multiply with."""
    is_integer = type(value) is int and abs(value) <= MAX_INT64
    return is_integer or (type(value) is float and math.isfinite(value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool)


def _or_list_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def is_one_or_list(value: Any) -> bool:
        return accepts(value) or (isinstance(value, list) and all(map(accepts, value)))

    return is_one_or_list


def _is_list_of_integers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_integer, value))


def _is_decay(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


GENERATION: Mapping[tuple[str, Callable[[Any], bool]], tuple[str, ...]] = {
    ("true or false", _is_boolean): (
        *("do_sample", "use_cache", "use_mtp", "renormalize_logits", "remove_invalid_values"),
        *("token_healing", "output_attentions", "output_hidden_states", "output_scores"),
        *("output_logits", "return_dict_in_generate", "is_assistant", "disable_compile"),
        *("low_memory",),
    ),
    ("true, false or a text", lambda value: isinstance(value, bool | str)): ("early_stopping",),
    ("an integer of 32 bits", _is_integer): (
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "top_k"),
        *("max_cache_len", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
        *("num_return_sequences", "num_beam_groups", "prefill_chunk_size", "pad_token_id"),
        *("forced_bos_token_id", "num_assistant_tokens", "prompt_lookup_num_tokens"),
        *("max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
        *("target_lookbehind",),
    ),
    ("an integer of 32 bits, or a list of them", _or_list_of(_is_integer)): (
        *("bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id"),
    ),
    ("a list of integers of 32 bits", _is_list_of_integers): (
        *("suppress_tokens", "begin_suppress_tokens"),
    ),
    ("a finite number of 64 bits", _is_number): (
        *("max_time", "temperature", "top_p", "min_p", "top_h", "typical_p", "length_penalty"),
        *("epsilon_cutoff", "eta_cutoff", "repetition_penalty", "encoder_repetition_penalty"),
        *("guidance_scale", "penalty_alpha", "diversity_penalty"),
        *("assistant_confidence_threshold", "assistant_ensemble_weight"),
    ),
    ("a text", _is_text): (
        *("cache_implementation", "num_assistant_tokens_schedule", "speculation_type"),
    ),
    ("a text, or a list of them", _or_list_of(_is_text)): ("stop_strings",),
    ("a list of two numbers", _is_decay): ("exponential_decay_length_penalty",),
    ("a list", _is_list): ("bad_words_ids", "force_words_ids", "constraints"),
}
"""Kinds of values that fields of generation_config.json have, and the fields; null is none."""


def misfit(content: Mapping[str, Any]) -> str:
    """A field of generation_config.json that is not of its kind, in words; "" if all are.

    generate() reads them one by one, and comes to whatever their values do there.
    """
    for (noun, accepts), names in GENERATION.items():
        for name in names:
            if (value := content.get(name)) is not None and not accepts(value):
                return f"{name}={value!r:.60}, which is not {noun}"
    return ""
