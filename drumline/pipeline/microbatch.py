"""Splits a batch into micro-batches that follow each other down the stages, so that all work.

Rows of a batch do not know of each other, so groups of them may be computed one after the other
wherever everything that is given has a row for each, or is the same for all. Where that is not
sure, nothing is divided.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from drumline.contact.passes import BY_ROW, undivided_inputs

SMALLEST_PASS = 256
"""Tokens of a group in a long pass: with fewer, a matrix product no longer fills its core."""

SMALLEST_STREAM = 16
"""Rows that are generated together: with fewer, most of the time goes into reading weights."""

ACCELERATED = 16
"""The factor of both on a device that is not a CPU; a guess that rather leaves a batch whole."""

NEVER = 1 << 40

MIN_CHUNKS, MAX_CHUNKS_PER_STAGE = 4, 16
"""Of a prompt: with fewer, the pipeline is half empty; each is a thread on its way."""

GROWING_POSITIONS = frozenset(("dynamic", "longrope"))
"""Kinds of positions that a pass with a longer text changes for all passes after it."""

GROUPS_PER_STAGE = 4
"""The more groups, the shorter are the times in which the pipeline fills and empties."""


def rows(batch: int, groups: int) -> list[slice]:
    """Consecutive, nearly equal groups of all rows."""
    edges = [batch * group // groups for group in range(groups + 1)]
    return [slice(*pair) for pair in itertools.pairwise(edges)]


def groups_of_pass(batch: int, tokens: int, stages: int, scale: int = 1) -> int:
    """The number of groups to split a pass of [batch, tokens] into; 1 leaves it whole.

    scale: ACCELERATED if a stage is on a device that is not a CPU.
    """
    groups = min(batch, GROUPS_PER_STAGE * stages)
    return max(1, min(groups, batch * tokens // (SMALLEST_PASS * scale)))


def tokens_of_chunk(tokens: int, stages: int, scale: int = 1) -> int:
    """The tokens of each part of a prompt that is split along them; 0 leaves it whole."""
    if stages < 2 or tokens < MIN_CHUNKS * SMALLEST_PASS * scale:
        return 0
    return max(SMALLEST_PASS * scale, -(-tokens // (MAX_CHUNKS_PER_STAGE * stages)))


def groups_of_generation(batch: int, stages: int, scale: int = 1) -> int:
    """The number of groups of rows that are generated at the same time, one for each rank."""
    return max(1, min(stages, batch // (SMALLEST_STREAM * scale)))


def shape(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and tokens; (0, 0) if neither tokens nor embeddings are given."""
    main = inputs.get("input_ids")
    main = inputs.get("inputs_embeds") if main is None else main
    if not isinstance(main, torch.Tensor) or main.dim() < 2:
        return 0, 0
    return main.shape[0], main.shape[1]


def take_rows(inputs: Mapping[str, Any], group: slice) -> dict[str, Any]:
    """The inputs of a group of rows; what is the same for all rows stays."""
    return {
        name: value[group] if name in BY_ROW and value is not None and len(value) > 1 else value
        for name, value in inputs.items()
    }


def chunks(inputs: Mapping[str, Any], past: int, size: int) -> list[dict[str, Any]]:
    """The inputs of consecutive spans of at most `size` tokens, behind `past` that are cached.

    Only the last gives the logits that are asked for, unless those of all tokens are.
    """
    _, tokens = shape(inputs)
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    parts = []
    for start in range(0, tokens, size):
        end = min(start + size, tokens)
        part = dict(inputs)
        for name in ("input_ids", "inputs_embeds"):
            if inputs.get(name) is not None:
                part[name] = inputs[name][:, start:end]
        if mask is not None:
            part["attention_mask"] = mask[:, : past + end]
        if positions is not None:
            part["position_ids"] = positions[:, start:end]
        if end < tokens and inputs.get("logits_to_keep"):
            part["logits_to_keep"] = 1
        parts.append(part)
    return parts


def may_be_chunked(inputs: Mapping[str, Any], past: int, size: int) -> bool:
    """True if a pass may be split along its tokens, as far as its inputs say."""
    batch, tokens = shape(inputs)
    if undivided_inputs(inputs, batch):  # such as a tensor of the logits to keep
        return False
    mask, keep = inputs.get("attention_mask"), inputs.get("logits_to_keep") or 0
    is_flat = mask is None or (mask.dim() == 2 and mask.shape[1] == past + tokens)
    is_short = not keep or 0 < keep <= (tokens - 1) % size + 1
    return is_flat and is_short and inputs.get("return_dict") is not False


def keeps_no_state(config: Any) -> bool:
    """True if a pass leaves nothing behind in the model that another pass would see."""
    is_text_alone = config.get_text_config() is config and not config.is_encoder_decoder
    return is_text_alone and not _holds_growing_positions(vars(config))


def is_chunked(config: Any, tokens: int, stages: int, scale: int = 1) -> bool:
    """True if a prompt of a model with this config is split along its tokens."""
    return keeps_no_state(config) and tokens_of_chunk(tokens, stages, scale) > 0


def _holds_growing_positions(settings: Mapping[str, Any]) -> bool:
    """True if settings of positions, by any name, are of a kind that changes with longer texts."""
    has_factor = any("factor" in str(name) for name in settings)
    kinds = {value for value in settings.values() if isinstance(value, str)} if has_factor else ()
    inner = [value for value in settings.values() if isinstance(value, Mapping)]
    return not GROWING_POSITIONS.isdisjoint(kinds) or any(map(_holds_growing_positions, inner))


def pad_together(parts: Sequence[torch.Tensor], padding: int) -> torch.Tensor:
    """The sequences of all groups as one batch, each row padded to the longest."""
    rows_of_all = [row for part in parts for row in part]
    return pad_sequence(rows_of_all, batch_first=True, padding_value=padding)
