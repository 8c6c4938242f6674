"""The user's request that an inference engine works on drumline, from the environment.

DRUMLINE_VLLM=1 DRUMLINE_VLLM_TIMEOUT_S=60 python serve.py
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from launcher.launch_info import ENV_PREFIX, number

OFF = ("", "0")
ON = "1"


@dataclass(frozen=True)
class EngineRequest:
    """timeout_s: the deadline of each call among the engine's ranks; None for the usual one."""

    timeout_s: float | None = None


def engine_request(engine: str) -> EngineRequest | None:
    """The request for the engine of that name, such as "vllm"; None if there is none.

    Raises ValueError for variables that say neither yes nor no, or no number of seconds.
    """
    variable = ENV_PREFIX + engine.upper()
    value, limit = os.environ.get(variable, ""), os.environ.get(f"{variable}_TIMEOUT_S", "")
    if value in OFF:
        return None
    if value != ON:
        raise ValueError(
            f"{variable}={value!r} is neither {ON} nor 0. Set it to {ON}, or unset it."
        )
    return EngineRequest(_seconds(f"{variable}_TIMEOUT_S", limit) if limit else None)


def _seconds(variable: str, text: str) -> float:
    if not 0 < number(text) < math.inf:
        raise ValueError(f"{variable}={text!r} is not a number of seconds above 0")
    return number(text)
