"""The bounds of the fields of files that anyone may have written: one table for all formats.

GGUF["version"].check(version)        # FieldError: version=7, which is not an integer from 2 to 3
ADAPTER["r"].check(content["r"], "adapter_config.json")

A reader checks a field before it uses it: before it reads, allocates or counts to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from drumline.contact.loading.generation_fields import MAX_INT64


class FieldError(Exception):
    """A field of a file has a value that it cannot have; readers make it a CheckpointError."""


@dataclass(frozen=True)
class Bound:
    """The numbers that a field may be.

    kind: int for whole numbers alone, float for any finite number. reason: of the limits.
    """

    name: str
    kind: type[int] | type[float]
    least: float
    most: float
    reason: str

    def holds(self, value: Any, most: float = math.inf) -> bool:
        """True for a number within the bounds; NaN never is."""
        is_number = type(value) is int or (type(value) is float and self.kind is float)
        return is_number and self.least <= value <= min(most, self.most)

    def check(self, value: Any, owner: str = "", most: float = math.inf) -> Any:
        """The value. Raises FieldError unless it is a number within the bounds.

        owner: of the field, such as a tensor. most: a limit that this file sets.
        """
        if not self.holds(value, most):
            noun = "an integer" if self.kind is int else "a number"
            raise FieldError(
                f"{owner}{' has ' if owner else ''}{self.name}={value!r:.60}, which is not {noun} "
                f"from {self.least:g} to {min(most, self.most):g} ({self.reason})"
            )
        return value


def _table(*bounds: Bound) -> Mapping[str, Bound]:
    """By the name of each field; one bound may be that of several, whose names it lists."""
    return {name: replace(bound, name=name) for bound in bounds for name in bound.name.split(", ")}


MAX_LAYERS = 1000
"""More layers than any model has that uses the tensors of one layer for many, as ALBERT does."""
MAX_SIZE = (1 << 31) - 1
"""Of one size of a model, as GGUF's readers hold it."""
MAX_ALIGNMENT = 1 << 16
BITS_32, HUNDREDS = "32 bits, with a sign", "models have a few hundred"
VARIANCE = "it is added to a variance"

