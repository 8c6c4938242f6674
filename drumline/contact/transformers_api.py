"""All that drumline takes from transformers: no other module imports it.

Only modules of this package import this one. They offer drumline's own verbs, such as
`caches.cache_of`, so that a rename in transformers is mended here and nowhere else.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoTokenizer,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedConfig,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
    StoppingCriteria,
    StopStringCriteria,
    TextStreamer,
    dynamic_module_utils,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import rename_source_key
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.modeling_utils import LoadStateDictInfo
from transformers.quantizers.auto import get_hf_quantizer
from transformers.utils import ModelOutput

from drumline.contact.releases import READ

READ_IN = ", ".join(READ["transformers"])
"""Releases whose source was read for every name below, where none is given."""

NAMES: dict[str, tuple[str, str]] = {
    "AutoConfig": ("the config of a checkpoint, also one with code of its own", READ_IN),
    "AutoTokenizer": ("the tokenizer of a checkpoint or of a GGUF file", READ_IN),
    "CONFIG_MAPPING": ("the kind of a config whose fields came from another rank", READ_IN),
    "Cache": ("the kind of the value in a pass that is its cache, whatever its key", READ_IN),
    "DynamicCache": ("the cache that grows, built again on other ranks", READ_IN),
    "EncoderDecoderCache": ("a pair of caches, which other ranks get as two", READ_IN),
    "EosTokenCriteria": ("a stop that depends on tokens alone, the same on each rank", READ_IN),
    "GenerationConfig": ("the generation settings of a checkpoint and of the server", READ_IN),
    "LoadStateDictInfo": ("reports what a checkpoint lacks, where drumline reads it", READ_IN),
    "MODEL_FOR_CAUSAL_LM_MAPPING": ("the class of a config that names none: a decoder", READ_IN),
    "MODEL_FOR_MULTIMODAL_LM_MAPPING": ("the same of one that takes images or sound", READ_IN),
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING": ("the same of encoder and decoder", READ_IN),
    "MODEL_MAPPING": ("the same of any other model, without a head", READ_IN),
    "MaxLengthCriteria": ("a stop that depends on tokens alone, the same on each rank", READ_IN),
    "ModelOutput": ("outputs that are built again from their parts", READ_IN),
    "PreTrainedConfig": (
        "tells a config from a path, and tiny ones for caches on which kinds of layers are tried",
        READ_IN,
    ),
    "PreTrainedModel": ("its from_pretrained, and which classes and modules are models", READ_IN),
    "QuantizedCache": ("the cache of which only some tokens are as they were put in", READ_IN),
    "StaticCache": ("the cache of fixed size, built again on other ranks", READ_IN),
    "StopStringCriteria": ("a stop that depends on tokens alone, the same on each rank", READ_IN),
    "StoppingCriteria": ("a stop of our own: each rank stops when the first does", READ_IN),
    "TENSOR_PROCESSORS": ("lay weights of a GGUF file out as a model has them", READ_IN),
    "TensorProcessor": ("the one for architectures of GGUF without one of their own", READ_IN),
    "TextStreamer": ("prints what `drumline generate` makes, word by word", READ_IN),
    "dynamic_module_utils": (
        "the class that a checkpoint's own code defines; its constant TIME_OUT_REMOTE_CODE is set "
        "to 0 while models are built, for a rank must not ask on stdin, and nothing else turns "
        "the question off for a config within a config",
        READ_IN,
    ),
    "get_gguf_hf_weights_map": ("the names of a GGUF file's tensors in a model", READ_IN),
    "get_response_template": (
        "tells calls and reasoning apart in answers of models whose tokenizers do not say how; of "
        "the private server of transformers, as nothing public has these templates",
        READ_IN,
    ),
    "get_hf_quantizer": ("the sizes that quantized weights will have in memory", READ_IN),
    "get_model_conversion_mapping": (
        "the tables by which stored weights are renamed, stacked and joined for a kind of model",
        READ_IN,
    ),
    "rename_source_key": ("applies these tables to one stored key", READ_IN),
}
"""Each name that is taken, by import or as an attribute: why, and the releases it was read in."""

UNDERSCORES: dict[str, tuple[str, str]] = {
    "_attn_implementation": (
        "the attention of a config, which ranks must share; the public setter has no getter",
        READ_IN,
    ),
    "_ep_plan": ("a model's plan for experts; its config has it without a prefix", READ_IN),
    "_experts_implementation": (
        "how experts are run; the public getter is of models, and a module of experts is none",
        READ_IN,
    ),
    "_from_config": (
        "builds a class that is known by name, as AutoModel.from_config does for its own choice",
        READ_IN,
    ),
    "_from_model_config": ("reads generation settings out of an older config.json", READ_IN),
    "_get_dtype_plan": ("the tensors that a model keeps in float32", READ_IN),
    "_get_stopping_criteria": (
        "all stops of a generation, overridden: an argument of generate() only adds one",
        READ_IN,
    ),
    "_is_expert_parallel": ("tells experts that they are some of all", READ_IN),
    "_is_hf_initialized": (
        "marks weights that are read later, for which numbers would be drawn first: to skip each "
        "initializer instead tripled the time that an empty model takes",
        READ_IN,
    ),
    "_load_pretrained_model": (
        "what reads, in from_pretrained: given its device map, it would hook every module and "
        "quantizers would refuse it, as modules of other ranks are on meta",
        READ_IN,
    ),
    "_no_split_modules": ("classes whose modules stay on one device, as accelerate reads", READ_IN),
    "_postprocess_outputs": (
        "overridden: Whisper copies each cache into its result, and some layers are elsewhere",
        READ_IN,
    ),
    "_tp_plan": ("a model's plan for sharded layers; its config has it without a prefix", READ_IN),
    "_valid_auto_compile_criteria": (
        "overridden: a generation's own settings would come before a default of disable_compile",
        READ_IN,
    ),
}
"""Attributes, methods and arguments with an underscore that no public one replaces.

