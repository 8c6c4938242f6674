"""Running of each module on its device: inputs are moved, weights come from the CPU or disk.

install_device_hooks(model, device_map, rank, prefetcher)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from drumline.core.device_map import DeviceMap
from drumline.offload.prefetcher import WeightPrefetcher

Forward = Callable[..., Any]


def install_device_hooks(
    model: nn.Module, device_map: DeviceMap, rank: int, prefetcher: WeightPrefetcher | None
) -> None:
    """Give the modules of this rank that need it a forward that brings inputs and weights along.

    prefetcher: of the weights of this rank's `offloaded_modules`; None without any.
    """
    runs_on = device_map.runs_on(rank)
    everywhere = dict(model.named_modules(remove_duplicate=False))
    modules = {name: everywhere[name] for name in runs_on if name in everywhere}
    away = set(offloaded_modules(device_map, rank))
    for name, module in modules.items():
        if prefetcher is not None and name in away:
            module.forward = _with_loaded_weights(module.forward, name, prefetcher)
        if len(set(runs_on.values())) > 1:
            module.forward = _with_moved_arguments(module.forward, torch.device(runs_on[name]))
    if len(set(runs_on.values())) > 1 and rank == 0:
        device = torch.device(device_map.device_of(0))
        model.register_forward_hook(lambda _, args, output: _with_moved_values(output, device))


def offloaded_modules(device_map: DeviceMap, rank: int) -> list[str]:
    """The modules of a rank whose weights lie elsewhere than where they run, in their order."""
    runs_on = device_map.runs_on(rank)
    return [name for name, device in device_map.of(rank).items() if device != runs_on[name]]


def _with_loaded_weights(forward: Forward, name: str, prefetcher: WeightPrefetcher) -> Forward:
    """Wrap a forward so that the module's weights are loaded while it runs."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with prefetcher.loaded(name):
            return forward(*args, **kwargs)

    return run


def _with_moved_arguments(forward: Forward, device: torch.device) -> Forward:
    """Wrap a forward so that tensors among its arguments are moved to the device."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*move_to_device(args, device), **move_to_device(kwargs, device))

    return run


def _with_moved_values(output: Any, device: torch.device) -> Any:
    """The outputs of the whole model on the device that its inputs go to."""
    if not isinstance(output, dict):  # a ModelOutput among them
        return move_to_device(output, device)
    for key, value in output.items():
        output[key] = move_to_device(value, device)
    return output


def move_to_device(value: Any, device: torch.device) -> Any:
    """Tensors moved, in tuples, lists and dicts; caches and all else are the same objects."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device)
    if type(value) in (tuple, list):
        return type(value)(move_to_device(item, device) for item in value)
    if type(value) is dict:
        return {key: move_to_device(item, device) for key, item in value.items()}
    return value
