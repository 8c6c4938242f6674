"""Incremental detokenization: whole characters as tokens arrive, up to a stop string.

detokenizer = IncrementalDetokenizer(tokenizer, stop=("\\n\\n",))
text = "".join(map(detokenizer.add, tokens)) + detokenizer.flush()

tokenizers' DecodeStream is not used: it takes no tokenizer that is written in Python, cannot flush
an incomplete character at the end, and raises InvalidPrefix on some sequences of byte tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
"""A tokenizer decodes bytes that are not a character yet as this one."""

MAX_PENDING = 16
"""Of the tokens that have no text, such as special ones: each is decoded with those before it."""

MAX_HALVES = 256
"""Of tokens in a row that end within a character: that many are none, and come as they are."""

NUM_PROMPT_TOKENS = 5  # before a sequence, which decide whether its text begins with a space


class IncrementalDetokenizer:
    """The text of one sequence of tokens, as it follows its prompt.

    The text of a token depends on the tokens before it. Therefore each piece is decoded together
    with the piece before it, whose own text is then removed.

    min_tokens: tokens whose text ends nothing.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: tuple[str, ...] = (),
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self._skip_special_tokens = skip_special_tokens
        self.stopped_by = ""  # the stop string that came
        self.num_chars = 0  # of the text so far, with what is held back
        self._tokens = list(prompt[-NUM_PROMPT_TOKENS:])
        if self.text_of(self._tokens).endswith(REPLACEMENT):
            self._tokens = []
        self._prefix_start, self._prefix_end = 0, len(self._tokens)  # the last decoded piece
        self._num_unsearched = len(self._tokens) + min_tokens
        self._held_back = ""  # a possible beginning of a stop string

    def add(self, token: int) -> str:
        """Append a token; return the new text that later tokens cannot change."""
        self._tokens.append(token)
        text = self._pending_text()
        num_pending = len(self._tokens) - self._prefix_end
        if not text and num_pending > MAX_PENDING:
            del self._tokens[self._prefix_end]
            self._num_unsearched -= 1
        if not text or (text.endswith(REPLACEMENT) and num_pending < MAX_HALVES):
            return ""
        self.num_chars += len(text)
        self._prefix_start, self._prefix_end = self._prefix_end, len(self._tokens)
        return self._before_stop(text)

    def flush(self) -> str:
        """The text held back so far, to call after the last token."""
        if self.stopped_by:
            return ""
        text = self._before_stop(self._pending_text())
        rest, self._held_back = self._held_back, ""
        return text + rest

    def _pending_text(self) -> str:
        """The text of the tokens after the last decoded piece."""
        prefix = self.text_of(self._tokens[self._prefix_start : self._prefix_end])
        return self.text_of(self._tokens[self._prefix_start :])[len(prefix) :]

    def text_of(self, tokens: list[int]) -> str:
        """The text of tokens by themselves."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=self._skip_special_tokens))

    def _before_stop(self, text: str) -> str:
        num_searched, text = len(self._held_back), self._held_back + text
        begin_at = (max(num_searched + 1 - len(stop), 0) for stop in self.stop)
        starts = zip(map(text.find, self.stop, begin_at), self.stop, strict=True)
        matches = [match for match in starts if match[0] >= 0]
        if matches and len(self._tokens) > self._num_unsearched:
            (start, self.stopped_by), self._held_back = min(matches), ""
            return text[:start]
        beginnings = (stop[:end] for stop in self.stop for end in range(1, len(stop)))
        length = max(map(len, filter(text.endswith, beginnings)), default=0)
        self._held_back = text[len(text) - length :]
        return text[: len(text) - length]
