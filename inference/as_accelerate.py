"""Accelerate's planning and dispatch functions, under their names and with their answers.

device_map = inference.infer_auto_device_map(model, max_memory={0: "10GiB", "cpu": "30GiB"})
device_map = inference.infer_auto_device_map(model, max_memory=inference.get_max_memory(coor))

In one process they are Accelerate's own functions, called and not written again. Where a place is
(rank, device), which Accelerate would refuse, the planner of the cluster answers instead.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import launcher
from coordinator import Coordinator
from inference.dispatch import dispatch
from inference.layout import layout
from inference.load import load
from inference.memory import cluster_memory, nbytes
from inference.plan import DeviceMap, plan

Function = TypeVar("Function", bound=Callable[..., Any])

HONOURED = {"offload_dir", "preload_module_classes"}
"""Options of dispatching that hold over ranks too: an offloaded module is always fetched whole."""


def _of(name: str) -> Any:
    """A function of Accelerate, or the line that installs it."""
    try:
        return getattr(importlib.import_module("accelerate.utils"), name, None) or getattr(
            importlib.import_module("accelerate"), name
        )
    except ImportError as missing:
        raise ImportError(
            f"inference.{name} is Accelerate's function for one process, and accelerate is not "
            'installed ("pip install accelerate"); inference.plan and inference.load '
            "plan and load over all ranks without it."
        ) from missing


def _like_accelerate(function: Function) -> Function:
    """With the signature that the installed Accelerate has, if one is installed."""
    with contextlib.suppress(ImportError):
        signature = inspect.signature(_of(function.__name__))
        function.__signature__ = signature  # type: ignore[attr-defined]
    return function


@_like_accelerate
def get_max_memory(max_memory: Any = None) -> Any:
    """Bytes free, by device of this process; given a Coordinator, by place of the cluster.

    max_memory: what Accelerate takes (nothing, or sizes by device, which are read and put in
        order); or a Coordinator, and then the call is collective and the answer is
        {(rank, device): bytes} over all ranks, each device counted once.
    """
    if isinstance(max_memory, Coordinator):
        return cluster_memory(max_memory)
    return _of("get_max_memory")(max_memory)


@_like_accelerate
def get_balanced_memory(*args: Any, **kwargs: Any) -> Any:
    """Accelerate's: room by device, lowered so that "auto" spreads a model evenly."""
    return _of("get_balanced_memory")(*args, **kwargs)


@_like_accelerate
def infer_auto_device_map(model: Any, max_memory: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A device map of `model` within `max_memory`.

    With {device: size} it is Accelerate's answer. With {(rank, device): size}, such as
    get_max_memory(coor) gives, it is the DeviceMap that `plan` makes; raises PlanError if that
    cannot be.
    """
    if not _names_places(max_memory):
        return _of("infer_auto_device_map")(model, max_memory, *args, **kwargs)
    return _over_places(model, max_memory, *args, **kwargs)


def _names_places(keyed: Any) -> bool:
    return isinstance(keyed, Mapping) and any(isinstance(key, tuple) for key in keyed)


def _over_places(
    model: Any, max_memory: Mapping[Any, Any], no_split_module_classes: Any = None, **others: Any
) -> DeviceMap:
    surplus = sorted(key for key, value in others.items() if value not in (None, False))
    if surplus:
        raise TypeError(
            f"infer_auto_device_map over places of several ranks does not know {surplus}, so it "
            "would ignore them; leave them out, or give max_memory by device for Accelerate's map."
        )
    room = {place: nbytes(size) for place, size in max_memory.items()}
    return plan(layout(model, no_split_module_classes), room)


@_like_accelerate
def dispatch_model(model: Any, device_map: Any, *args: Any, **kwargs: Any) -> Any:
    """The model with its modules where the map says.

    In a launch of one rank it is Accelerate's. In a launch of several, numbers are ranks (places
    may be (rank, device) too), every rank calls it with the same model, and it ends as
    `inference.load` does: the master has the model, and the others serve.
    """
    if not _is_over_ranks(device_map):
        return _of("dispatch_model")(model, device_map, *args, **kwargs)
    bound = inspect.signature(dispatch_model).bind_partial(model, device_map, *args, **kwargs)
    given = bound.arguments
    _refuse_others("dispatch_model", given, {"model", "device_map", *HONOURED})
    return dispatch(model, device_map, offload_dir=given.get("offload_dir"))


@_like_accelerate
def load_checkpoint_and_dispatch(
    model: Any, checkpoint: Any, device_map: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """The model, which may be on meta, with the weights of a checkpoint where the map says.

    In a launch of one rank, or without a device map, it is Accelerate's. In a launch of several it
    spreads the model over all ranks as dispatch_model does, each reading its own part of a
    safetensors checkpoint only; a transformers model is loaded by `inference.load`.
    """
    if device_map is None or not _is_over_ranks(device_map):
        return _of("load_checkpoint_and_dispatch")(model, checkpoint, device_map, *args, **kwargs)
    bound = inspect.signature(load_checkpoint_and_dispatch).bind_partial(
        model, checkpoint, device_map, *args, **kwargs
    )
    given = bound.arguments
    known = {"model", "checkpoint", "device_map", "max_memory", "no_split_module_classes", "dtype"}
    _refuse_others("load_checkpoint_and_dispatch", given, known | HONOURED | {"offload_folder"})
    if hasattr(type(model), "config_class"):
        return load(
            checkpoint,
            device_map,
            max_memory=given.get("max_memory"),
            dtype=given.get("dtype"),
            cls=type(model),
        )
    return dispatch(
        model,
        device_map,
        checkpoint=checkpoint,
        max_memory=given.get("max_memory"),
        uncut=given.get("no_split_module_classes"),
        offload_dir=given.get("offload_folder"),
    )


def _is_over_ranks(device_map: Any) -> bool:
    if isinstance(device_map, DeviceMap) or launcher.current().world_size > 1:
        return True
    return isinstance(device_map, Mapping) and any(
        isinstance(place, tuple) for place in device_map.values()
    )


def _refuse_others(name: str, given: Mapping[str, Any], known: set[str]) -> None:
    surplus = sorted(key for key in set(given) - known if given[key] not in (None, False, True))
    if surplus:
        raise TypeError(
            f"{name} over the ranks of a launch does not know {surplus}, so it would ignore them; "
            "leave them out, or see inference.load."
        )
