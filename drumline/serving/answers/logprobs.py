"""Log-probabilities of tokens in the two forms of OpenAI's API.

formatter = LogprobFormatter(tokenizer, is_chat=True)
field = formatter.format([TokenLogprob(5, -0.1, ((5, -0.1), (7, -2.4)))], offset=0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drumline.serving.sampling import TokenLogprob


class LogprobFormatter:
    """Formats the field `logprobs` of a chat's or a completion's choice."""

    def __init__(self, tokenizer: Any, is_chat: bool) -> None:
        self._tokenizer, self._is_chat = tokenizer, is_chat

    def format(self, logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """The field for these tokens. offset: characters of the choice before them."""
        if self._is_chat:
            return {"content": [self._chat_token(item) for item in logprobs]}
        texts = [self._text(item.token) for item in logprobs]
        return {
            "tokens": texts,
            "token_logprobs": [item.logprob for item in logprobs],
            "top_logprobs": [self._by_text(item) for item in logprobs],
            "text_offset": [offset + len("".join(texts[:i])) for i in range(len(texts))],
        }

    def _by_text(self, item: TokenLogprob) -> dict[str, float] | None:
        """The most likely tokens; of two with one text, the likelier."""
        if item.logprob is None:
            return None
        pairs = (*item.top, (item.token, item.logprob))
        return {self._text(token): logprob for token, logprob in reversed(pairs)}

    def _chat_token(self, item: TokenLogprob) -> dict[str, Any]:
        top = [self._pair(*pair) for pair in item.top]
        return {**self._pair(item.token, item.logprob), "top_logprobs": top}

    def _pair(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))
