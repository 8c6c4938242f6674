"""The text of tokens as they come, whole characters at a time, up to where it is to stop."""

from __future__ import annotations

from typing import Any

UNFINISHED = "\ufffd"
"""What a tokenizer shows for bytes that do not make a character yet."""


class Text:
    """The text of one row of tokens.

    A token may mean something else after those before it, so each is decoded together with the
    piece before, and what that piece said alone is taken off.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.is_stopped = False
        self._tokens: list[int] = []
        self._begin = self._end = 0  # of the last piece that has been decoded
        self._held = ""  # could be the beginning of a stop

    def add(self, token: int) -> str:
        """What is certain now and has not been said before."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._begin : self._end])
        now = self._decode(self._tokens[self._begin :])
        if now.endswith(UNFINISHED) or len(now) <= len(before):
            return ""
        self._begin, self._end = self._end, len(self._tokens)
        return self._until_stop(now[len(before) :])

    def rest(self) -> str:
        """What was held back, when no more tokens come."""
        if self.is_stopped:
            return ""
        before = self._decode(self._tokens[self._begin : self._end])
        now = self._decode(self._tokens[self._begin :])
        said = self._until_stop(now[len(before) :])
        held, self._held = self._held, ""
        return said + held

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _until_stop(self, text: str) -> str:
        text = self._held + text
        found = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        kept = max((_overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """How much of the end of text is a beginning of stop."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
