"""Grammars of responses, for `response_format` and `tool_choice`: JSON of a schema.

grammars = GrammarCompiler(tokenizer, vocabulary)
sampler = TokenSampler(params, grammar=grammars.json({"type": "object"}))
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from drumline.errors import DrumlineError

COMPACT = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
}
"""For calls, in which small models go on with white space to the limit of the answer."""


class GrammarCompiler:
    """Makes the grammars of one tokenizer; vocabulary is the number of logits."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        try:
            import llguidance
            import llguidance.hf
        except ImportError as error:
            raise DrumlineError(
                "rank 0: JSON as a response needs llguidance: `pip install llguidance`."
            ) from error
        self._library = llguidance
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary)
        except Exception as error:  # of the library's, which has no class for it
            raise DrumlineError(
                f"rank 0: this model's tokenizer cannot be bound to a grammar: {error}"
            ) from error

    def json(self, schema: dict[str, Any], others: Sequence[int] = ()) -> JsonGrammar:
        """A grammar of one sequence. Raises ValueError if the schema is not supported.

        others: tokens that may come in place of the JSON, with anything behind them.
        """
        other_starts = "".join(f" | <[{token}]> <[*]>*" for token in others)
        return self.compiled(f"start: json{other_starts}\njson: %json {json.dumps(schema)}")

    def compiled(self, text: str) -> JsonGrammar:
        """The grammar whose text is this. Raises ValueError."""
        matcher = self._library.LLMatcher
        return JsonGrammar(matcher(self._tokenizer, matcher.grammar_from_lark(text)), text)


class JsonGrammar:
    """The tokens that may come next in JSON of a schema; after its end only the end token may."""

    def __init__(self, matcher: Any, text: str) -> None:
        self._matcher, self.text = matcher, text
        self._check()
        matcher.compute_bitmask()
        if matcher.is_error():  # as of one that is only a reference to itself
            raise ValueError("no JSON can be of this schema")

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits, -inf for each token that may not come next. logits: [vocabulary]."""
        bias = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        self._check()
        return logits.masked_fill(bias[: len(logits)].to(logits.device) == 0, -torch.inf)

    def advance(self, token: int) -> None:
        """Take the next token. Raises ValueError if it was not allowed."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())


def parameters_of(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments; one without takes none."""
    return function.get("parameters") or {"type": "object", "additionalProperties": False}


def schema_of_calls(functions: list[dict[str, Any]], max_calls: int | None) -> dict[str, Any]:
    """The schema of a list of calls, each an object of name and parameters."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": str(function.get("name"))},
                # References within a schema that has an id are relative to that schema.
                "parameters": {**parameters_of(function), "$id": f"urn:tool:{index}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, function in enumerate(functions)
    ]
    most = {} if max_calls is None else {"maxItems": max_calls}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, **COMPACT}
