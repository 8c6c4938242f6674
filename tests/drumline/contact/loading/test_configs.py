"""Configs and generation settings are what transformers itself reads."""

import json
import math

import pytest
from transformers import AutoConfig, GenerationConfig, LlamaConfig, LlavaConfig, T5Config
from transformers import PreTrainedConfig as AnyConfig

from drumline.contact.loading import configs


@pytest.mark.parametrize("value", [math.inf, -math.inf, 0.5])
def test_fields_of_a_config_become_the_config_that_wrote_them(value, tmp_path):
    """JSON has no infinity, and transformers writes an object with one key for it."""
    config = LlamaConfig(num_hidden_layers=2, rms_norm_eps=value, id2label={0: "a", 1: "b"})
    config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    again = configs.config_from_fields(fields)
    read = AutoConfig.from_pretrained(tmp_path)
    read.name_or_path = again.name_or_path
    assert again.rms_norm_eps == value and again.to_dict() == read.to_dict()


def test_an_object_with_other_keys_is_no_number():
    fields = {"model_type": "llama", "own": {"__float__": "NaN", "more": 1}, "text": "Infinity"}
    config = configs.config_from_fields(fields)
    assert (config.own, config.text) == (fields["own"], fields["text"])


def test_generation_settings_of_older_checkpoints_are_in_the_config(tmp_path):
    LlamaConfig().save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "eos_token_id": 7}))
    assert configs.read_generation_settings(tmp_path, is_in_config=True).eos_token_id == 7
    GenerationConfig(eos_token_id=9).save_pretrained(tmp_path)
    assert configs.read_generation_settings(tmp_path).eos_token_id == 9


def test_the_quantization_of_a_decoder_is_that_of_the_model():
    """It was passed over where the decoder's config is a dict."""
    settings = {"quant_method": "fp8"}
    fields = {"model_type": "llama", "quantization_config": settings}
    own = AnyConfig()
    own.text_config = dict(fields)
    whole = [kind(quantization_config=settings) for kind in (LlamaConfig, T5Config)]
    for config in (own, LlavaConfig(text_config=fields), *whole):
        assert configs.hoist_quantization(config).quantization_config == settings
    assert "quantization_config" not in own.text_config
