"""All that drumline takes from transformers' continuous batching: no other module imports it.

It is imported when the first batch begins, for it loads what a model alone has no use for.
"""

from __future__ import annotations

from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    ContinuousBatchingConfig,
    ContinuousBatchingManager,
)
from transformers.generation.continuous_batching.cache import (
    PagedAttentionCache,
    group_layers_by_attn_type,
)
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.initialization import (
    update_cb_config_after_cache_creation,
)
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)
from transformers.integrations.eager_paged import eager_paged_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from drumline.contact.releases import READ

READ_IN = ", ".join(READ["transformers"])
"""Releases whose source was read for every name below."""

NAMES: dict[str, tuple[str, str]] = {
    "AttentionInterface": ("where attention over pages is registered by name", READ_IN),
    "AttentionMaskInterface": ("the masks of ordinary passes under that name", READ_IN),
    "ContinuousBatchProcessor": ("schedules and samples, over the tables of rank 0", READ_IN),
    "ContinuousBatchingConfig": ("the settings of a script that passes none", READ_IN),
    "ContinuousBatchingManager": ("what a script adds requests to, and gets results from", READ_IN),
    "PagedAttentionCache": ("the tables of blocks, kept on rank 0 without a pool", READ_IN),
    "SCHEDULER_MAPPING": ("the scheduler that the settings name", READ_IN),
    "eager_mask": ("the masks of ordinary passes beside eager attention", READ_IN),
    "eager_paged_attention_forward": ("eager attention of one sequence, with sinks", READ_IN),
    "find_head_dim": ("the bytes of a token in one layer", READ_IN),
    "find_num_key_value_heads": ("the bytes of a token in one layer", READ_IN),
    "group_layers_by_attn_type": ("the layers of each kind of attention", READ_IN),
    "sdpa_attention_forward": ("attention of one sequence by torch's own kernels", READ_IN),
    "sdpa_mask": ("the masks of ordinary passes beside torch's kernels", READ_IN),
    "update_cb_config_after_cache_creation": ("tells the settings how many blocks", READ_IN),
}
"""Each name that is taken: why, and the releases it was read in."""

ATTRIBUTES: dict[str, tuple[str, str]] = {
    "_can_set_attn_implementation": (
        "whether a model's attention is called by name; setting it otherwise only logs a warning",
        READ_IN,
    ),
    "_create_batch_processor": ("makes the cache, which takes 0.6 of a host's memory", READ_IN),
    "_generation_step": ("hands the model each step's arguments", READ_IN),
    "_run_generation_loop": ("the thread, at whose end the attention is given back", READ_IN),
    "_supports_logits_to_keep": (
        "whether a model computes only the logits of last tokens",
        READ_IN,
    ),
    "_use_prefix_sharing": ("sorts the prompts of a batch by their beginnings", READ_IN),
    "block_physical_stride": ("the distance of blocks in the numbers of tokens", READ_IN),
    "sentinel_index": ("the number in a window's list that stands for a new token", READ_IN),
    "write_trash_index": ("the number of a token that is not kept", READ_IN),
}
"""Attributes and methods that are private, or read and set by us: why, and where read."""

__all__ = [
    "ATTRIBUTES",
    "NAMES",
    "SCHEDULER_MAPPING",
    "AttentionInterface",
    "AttentionMaskInterface",
    "ContinuousBatchProcessor",
    "ContinuousBatchingConfig",
    "ContinuousBatchingManager",
    "PagedAttentionCache",
    "eager_mask",
    "eager_paged_attention_forward",
    "find_head_dim",
    "find_num_key_value_heads",
    "group_layers_by_attn_type",
    "sdpa_attention_forward",
    "sdpa_mask",
    "update_cb_config_after_cache_creation",
]
