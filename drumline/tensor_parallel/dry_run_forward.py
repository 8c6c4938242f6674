"""Runs a cut model on shapes alone: a plan that does not fit is found before anything is read.

whole = shortened(model, styles)              # on meta, with one layer of each kind
rehearse(whole, part, styles, rank, size)     # part: a copy of it, cut
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from drumline.errors import PlanError
from drumline.planner.model_profile import layer_names
from drumline.tensor_parallel.parallelize import connect


class Pretended:
    """What a communicator gives back, as far as its shape goes; there are no other ranks."""

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size

    def allreduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def allgather(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty((self.world_size, *x.shape))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x[0]


def shortened(model: Any, styles: Mapping[str, str]) -> Any:
    """A copy on meta with as many layers as show each kind there is."""
    short = copy.deepcopy(model).to("meta")
    stacks: dict[str, list[str]] = {}
    for name in layer_names(short):
        stacks.setdefault(name.rpartition(".")[0], []).append(name)
    for stack, names in stacks.items():
        kinds = [_kind(short.get_submodule(name), name, styles) for name in names]
        needed = max(kinds.index(kind) for kind in kinds) + 1
        layers = short.get_submodule(stack)
        if isinstance(layers, nn.ModuleList) and len(layers) == len(names):
            del layers[needed:]
    return short


def _kind(layer: nn.Module, name: str, styles: Mapping[str, str]) -> list[Any]:
    """What layers that compute alike, and are cut alike, have in common."""
    parts = [(n, type(part), styles.get(f"{name}.{n}")) for n, part in layer.named_modules()]
    return [parts, [(n, p.shape, styles.get(f"{name}.{n}")) for n, p in layer.named_parameters()]]


@torch.no_grad()
def rehearse(whole: Any, part: Any, styles: Mapping[str, str], rank: int, size: int) -> None:
    """Raise PlanError if `part` cannot compute what `whole` computes. Both are used up.

    A model that needs values, or more than tokens, to run at all is left to its first call from
    where it does.
    """
    tokens = torch.zeros(1, 2 * size, dtype=torch.int64, device="meta")
    expected, end, _ = _run(whole, tokens)
    pretended: Any = Pretended(rank, size)
    found, place, error = _run(part, tokens, lambda: connect(part, styles, pretended))
    if error is not None and not _wants_values(error) and place != end:
        raise PlanError(_story(part, place or "", styles, size, str(error))) from error
    if error is None and end is None and found != expected:
        raise PlanError(
            f"a forward gives {found} where the model uncut gives {expected}, so what leaves it is "
            "one rank's part; cut what comes last as 'colwise_gather_output', or not at all."
        )


def _run(
    model: Any, tokens: torch.Tensor, prepare: Callable[[], None] = lambda: None
) -> tuple[dict[str, tuple[int, ...]], str | None, Exception | None]:
    """What a forward gives; or the module in which it fails, and how."""
    inside = _followed(model)
    prepare()
    try:
        return _shapes(model.eval()(input_ids=tokens)), None, None
    except Exception as error:  # meta tensors have no values, and some models take other inputs
        return {}, inside[-1], error


def _wants_values(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or "meta tensor" in str(error)


def _followed(model: Any) -> list[str]:
    """The modules that compute at any time, the innermost last; those that fail stay in it."""
    inside: list[str] = []

    def leave(*unused: Any) -> None:
        inside.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: inside.append(name))
        module.register_forward_hook(leave)
    return inside


def _shapes(outputs: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of what is to be the same on every rank; caches are not."""
    found = outputs.items()
    return {name: tuple(x.shape) for name, x in found if isinstance(x, torch.Tensor)}


def _story(model: Any, name: str, styles: Mapping[str, str], size: int, why: str) -> str:
    is_leaf = not any(True for _ in model.get_submodule(name).children())
    owner = name.rpartition(".")[0] if is_leaf else name
    inside = f"{owner}." if owner else ""
    near = {n: style for n, style in styles.items() if n.startswith(inside)}
    cut = ", ".join(f"{n.removeprefix(inside)} {style}" for n, style in near.items())
    where = owner or type(model).__name__
    return (
        f"{name} cannot compute its part of {size} ranks ({why.splitlines()[0]}); cut in {where} "
        f"are {cut or 'no modules'}. Cut what gives its inputs and what takes its outputs alike, "
        "or leave them out of tp_plan."
    )
