"""The text that the demo's model learns, the language reference in Python, and its tokenizer."""

import string
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

CHARACTERS = "".join(sorted(set(string.printable) - set("\t\r\x0b\x0c")))
PAD = "<pad>"  # token 0; characters are the tokens 1, 2, 3, ...


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; a character not in CHARACTERS becomes a question mark."""
    tokens = {name: number for number, name in enumerate([PAD, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(tokens, [], unk_token="?"))  # no merges: tokens stay single
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD)


def corpus(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Every topic of the reference, one after another, as tokens: [num_characters], int64."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"])