LABELS, WORDS = "some name 22,000 labels twice", "some have 65,000 tokens, with eight each"
JSON = _table(
    Bound("config.json, generation_config.json, adapter_config.json", int, 0, 1 << 17, LABELS),
    Bound("chat_template.json, special_tokens_map.json", int, 0, 1 << 17, LABELS),
    Bound("tokenizer_config.json, added_tokens.json", int, 0, 1 << 19, WORDS),
    Bound("index.json", int, 0, 1 << 19, "the largest models have 210,000 tensors"),
    Bound("others", int, 0, 1 << 22, "tokenizers have 800,000 words and merges"),
)
"""The number of values of a file, by its name; those of files that nobody reads are others."""
SAFETENSORS = _table(
    Bound("number of files", int, 0, 1 << 13, "the largest models have a few hundred"),
    Bound("number of values", int, 0, 1 << 20, "eight for each of 100,000 tensors"),
    Bound("header length", int, 0, 100_000_000, "the format's own limit"),
    Bound("dimensions", int, 0, 64, "of a tensor that torch reduces, dim_bitset_size"),
    Bound("size", int, 0, MAX_INT64, "64 bits, with a sign"),
)
GGUF = _table(
    Bound("version", int, 2, 3, "those that llama.cpp reads"),
    Bound("tensor_count", int, 1, 1 << 13, "models have a few thousand tensors"),
    Bound("kv_count", int, 1, 1 << 10, "files have less than a hundred fields"),
    Bound("name length", int, 1, 64, "GGML_MAX_NAME"),
    Bound("key length", int, 1, (1 << 16) - 1, "the format's own limit"),
    Bound("string length", int, 0, 1 << 24, "chat templates have a few thousand bytes"),
    Bound("array length", int, 0, 1 << 12, "of all arrays: one for each layer, or a few names"),
    Bound("number of words", int, 0, 1 << 21, "with their scores, types and merges"),
    Bound("precompiled_charsmap", int, 0, 1 << 18, "sentencepiece's have 240,000 bytes"),
    Bound("n_dims", int, 1, 4, "GGML_MAX_DIMS"),
    Bound("dimension", int, 1, (1 << 48) - 1, "no memory has more elements"),
    Bound("general.alignment", int, 1, MAX_ALIGNMENT, "files use 32"),
    Bound("split.count", int, 0, 1, "a model in several files is merged by llama-gguf-split"),
)
GGUF_MODEL = _table(
    Bound("block_count, decoder_block_count", int, 1, MAX_SIZE, "each layer has tensors"),
    Bound("context_length, embedding_length, vocab_size", int, 1, MAX_SIZE, BITS_32),
    Bound("feed_forward_length, attention.sliding_window", int, 0, MAX_SIZE, BITS_32),
    Bound("attention.head_count, attention.head_count_kv", int, 0, 1 << 16, HUNDREDS),
    Bound("expert_count, expert_used_count", int, 0, 1 << 16, HUNDREDS),
    Bound("attention.key_length, attention.value_length", int, 1, 1 << 16, HUNDREDS),
    Bound("attention.layer_norm_rms_epsilon, attention.layer_norm_epsilon", float, 0, 1, VARIANCE),
    Bound("rope.dimension_count", int, 1, 1 << 16, "at most the size of a head"),
    Bound("rope.freq_base", float, 1e-3, 1e30, "a base of powers"),
)
"""Fields of a model in a GGUF file, after the name of its architecture."""
ADAPTER = _table(
    Bound("r", int, 1, 1 << 20, "the number of rows of lora_A"),
    Bound("lora_alpha", float, -1e6, 1e6, "a factor of the update"),
    Bound("lora_dropout", float, 0, 1, "a probability"),
)
QUANTIZATION = _table(
    Bound("bits, num_bits", int, 1, 32, "of a word of 32"),
    Bound("group_size", int, -1, MAX_SIZE, "-1 is a whole row"),
    Bound("weight_block_size, block_structure", int, 1, MAX_SIZE, BITS_32),
)
"""Fields of quantization_config, and of the groups in it; null is as if one were not there."""
CONFIG: Mapping[str, Bound | None] = {
    "pruned_heads": None,
    **_table(
        Bound("eps, epsilon", float, 0, 1, VARIANCE),
        Bound("rope_theta", float, 1e-3, 1e30, "a base of powers"),
        Bound("query_pre_attn_scalar", float, 1e-30, 1e30, "its root divides"),
        Bound("n_head, head_dim, heads", int, 0, 1 << 16, HUNDREDS),
        Bound("hidden_size", int, 1, MAX_SIZE, BITS_32),
        Bound("intermediate_size, vocab_size", int, 0, MAX_SIZE, BITS_32),
        Bound("max_position_embeddings", float, 0, MAX_SIZE, BITS_32),
        Bound("dropout, pdrop, prob, layerdrop", float, 0, 1, "a probability"),
        Bound("window", int, 0, MAX_SIZE, "a number of tokens"),
        Bound("num_labels", int, 0, 100_000, "transformers makes two names for each"),
    ),
}
"""Fields of config.json by their names, or by the last words of them; None: not a number.

A value may be null, or true or false where only the last word is here.
"""
PER_LAYER = {"heads", "intermediate_size", "window"}
"""Those that may be a list with one for each layer."""
OF_TYPE = {
    int: Bound("integer", int, -MAX_INT64, MAX_INT64, "torch multiplies with no larger one"),
    float: Bound("number", float, -math.inf, math.inf, "with NaN, all would be NaN"),
}
"""Those of a field of config.json that has no other bound."""
TOKEN_ID = Bound("token id", int, 0, MAX_SIZE, "an index into the vocabulary")
