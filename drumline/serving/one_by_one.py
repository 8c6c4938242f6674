"""One sequence by itself, for models and prompts that cannot be batched over pages.

generate_alone(model, [1, 5, 9], choose, has_ended)
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional

from drumline.contact import safetensors_api
from drumline.contact.loading.configs import generation_settings

ENDLESS = 1 << 30  # tokens, which no sequence gets


def inputs_to_text(inputs: Mapping[str, torch.Tensor]) -> str:
    """Text of what a model takes beside the tokens of a prompt, such as pixel values."""
    whole = {name: value.contiguous() for name, value in inputs.items()}
    return base64.b64encode(safetensors_api.to_bytes(whole)).decode()


def inputs_from_text(text: str) -> dict[str, torch.Tensor]:
    """The inputs that inputs_to_text() was given; none of ""."""
    return safetensors_api.from_bytes(base64.b64decode(text)) if text else {}


def generate_alone(
    model: Any,
    tokens: Sequence[int],
    choose: Callable[[torch.Tensor], list[int]],
    has_ended: Callable[[], bool],
    inputs: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Generate behind the tokens until has_ended(). Raises what generate() raises.

    choose(logits): the next token, by itself in a list. logits: [1, vocabulary]. inputs: of the
    images in the tokens.
    """
    row = torch.tensor([tokens], device=model.device)
    no_token = model.get_input_embeddings().num_embeddings
    settings = generation_settings(
        max_new_tokens=ENDLESS, do_sample=False, pad_token_id=0, eos_token_id=no_token
    )

    def chosen(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """All logits -inf but that of the token that was chosen."""
        token = torch.tensor(choose(logits), device=logits.device)
        return torch.full_like(logits, -torch.inf).index_fill_(1, token, 0)

    def is_over(row: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.tensor([has_ended()], device=row.device)

    model.generate(
        row,
        attention_mask=torch.ones_like(row),
        generation_config=settings,
        logits_processor=[chosen],
        stopping_criteria=[is_over],
        **{name: _as_input(name, value, row, model.dtype) for name, value in inputs.items()},
    )


def _as_input(
    name: str, value: torch.Tensor, row: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """A tensor of a processor as the model takes it with a row of tokens, [1, length]."""
    if name.endswith("token_type_ids"):  # of the prompt; new tokens are text, whose type is 0
        value = functional.pad(value, (0, row.shape[1] - value.shape[1]))
    return value.to(row.device, dtype if value.is_floating_point() else value.dtype)
