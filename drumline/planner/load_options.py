"""The arguments of `drumline.load`, as one value for every strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from drumline.core.device_map import Place
from drumline.core.mesh import num_stages
from drumline.planner.cost_model import DeviceSpeeds
from drumline.planner.memory import Memory


@dataclass(frozen=True)
class LoadOptions:
    """The arguments of `load`, where they are explained; `rest` is for transformers.

    `speeds` are of this cluster, if they have been measured already.
    """

    device_map: str | Mapping[str, Place | int] | None = None
    max_memory: Memory | None = None
    dtype: torch.dtype | str | None = None
    cls: type[Any] | None = None
    config: Any = None
    backend: str | None = None
    batch: int = 1
    length: int = 0
    cuda_graphs: bool = False
    progress: bool | None = None
    tp: int | None = None
    mesh: Any = None
    tp_plan: Any = None
    reader: str | None = None
    build_on: str | None = None
    device: str | None = None
    rest: Mapping[str, Any] = field(default_factory=dict)
    speeds: DeviceSpeeds | None = None

    @property
    def shards_layers(self) -> bool:
        """True if the layers themselves are to be split."""
        arguments = (self.tp, self.mesh, self.tp_plan, self.reader, self.build_on)
        return any(argument is not None for argument in arguments)

    @property
    def has_stages(self) -> bool:
        """True if the model is to be split by layers; "meta" only says where it is built."""
        return self.device_map not in (None, "meta") or num_stages(self.mesh) > 1
