"""The settings of transformers' continuous batching, and those that a model over ranks refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drumline.contact import transformers_api
from drumline.errors import RefusedUse

api = transformers_api.continuous_batching()

DEFAULTS = {
    "use_cuda_graph": (None, False, (False, False)),
    "use_async_batching": (None, False),
    "varlen_compile_config": (None,),
    "decode_compile_config": (None,),
    "default_compile_level": (0,),
    "cpu_offload_space": (0,),
}
"""By name, the values of settings that a model over ranks takes; with others, one process alone."""


def batch_settings(**settings: Any) -> Any:
    """Settings of continuous batching that write no variable of NCCL into the environment, for
    graphs that are not made here."""
    return api.ContinuousBatchingConfig(disable_nccl_graph_mixing=False, **settings)


def refused_settings(settings: Any) -> list[str]:
    """Settings that are for one process alone, each with its value."""
    values = {name: getattr(settings, name, taken[0]) for name, taken in DEFAULTS.items()}
    return [f"{name}={value!r}" for name, value in values.items() if value not in DEFAULTS[name]]


def check_settings(settings: Any) -> None:
    """Raise RefusedUse for settings that a model over ranks cannot have, or that nobody knows."""
    if refused := refused_settings(settings):
        raise RefusedUse(
            f"rank 0: {', '.join(refused)} of continuous batching are for a model in one "
            "process, and this one has layers on other ranks or on disk; leave them out."
        )
    if settings.scheduler_type not in api.SCHEDULER_MAPPING:
        raise RefusedUse(
            f"rank 0: scheduler_type={settings.scheduler_type!r} is not known, and in another's "
            "order requests would wait longer than was meant; take one of "
            f"{', '.join(map(repr, sorted(api.SCHEDULER_MAPPING)))}."
        )


@dataclass(frozen=True)
class Workload:
    """The requests that a manager will get, as transformers' WorkloadHints; share: of the memory
    for pages, what the manager may take."""

    max_prompt_length: int = 0
    max_generated_length: int = 0
    num_requests: int = 0
    share: float = 1
