"""One sequence by itself, for models and prompts that cannot be batched over pages.

generate_alone(model, Prompt([1, 5, 9]), choose, has_ended)
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from drumline.contact import safetensors_api
from drumline.contact.caches import is_cache
from drumline.contact.loading.configs import generation_settings, without_recommended_settings
from drumline.serving.sampling import TokenLogprob

ENDLESS = 1 << 30  # tokens, which no sequence gets


def inputs_to_text(inputs: Mapping[str, torch.Tensor]) -> str:
    """Text of what a model takes beside the tokens of a prompt, such as pixel values."""
    whole = {name: value.contiguous() for name, value in inputs.items()}
    return base64.b64encode(safetensors_api.to_bytes(whole)).decode()


def inputs_from_text(text: str) -> dict[str, torch.Tensor]:
    """The inputs that inputs_to_text() was given; none of ""."""
    return safetensors_api.from_bytes(base64.b64decode(text)) if text else {}


class Prompt(list[int]):
    """The tokens of a prompt. inputs: see inputs_to_text()."""

    def __init__(self, tokens: Iterable[int], inputs: str = "") -> None:
        super().__init__(tokens)
        self.inputs = inputs


def generate_alone(
    model: Any,
    prompt: Prompt,
    choose: Callable[[torch.Tensor], list[int]],
    has_ended: Callable[[], bool],
) -> None:
    """Generate behind the prompt until has_ended(). Raises what generate() raises.

    choose(logits): the next token, by itself in a list. logits: [1, vocabulary].
    """

    def chosen(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """All logits -inf but that of the token that was chosen."""
        token = torch.tensor(choose(logits), device=logits.device)
        return torch.full_like(logits, -torch.inf).index_fill_(1, token, 0)

    _generate(model, prompt, lambda _: has_ended(), {}, logits_processor=[chosen])


def generate_ahead(
    model: Any,
    tokens: Sequence[int],
    num_ahead: int,
    take: Callable[[int, torch.Tensor], Any],
    has_ended: Callable[[], bool],
) -> None:
    """Generate greedily behind the tokens until has_ended(), in fewer passes where the text repeats
    itself: each tries up to num_ahead tokens that followed the last ones before.

    take(token, logits): called with each token, in their order, and with the logits of its place,
    [1, vocabulary]. Raises what generate() raises.
    """
    num_taken, logits_at = len(tokens), dict[int, torch.Tensor]()

    def kept(row: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        logits_at[row.shape[1]] = logits  # also of what is tried and not taken
        return logits

    def is_over(row: torch.Tensor) -> bool:
        nonlocal num_taken
        for place, token in enumerate(row[0, num_taken:].tolist(), num_taken):
            take(token, logits_at[place])
        logits_at.clear()
        num_taken = row.shape[1]
        return has_ended()

    settings = {"prompt_lookup_num_tokens": num_ahead}
    _generate(model, Prompt(tokens), is_over, settings, logits_processor=[kept])


@torch.no_grad()
def score_prompt(
    model: Any, tokens: Sequence[int], num_top: int, chunk: int
) -> tuple[torch.Tensor, list[TokenLogprob]]:
    """The logits behind the tokens, [vocabulary], and the log-probabilities of all but the first,
    by passes of at most `chunk` tokens. num_top: as TokenLogprob.of() takes it."""
    cache: dict[str, Any] = {}
    logits, scores = torch.empty(0), []
    for start in range(0, len(tokens), chunk):
        row = torch.tensor([tokens[start : start + chunk]], device=model.device)
        output = model(input_ids=row, use_cache=len(tokens) > chunk, **cache)
        cache = {name: value for name, value in output.items() if is_cache(value)}
        logits = output.logits[0]
        for place, token in enumerate(tokens[start + 1 : start + len(logits) + 1]):
            scores.append(TokenLogprob.of(token, logits[place], num_top))
    return logits[-1], scores


def _generate(
    model: Any,
    prompt: Prompt,
    is_over: Callable[[torch.Tensor], bool],
    settings: Mapping[str, Any],
    **options: Any,
) -> None:
    row, inputs = torch.tensor([prompt], device=model.device), inputs_from_text(prompt.inputs)
    no_token = model.get_input_embeddings().num_embeddings
    endless = {"max_new_tokens": ENDLESS, "eos_token_id": no_token, "pad_token_id": 0}

    def ends(row: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.tensor([is_over(row)], device=row.device)

    with without_recommended_settings(model):  # which are the server's to apply
        model.generate(
            row,
            attention_mask=torch.ones_like(row),
            generation_config=generation_settings(do_sample=False, **endless, **settings),
            stopping_criteria=[ends],
            **{name: _as_input(name, value, row, model.dtype) for name, value in inputs.items()},
            **options,
        )


def _as_input(
    name: str, value: torch.Tensor, row: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """A tensor of a processor as the model takes it with a row of tokens, [1, length]."""
    if name.endswith("token_type_ids"):  # of the prompt; new tokens are text, whose type is 0
        value = functional.pad(value, (0, row.shape[1] - value.shape[1]))
    return value.to(row.device, dtype if value.is_floating_point() else value.dtype)
