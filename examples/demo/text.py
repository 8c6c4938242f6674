"""The text that the demo's model learns: the language reference that ships with Python."""

import string
from pydoc_data.topics import topics

import torch

CHARACTERS = "".join(sorted(set(string.printable) - set("\t\r\x0b\x0c")))
START = 0  # the token that pads and starts; characters are 1, 2, 3, ...


def corpus() -> torch.Tensor:
    """Every topic of the reference, one after another, as tokens: [num_characters], int64."""
    return encode("\n\n".join(topics[name] for name in sorted(topics)))


def encode(text: str) -> torch.Tensor:
    """One token per character; what is not in CHARACTERS becomes a question mark."""
    index = {character: number for number, character in enumerate(CHARACTERS, 1)}
    return torch.tensor([index.get(character, index["?"]) for character in text])


def decode(tokens: torch.Tensor) -> str:
    """The inverse of encode; tokens that are no character are left out."""
    return "".join(CHARACTERS[token - 1] for token in tokens.tolist() if token != START)
