"""A model with a tokenizer, as the commands need it."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture
def with_tokenizer(checkpoints) -> Path:
    _, path = checkpoints.llama()
    words = Tokenizer(models.WordLevel({str(n): n for n in range(64)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0").save_pretrained(path)
    return path
