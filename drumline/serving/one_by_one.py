"""One sequence by itself, for models that cannot be batched over pages.

generate_alone(model, [1, 5, 9], choose, has_ended)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from drumline.contact.loading.configs import generation_settings

ENDLESS = 1 << 30  # tokens, which no sequence gets


def generate_alone(
    model: Any,
    tokens: Sequence[int],
    choose: Callable[[torch.Tensor], list[int]],
    has_ended: Callable[[], bool],
) -> None:
    """Generate behind the tokens until has_ended(). Raises what generate() raises.

    choose(logits): the next token, by itself in a list. logits: [1, vocabulary].
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
    )
