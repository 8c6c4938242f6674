"""Runs a sharded model on meta tensors, so that a plan that does not fit fails before loading.

whole = truncated_copy(model, styles)              # on meta, with one layer of each kind
dry_run(whole, part, styles, rank, size)     # part: a sharded copy of it
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from drumline.contact.caches import held_tensors
from drumline.errors import PlanError
from drumline.planner.model_profile import layer_names
from drumline.tensor_parallel.tp_layers import insert_collectives


class FakeCommunicator:
    """Returns tensors of the shapes that a Communicator would return; there are no other ranks."""

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size

    def allreduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def allgather(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty((self.world_size, *x.shape))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x[0]


def truncated_copy(model: Any, styles: Mapping[str, str]) -> Any:
    """A copy on meta with as few layers as show each kind there is."""
    truncated = copy.deepcopy(model).to("meta")
    stacks: dict[str, list[str]] = {}
    for name in layer_names(truncated):
        stacks.setdefault(name.rpartition(".")[0], []).append(name)
    for stack, names in stacks.items():
        kinds = [_signature(truncated.get_submodule(name), name, styles) for name in names]
        needed = max(kinds.index(kind) for kind in kinds) + 1
        layers = truncated.get_submodule(stack)
        if isinstance(layers, nn.ModuleList) and len(layers) == len(names):
            del layers[needed:]
    return truncated


def _signature(layer: nn.Module, name: str, styles: Mapping[str, str]) -> list[Any]:
    """Equal for layers that compute and are sharded in the same way."""
    parts = [(n, type(part), styles.get(f"{name}.{n}")) for n, part in layer.named_modules()]
    return [parts, [(n, p.shape, styles.get(f"{name}.{n}")) for n, p in layer.named_parameters()]]


@torch.no_grad()
def dry_run(
    model: Any, sharded: Any, styles: Mapping[str, str], rank: int, size: int, stages: bool = False
) -> None:
    """Raise PlanError if `sharded` cannot compute what `model` computes. Both are used up.

    A model that needs values, or more than tokens, to run at all is left to its first call from
    where it does. stages: between layers messages carry what one rank has.
    """
    whole, parts = _track_dicts(model), _track_dicts(sharded)
    tokens = torch.zeros(1, 2 * size, dtype=torch.int64, device="meta")
    expected, end, _ = _forward_shapes(model, tokens)
    communicator: Any = FakeCommunicator(rank, size)
    shapes, place, error = _forward_shapes(
        sharded, tokens, lambda: insert_collectives(sharded, styles, communicator)
    )
    split = [n for n in parts if parts[n] != whole.get(n, parts[n])] if stages else []
    if split:
        raise PlanError(
            f"{split[0]} hands on to later layers what {size} ranks have parts of, and between "
            "stages there is that of one; load the model with tp= alone, or with device_map= alone."
        )
    needs_values = isinstance(error, NotImplementedError) or "meta tensor" in str(error)
    if error is not None and not needs_values and place != end:
        raise PlanError(_describe_misfit(sharded, place or "", styles, size, str(error))) from error
    if error is None and end is None and shapes != expected:
        raise PlanError(
            f"a forward returns {shapes} where the unsharded model returns {expected}, so its "
            "output is one rank's shard; shard the last module as 'colwise_gather_output', or not "
            "at all."
        )


def _forward_shapes(
    model: Any, tokens: torch.Tensor, prepare: Callable[[], None] = lambda: None
) -> tuple[dict[str, tuple[int, ...]], str | None, Exception | None]:
    """The shapes that a forward returns; or the module in which it fails, and the error."""
    active_modules = _track_modules(model)
    prepare()
    try:
        return _shapes(model.eval()(input_ids=tokens)), None, None
    except Exception as error:  # meta tensors have no values, and some models take other inputs
        return {}, active_modules[-1], error


def _track_modules(model: Any) -> list[str]:
    """The modules that compute at any time, the innermost last; those that fail stay in it."""
    active_modules: list[str] = []

    def leave(*unused: Any) -> None:
        active_modules.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: active_modules.append(name))
        module.register_forward_hook(leave)
    return active_modules


def _track_dicts(model: Any) -> dict[str, list[tuple[int, ...]]]:
    """By layer that has run, the shapes in the dicts that it was given, and may have written to."""
    shapes: dict[str, list[tuple[int, ...]]] = {}

    def look(_: Any, args: Any, options: Any, __: Any, name: str) -> None:
        dicts = [dict(v) for v in (*args, *options.values()) if isinstance(v, Mapping)]
        shapes[name] = [tuple(tensor.shape) for tensor in held_tensors(dicts)]

    for name in layer_names(model):
        hook = functools.partial(look, name=name)
        model.get_submodule(name).register_forward_hook(hook, with_kwargs=True)
    return shapes


def _shapes(outputs: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the outputs that every rank has to have; caches differ."""
    return {name: tuple(x.shape) for name, x in outputs.items() if isinstance(x, torch.Tensor)}


def _describe_misfit(model: Any, name: str, styles: Mapping[str, str], size: int, why: str) -> str:
    is_leaf = not any(True for _ in model.get_submodule(name).children())
    owner = name.rpartition(".")[0] if is_leaf else name
    inside = f"{owner}." if owner else ""
    near = {n: style for n, style in styles.items() if n.startswith(inside)}
    sharded = ", ".join(f"{n.removeprefix(inside)} {style}" for n, style in near.items())
    where = owner or type(model).__name__
    return (
        f"{name} cannot compute its shard of {size} ranks ({why.splitlines()[0]}); sharded in "
        f"{where}: {sharded or 'no modules'}. Shard the modules before and behind it to match, or "
        "leave them out of tp_plan."
    )
