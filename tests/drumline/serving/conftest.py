"""A tiny model with a tokenizer and a chat template, for tests of the server."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.fixture(scope="module")
def plain(checkpoints):
    """The model in this process, and its folder with a tokenizer of 64 words."""
    model, path = checkpoints.llama()
    names = ["nothing", "begin", "end", *map(str, range(3, 64))]
    words = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="nothing"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "nothing", "bos_token": "begin", "eos_token": "end"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return model, path


def expected(plain, prompt, num_new=12):
    """The text and finish reason of greedy generation in one process."""
    prompt_tokens = torch.tensor([[int(word) for word in prompt.split()]])
    tokens = plain[0].generate(prompt_tokens, max_new_tokens=num_new, do_sample=False)[0].tolist()
    new = tokens[prompt_tokens.shape[1] :]
    return " ".join(str(n) for n in new if n > 2), "stop" if 2 in new else "length"
