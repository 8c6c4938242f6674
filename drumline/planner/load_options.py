"""The arguments of `drumline.load`, as one value for every strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from drumline.contact.loading.models import loading_options
from drumline.core.device_map import Place
from drumline.core.mesh import num_stages
from drumline.errors import PlanError
from drumline.planner.cost_model import DeviceSpeeds
from drumline.planner.memory import Memory

NOT_APPLIED = ("subfolder", "variant", "key_mapping", "state_dict", "ignore_mismatched_sizes")
"""Options of from_pretrained that choose other weights."""


WHOLE, SHARDED, BOTH = "whole layers", "sharded layers", "stages of sharded layers"
"""The ways to spread a model: no tp= or mesh=; one of these alone; with stages beside."""


@dataclass(frozen=True)
class Rule:
    """An option that has a meaning in some ways to spread a model, and why in no other.

    describe: it with its value, None if it is not given; by its own name, if there is none.
    """

    option: str
    ways: tuple[str, ...]
    why: str
    describe: Callable[[LoadOptions], str | None] | None = None

    def check(self, options: LoadOptions) -> None:
        text = self.describe(options) if self.describe else self._unless_default(options)
        if text and options.way not in self.ways:
            raise PlanError(f"{text} {self.why}")

    def _unless_default(self, options: LoadOptions) -> str | None:
        value, default = (getattr(each, self.option) for each in (options, LoadOptions))
        return None if value == default else f"{self.option}={value!r}"


@dataclass(frozen=True)
class LoadOptions:
    """The arguments of `load`, where they are explained; `rest` is for transformers.

    `speeds` are of this cluster, if they have been measured already. `gguf` is the GGUF file that
    the path means, if it does. `no_split_module_classes`: as for `profile_model`.
    """

    device_map: str | Mapping[str, Place | int] | None = None
    max_memory: Memory | None = None
    dtype: torch.dtype | str | None = None
    cls: type[Any] | None = None
    config: Any = None
    backend: str | None = None
    batch: int = 1
    length: int = 0
    pass_tokens: int = 0
    cuda_graphs: bool = False
    progress: bool | None = None
    tp: int | None = None
    mesh: Any = None
    tp_plan: Any = None
    reader: str | None = None
    build_on: str | None = None
    device: str | None = None
    adapter: str | Path | None = None
    dequantize: bool = False
    trust_remote_code: bool = False
    gguf_file: str | None = None
    revision: str | None = None
    disable_mmap: bool = False
    gguf: Path | None = None
    no_split_module_classes: Collection[str] | str | None = None
    rest: Mapping[str, Any] = field(default_factory=dict)
    speeds: DeviceSpeeds | None = None
    on_failure: str = "raise"

    def __post_init__(self) -> None:
        for name, low in (("batch", 1), ("length", 0), ("pass_tokens", 0)):
            if not isinstance(value := getattr(self, name), int) or value < low:
                raise PlanError(
                    f"{name}={value!r} is not a number of {'sequences' if low else 'tokens'}, so "
                    f"the memory for them is unknown; give a whole number from {low} on."
                )

        if self.build_on not in (None, "meta", "cpu"):
            raise PlanError(
                f'build_on={self.build_on!r} is neither "meta" nor "cpu"; leave it out, as it '
                "has no effect."
            )
        if self.on_failure not in ("raise", "replan"):
            raise PlanError(
                f"on_failure={self.on_failure!r} is neither 'raise' nor 'replan'; give one of them."
            )

    @property
    def pass_batch(self) -> int:
        """The sequences of `length` tokens whose tokens one pass runs over."""
        if not (self.pass_tokens and self.length):
            return self.batch
        return min(self.batch, -(-self.pass_tokens // self.length))

    def check_together(self) -> None:
        """Raise PlanError for an option that would have no effect, or none that it says."""
        for rule in RULES:
            rule.check(self)

    def check_rest(self, kind: type[Any]) -> None:
        """Raise PlanError for options that neither from_pretrained nor the model's class has."""
        if unknown := sorted(self.rest.keys() - loading_options(kind)):
            raise PlanError(
                f"load() has no option {unknown[0]}, and neither has {kind.__name__}."
                "from_pretrained; leave it out, give a config with it as config=, or, if it says "
                "how to quantize, a quantization_config=."
            )
        if self.rest.get("output_loading_info"):
            raise PlanError(
                "load() returns the model alone, and output_loading_info=True asks for a report as "
                "well; leave it out: tensors that are missing or of another shape are an error."
            )
        if unapplied := [name for name in NOT_APPLIED if self.rest.get(name)]:
            raise PlanError(
                f"load() does not apply {unapplied[0]}={self.rest[unapplied[0]]!r:.99}, so the "
                "model would be another one; leave it out, and give the folder that holds the "
                "weights themselves, as model.safetensors or with their index."
            )

    @property
    def shards_layers(self) -> bool:
        """True if the layers themselves are to be split."""
        arguments = (self.tp, self.mesh, self.tp_plan, self.reader)
        return any(argument is not None for argument in arguments)

    @property
    def has_stages(self) -> bool:
        """True if the model is to be split by layers; "meta" only says where it is built."""
        return self.device_map not in (None, "meta") or num_stages(self.mesh) > 1

    @property
    def way(self) -> str:
        """The way to spread the model over ranks: WHOLE, SHARDED or BOTH."""
        if not self.shards_layers:
            return WHOLE
        return BOTH if self.has_stages else SHARDED


SPREADS = (
    "says how to spread whole layers, and a mesh without stages shards every layer, so it would "
    'change nothing; add device_map="auto" for stages of ranks that shard their layers, or leave '
    "it out."
)
SPLITS = "and tp= and mesh= split them; leave one of the two out."

RULES = (
    Rule("max_memory", (WHOLE, BOTH), SPREADS),
    Rule("length", (WHOLE, BOTH), SPREADS),
    Rule("pass_tokens", (WHOLE, BOTH), SPREADS),
    Rule(
        "device",
        (SHARDED, BOTH),
        "is for ranks that shard layers, with tp= or mesh=; here the device_map says where each "
        'layer goes: device_map={"": (0, "cpu")}.',
    ),
    Rule("cuda_graphs", (WHOLE,), f"is for ranks that hold whole layers, {SPLITS}"),
    Rule(
        "on_failure",
        (WHOLE,),
        "plans whole layers anew, and tp= and mesh= split them, for a fixed number of ranks; leave "
        "one of the two out.",
    ),
    Rule(
        'device_map="fastest"',
        (WHOLE,),
        "decides itself how many ranks share a layer, and tp= or mesh= do so too; leave these out, "
        'or use "auto", or a dict of module to stage.',
        lambda options: 'device_map="fastest"' if options.device_map == "fastest" else None,
    ),
    Rule(
        "a GGUF file",
        (WHOLE,),
        f"of which ranks read whole layers, {SPLITS}",
        lambda options: f"{options.gguf} is a GGUF file," if options.gguf else None,
    ),
)
"""What may go together: by option, the ways to spread a model in which it has a meaning."""
