"""What must be the same on every rank for their parts to make one model.

check_same_on_all_ranks(coor, facts(model, torch.bfloat16))
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from coordinator import Coordinator
from drumline.errors import DrumlineError


def model_facts(model: Any, dtype: torch.dtype) -> dict[str, str]:
    """What must be the same on every rank for the parts to make one model."""
    return {
        "config": model.config.to_json_string(),
        "attn_implementation": str(model.config._attn_implementation),
        "dtype": str(dtype),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def check_same_on_all_ranks(coor: Coordinator, mine: Mapping[str, str]) -> None:
    """Raise on every rank, naming what differs and where, unless all ranks have the same."""
    told = [json.loads(data) for data in coor.allgather(json.dumps(mine).encode())]
    for rank, theirs in enumerate(told):
        for what, first in told[0].items():
            if theirs[what] != first:
                raise DrumlineError(
                    f"rank {coor.rank}: {what} is {_excerpt(first, theirs[what])} on rank 0 and "
                    f"{_excerpt(theirs[what], first)} on rank {rank}, so the parts would not make "
                    "one model; give every rank the same files, options and versions."
                )


def _excerpt(text: str, other: str) -> str:
    """A text from shortly before where it begins to differ."""
    same = next((at for at, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), 0)
    return text[max(0, same - 40) : same + 80].strip()
