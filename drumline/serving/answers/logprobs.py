"""Log-probabilities of tokens in the two forms of OpenAI's API.

field = logprobs_field(tokenizer, True, [(TokenLogprob(5, -0.1, ((5, -0.1), (7, -2.4))), 0)])
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from drumline.core.detokenize import REPLACEMENT
from drumline.serving.sampling import TokenLogprob

PlacedLogprob = tuple[TokenLogprob, int]
"""Of a token, with the number of characters before it."""

SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
LETTERS = {chr(byte): byte for byte in SHOWN}
LETTERS |= {chr(256 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*SHOWN}))}
"""The letters for bytes in vocabularies of bytes, as of GPT-2."""


def logprobs_field(
    tokenizer: Any, is_chat: bool, logprobs: Sequence[PlacedLogprob]
) -> dict[str, Any]:
    """The field `logprobs` of a chat's or a completion's choice, for these tokens."""

    def text_of(token: int) -> str:
        return str(tokenizer.decode([token]))

    def bytes_of(token: int) -> list[int] | None:
        if REPLACEMENT not in (text := text_of(token)):
            return list(text.encode())
        piece = tokenizer.convert_ids_to_tokens(token)  # of a character that it is a part of
        if isinstance(piece, bytes) or REPLACEMENT in piece:
            return list(piece if isinstance(piece, bytes) else text.encode())
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):
            return [int(byte[1], 16)]
        return [*map(LETTERS.__getitem__, piece)] if {*piece} <= LETTERS.keys() else None

    def pair(token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": text_of(token), "logprob": logprob, "bytes": bytes_of(token)}

    def by_text(token: int, logprob: float | None, top: Sequence[Any]) -> dict[str, Any] | None:
        """The most likely tokens; of two with one text, the likelier."""
        pairs = reversed((*top, (token, logprob)))
        return None if logprob is None else {text_of(each): value for each, value in pairs}

    if is_chat:
        return {
            "content": [
                {**pair(token, logprob), "top_logprobs": [pair(*each) for each in top]}
                for (token, logprob, top), _ in logprobs
            ]
        }
    return {
        "tokens": [text_of(item.token) for item, _ in logprobs],
        "token_logprobs": [item.logprob for item, _ in logprobs],
        "top_logprobs": [by_text(*item) for item, _ in logprobs],
        "text_offset": [offset for _, offset in logprobs],
    }