Of each, why it is taken, and the releases it was read in.
"""


BATCHING_NAMES: dict[str, tuple[str, str]] = {
    "AttentionInterface": ("where attention over pages is registered by name", READ_IN),
    "AttentionMaskInterface": ("the masks of ordinary passes under that name", READ_IN),
    "ContinuousBatchProcessor": ("schedules and samples, over the tables of rank 0", READ_IN),
    "ContinuousBatchingConfig": ("the settings of a script that passes none", READ_IN),
    "ContinuousBatchingManager": ("what a script adds requests to, and gets results from", READ_IN),
    "PagedAttentionCache": ("the tables of blocks, kept on rank 0 without a pool", READ_IN),
    "SCHEDULER_MAPPING": ("the scheduler that the settings name", READ_IN),
    "eager_mask": ("the masks of ordinary passes beside eager attention", READ_IN),
    "eager_paged_attention_forward": ("eager attention of one sequence, with sinks", READ_IN),
    "group_layers_by_attn_type": ("the layers of each kind of attention", READ_IN),
    "sdpa_attention_forward": ("attention of one sequence by torch's own kernels", READ_IN),
    "sdpa_mask": ("the masks of ordinary passes beside torch's kernels", READ_IN),
    "update_cb_config_after_cache_creation": ("tells the settings how many blocks", READ_IN),
}
"""The same of what continuous batching takes, see continuous_batching()."""

BATCHING_UNDERSCORES: dict[str, tuple[str, str]] = {
    "_can_set_attn_implementation": (
        "whether a model's attention is called by name; setting it otherwise only logs a warning",
        READ_IN,
    ),
    "_cached_continuous_batching_manager": ("the manager that is kept for a next batch", READ_IN),
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
"""Attributes of continuous batching that are private, or read and set by us."""


def tiny_llama(**sizes: Any) -> Any:
    """A model for the self-check."""
    config = CONFIG_MAPPING["llama"](**sizes)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)


def response_template(tokenizer: Any, model: Any) -> Any:
    """The template of answers that transformers' own server uses, imported with a server alone."""
    from transformers.cli.serving.utils import get_response_template

    return get_response_template(tokenizer, model)


@functools.cache
def continuous_batching() -> Any:
    """BATCHING_NAMES as attributes, imported with the first batch: a model alone needs none."""
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
    from transformers.integrations.eager_paged import eager_paged_attention_forward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import eager_mask, sdpa_mask

    return types.SimpleNamespace(
        AttentionInterface=AttentionInterface,
        AttentionMaskInterface=AttentionMaskInterface,
        ContinuousBatchProcessor=ContinuousBatchProcessor,
        ContinuousBatchingConfig=ContinuousBatchingConfig,
        ContinuousBatchingManager=ContinuousBatchingManager,
        PagedAttentionCache=PagedAttentionCache,
        SCHEDULER_MAPPING=SCHEDULER_MAPPING,
        eager_mask=eager_mask,
        eager_paged_attention_forward=eager_paged_attention_forward,
        group_layers_by_attn_type=group_layers_by_attn_type,
        sdpa_attention_forward=sdpa_attention_forward,
        sdpa_mask=sdpa_mask,
        update_cb_config_after_cache_creation=update_cb_config_after_cache_creation,
    )


__all__ = [
    "BATCHING_NAMES",
    "BATCHING_UNDERSCORES",
    "CONFIG_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_MAPPING",
    "NAMES",
    "READ_IN",
    "TENSOR_PROCESSORS",
    "UNDERSCORES",
    "AutoConfig",
    "AutoTokenizer",
    "Cache",
    "DynamicCache",
    "EncoderDecoderCache",
    "EosTokenCriteria",
    "GenerationConfig",
    "LoadStateDictInfo",
    "MaxLengthCriteria",
    "ModelOutput",
    "PreTrainedConfig",
    "PreTrainedModel",
    "QuantizedCache",
    "StaticCache",
    "StopStringCriteria",
    "StoppingCriteria",
    "TensorProcessor",
    "TextStreamer",
    "continuous_batching",
    "dynamic_module_utils",
    "get_gguf_hf_weights_map",
    "get_hf_quantizer",
    "get_model_conversion_mapping",
    "rename_source_key",
    "response_template",
    "tiny_llama",
    "transformers",
]
