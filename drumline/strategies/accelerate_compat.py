"""Accelerate's planning and dispatch functions, under their names and with their answers.

device_map = drumline.infer_auto_device_map(model, max_memory={0: "10GiB", "cpu": "30GiB"})
device_map = drumline.infer_auto_device_map(model, max_memory=drumline.get_max_memory(coor))

In one process they are Accelerate's own functions, called and not written again. Where a place is
(rank, device), which Accelerate would refuse, the planner of the cluster answers instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

import launcher
from coordinator import Coordinator
from drumline.contact import accelerate_api
from drumline.core.device_map import DeviceMap, Place, place_of
from drumline.planner.load_options import LoadOptions
from drumline.planner.memory import cluster_memory, limit_memory
from drumline.planner.model_profile import profile_model
from drumline.planner.plan import plan
from drumline.strategies.existing_model import dispatch
from drumline.strategies.load import load_as
from drumline.strategies.opening import checkpoint_dtype

Function = TypeVar("Function", bound=Callable[..., Any])

SUPPORTED_OPTIONS = {
    "offload_dir",
    "preload_module_classes",
    "offload_buffers",
    "force_hooks",
    "strict",
}
"""Options of dispatching that hold over ranks too: an offloaded module is always fetched whole,
and a checkpoint has to have what the model has."""


def _with_accelerate_signature(function: Function) -> Function:
    """With the signature that the installed Accelerate has."""
    signature = inspect.signature(accelerate_api.function(function.__name__))
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


@_with_accelerate_signature
def get_max_memory(max_memory: Any = None) -> Any:
    """Bytes free, by device of this process; given a Coordinator, by place of the cluster.

    max_memory: what Accelerate takes (nothing, or sizes by device, which are read and put in
        order); sizes by (rank, device), likewise; or a Coordinator, and then the call is
        collective and the answer is {(rank, device): bytes} over all ranks, each device counted
        once.
    """
    if isinstance(max_memory, Coordinator):
        return cluster_memory(max_memory)
    if _has_places(max_memory):
        return _as_free_nbytes(max_memory)
    return accelerate_api.function("get_max_memory")(max_memory)


@_with_accelerate_signature
def get_balanced_memory(*args: Any, **kwargs: Any) -> Any:
    """Accelerate's: bytes by device, lowered so that "auto" spreads a model evenly."""
    if any(map(_has_places, [*args, *kwargs.values()])):
        raise TypeError(
            "get_balanced_memory is given places of several ranks, which Accelerate does not know; "
            'leave it out: drumline.plan and drumline.load spread evenly with "auto".'
        )
    return accelerate_api.function("get_balanced_memory")(*args, **kwargs)


@_with_accelerate_signature
def infer_auto_device_map(model: Any, *args: Any, **kwargs: Any) -> Any:
    """A device map of `model` within `max_memory`.

    With {device: size} it is Accelerate's answer. With {(rank, device): size}, such as
    get_max_memory(coor) gives, it is the DeviceMap that `plan` makes; raises PlanError if that
    cannot be.
    """
    if not any(map(_has_places, [*args, *kwargs.values()])):
        return accelerate_api.function("infer_auto_device_map")(model, *args, **kwargs)
    supported = {"model", "max_memory", "no_split_module_classes", "clean_result"}
    arguments = _named_arguments(infer_auto_device_map, supported, model, *args, **kwargs)
    return plan(
        profile_model(model, arguments.get("no_split_module_classes")),
        _as_free_nbytes(arguments["max_memory"]),
    )


def _has_places(keyed: Any) -> bool:
    return isinstance(keyed, Mapping) and any(isinstance(key, tuple) for key in keyed)


def _as_free_nbytes(max_memory: Mapping[Any, Any]) -> dict[Place, int]:
    """The sizes in bytes and in order; a rank alone stands for its CPU, a device for rank 0's."""
    ranks = [place_of(key, (), "max_memory")[0] for key in max_memory]
    return limit_memory({(rank, "cpu"): 0 for rank in ranks}, max_memory)


@_with_accelerate_signature
def dispatch_model(model: Any, device_map: Any, *args: Any, **kwargs: Any) -> Any:
    """The model with its modules where the map says.

    In a launch of one rank it is Accelerate's. In a launch of several, numbers are ranks (places
    may be (rank, device) too), every rank calls it with the same model, and it ends as
    `drumline.load` does: the master has the model, and the others serve.
    """
    if not _is_over_ranks(device_map):
        return accelerate_api.function("dispatch_model")(model, device_map, *args, **kwargs)
    supported = {"model", "device_map", *SUPPORTED_OPTIONS}
    arguments = _named_arguments(dispatch_model, supported, model, device_map, *args, **kwargs)
    return dispatch(model, device_map, offload_dir=arguments.get("offload_dir"))


@_with_accelerate_signature
def load_checkpoint_and_dispatch(
    model: Any, checkpoint: Any, device_map: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """The model, which may be on meta, with the weights of a checkpoint where the map says.

    In a launch of one rank, or without a device map, it is Accelerate's. In a launch of several it
    spreads the model over all ranks as dispatch_model does, each reading its own part of a
    safetensors checkpoint only; a transformers model is loaded by `drumline.load`, with its config.
    """
    if device_map is None or not _is_over_ranks(device_map):
        return accelerate_api.function("load_checkpoint_and_dispatch")(
            model, checkpoint, device_map, *args, **kwargs
        )
    own = {"model", "checkpoint", "device_map", "max_memory", "no_split_module_classes", "dtype"}
    supported = own | SUPPORTED_OPTIONS | {"offload_folder"}
    arguments = _named_arguments(
        load_checkpoint_and_dispatch, supported, model, checkpoint, device_map, *args, **kwargs
    )
    kind, get = type(model), arguments.get
    memory, folder, dtype = get("max_memory"), get("offload_folder"), get("dtype")
    options: dict[str, Any] = {"max_memory": memory}
    if isinstance(device_map, DeviceMap):
        device_map = device_map.places
    if isinstance(device_map, str):  # a map says itself what to split, as in Accelerate
        options["no_split_module_classes"] = get("no_split_module_classes")
    if hasattr(kind, "config_class"):
        options |= {"dtype": dtype, "cls": kind, "config": model.config}
        return load_as(checkpoint, None, LoadOptions(device_map, **options))
    if dtype is not None:
        resolved = checkpoint_dtype(dtype, None)
        for value in model.state_dict(keep_vars=True).values():  # what comes from the checkpoint
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.data = value.data.to(resolved)
    return dispatch(model, device_map, checkpoint=checkpoint, offload_dir=folder, **options)


def _is_over_ranks(device_map: Any) -> bool:
    if isinstance(device_map, DeviceMap) or launcher.current().world_size > 1:
        return True
    return isinstance(device_map, Mapping) and any(
        isinstance(place, tuple) for place in device_map.values()
    )


def _named_arguments(
    function: Any, supported: set[str], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """The arguments by name. Raises TypeError for those that are not known and say something."""
    signature = inspect.signature(function)
    arguments = signature.bind_partial(*args, **kwargs).arguments
    says = {key for key in arguments if arguments[key] is not signature.parameters[key].default}
    if surplus := sorted(says - supported):
        raise TypeError(
            f"{function.__name__} over the ranks of a launch does not know {surplus}, so it would "
            "ignore them; leave them out, or see drumline.plan and drumline.strategies.load."
        )
    return arguments
