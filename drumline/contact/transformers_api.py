"""All that drumline takes from transformers: no other module imports it.

Only modules of this package import this one. They offer drumline's own verbs, such as
`caches.cache_of`, so that a rename in transformers is mended here and nowhere else. For why each is
taken, see tests/versions/taken_names.py.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from drumline.contact import releases

with releases.named_if_gone("transformers"):
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


def tiny_llama(**sizes: Any) -> Any:
    """A model for the self-check."""
    config = CONFIG_MAPPING["llama"](**sizes)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)


def response_template(tokenizer: Any, model: Any) -> Any:
    """The template of answers that transformers' own server uses, imported with a server alone."""
    from transformers.cli.serving.utils import get_response_template

    return get_response_template(tokenizer, model)


def processor_class() -> Any:
    """The class that makes inputs of images, imported with a server alone, as it brings Pillow."""
    from transformers import AutoProcessor

    return AutoProcessor


@functools.cache
@releases.named_if_gone("transformers")
def continuous_batching() -> Any:
    """The names of continuous batching, imported with the first batch: a model alone needs none."""
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        ContinuousBatchingConfig,
        ContinuousBatchingManager,
        MinPLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
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

    return types.SimpleNamespace(**locals())
