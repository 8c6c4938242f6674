"""The transformers model on the master, some of whose modules run on other ranks."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from coordinator import torch_private
from drumline.checkpoint.plan_executor import LoadStats
from drumline.contact.model_parts import is_model
from drumline.core.device_map import DeviceMap
from drumline.core.layer_kinds import kinds_of
from drumline.core.mixed_classes import mixed_class
from drumline.errors import DrumlineError, exit_code
from drumline.offload.prefetcher import WeightPrefetcher
from drumline.pipeline import unsupported
from drumline.pipeline.driver import PipelineDriver
from drumline.pipeline.fast_paths import warn_if_off
from drumline.pipeline.lazy_tensor import LazyTensor, fetch_all, fetch_input
from drumline.pipeline.overlap import MicrobatchMixin
from drumline.pipeline.paged_generation import PagedGenerationMixin
from drumline.pipeline.remote_layer import RemoteModule
from drumline.pipeline.unsupported import UnsupportedMixin, is_requested
from drumline.stages import message_trace
from drumline.stages.stage_weights import LoadedStage


class DistributedModel(MicrobatchMixin, PagedGenerationMixin, UnsupportedMixin):
    """Mixed into the class of the model: everything of transformers works, and it can be closed.

    `device_map` says where each module is, `loaded` what loading took on this rank, in bytes.
    Leaving the `with` block, `close()`, the end of the script and the model's end of life all
    release the other ranks; an exception that leaves the block ends them with its exit code.
    """

    device_map: DeviceMap
    loaded: LoadStats | None = None
    _driver: PipelineDriver | None
    _prefetcher: WeightPrefetcher | None
    _first_device: torch.device
    _leave: Any

    def close(self, exit_code: int = 0) -> None:
        """Release the other ranks, which end with exit_code. Harmless when done twice."""
        if exit_code and self._driver is not None:
            self._driver.leave(exit_code)
        self._leave()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(0 if error is None else exit_code(error))

    @property
    def device(self) -> torch.device:
        """The device for inputs: the first one of the master."""
        return self._first_device

    def may_compile(self) -> bool:
        """True unless it waits for other ranks, or reads weights from the disk."""
        return self._driver is None and self._prefetcher is None

    @property
    def traffic(self) -> tuple[int, int] | None:
        """Messages that the master has sent, and their bytes; None if it is alone."""
        if self._driver is None:
            return None
        link = self._driver.ring.next
        return link.num_messages, link.num_bytes


def distribute(
    stage: LoadedStage, driver: PipelineDriver | None, remote: Mapping[str, int] | None = None
) -> Any:
    """The model with its remote modules replaced by calls over the ring.

    remote: module to the hop of the ring that runs it; those that are not on rank 0 if not given.
    """
    model, device_map, kind = stage.model, stage.device_map, type(stage.model)
    model.__class__, model._plain_class = mixed_class(kind, DistributedModel, kind), kind
    model.device_map, model.loaded = device_map, stage.stats
    model._driver, model._prefetcher = driver, stage.prefetcher
    model._first_device = torch.device(device_map.device_of(0))
    model._leave = weakref.finalize(model, _leave, driver)
    for name in stage.prefetcher.away if stage.prefetcher is not None else ():
        unsupported.make_weights_read_only(model.get_submodule(name), name)
    if driver is not None:
        warn_if_off()
        if remote is None:
            remote = {name: rank for name, (rank, _) in device_map.places.items() if rank != 0}
        unrecorded: unsupported.UnrecordedOutputs = []
        scale = functools.partial(driver.record, "scale_weight")
        tied = {
            name for pair in getattr(model, "all_tied_weights_keys", {}).items() for name in pair
        }
        kinds = kinds_of({name: model.get_submodule(name) for name in remote})
        for name, rank in remote.items():
            module = model.get_submodule(name)
            module.forward = RemoteModule(driver, name, module, rank, kinds[name])
            unsupported.make_read_only(module, name, rank, unrecorded, scale, tied)
        unsupported.show_device(model, model._first_device)
        _install_hooks(model, remote, driver, unrecorded)
        message_trace.trace_driver(model, driver)
    return model


def _install_hooks(
    model: nn.Module,
    remote: Mapping[str, int],
    driver: PipelineDriver,
    unrecorded: unsupported.UnrecordedOutputs,
) -> None:
    """Have the models around remote layers return plain tensors to the user.

    Local modules with weights, such as a norm behind remote layers, are given plain ones: an
    operation on a lazy tensor takes longer. Modules without weights may hand it on as it is."""
    checks = unsupported.PassChecks({name: model.get_submodule(name) for name in remote})
    model._pass_checks = checks  # type: ignore[assignment]

    def give_output(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        fetched = _fetch_output(output, driver.context.loses_gradient)
        _refuse_unrecorded(unrecorded, model, module, kwargs)
        return fetched

    dotted = {name[:at] for name in remote for at, letter in enumerate(name) if letter == "."}
    around = dotted | {""} if remote else dotted
    for name, module in model.named_modules():
        if name in remote:
            continue
        if name in around:
            module.register_forward_pre_hook(checks.check, with_kwargs=True)
            module.register_forward_pre_hook(driver.context.begin, with_kwargs=True)
            module.register_forward_hook(driver.context.end, always_call=True)
            module.register_forward_hook(give_output, with_kwargs=True)
        elif name.rpartition(".")[0] in around and any(True for _ in module.parameters()):
            module.register_forward_pre_hook(fetch_input)


def _refuse_unrecorded(
    unrecorded: unsupported.UnrecordedOutputs, model: nn.Module, module: nn.Module, kwargs: Any
) -> None:
    """Raise for outputs that transformers records in a part of a layer, as hidden states of Zamba.

    After the pass, for it says where it records in the first one that is asked for any.
    """
    keys = dict.fromkeys(key for key, _, _ in unrecorded)
    requested = [key for key in keys if is_requested(f"output_{key}", module, kwargs)]
    for key, part, rank in unrecorded if requested else ():
        if key in requested and _recorder(model, part) is module:
            raise DrumlineError(
                f"rank 0: output_{key}=True, but this model makes them inside of layers, as in "
                f"{part} on rank {rank}, so some would be missing; pass output_{key}=False, or "
                "load the model on one rank."
            )


def _recorder(model: nn.Module, part: str) -> nn.Module:
    """The innermost model around a part, whose output it would go into."""
    while part:
        part = part.rpartition(".")[0]
        if is_model(model.get_submodule(part)):
            break
    return model.get_submodule(part)


def _fetch_output(output: Any, loses_gradient: bool) -> Any:
    if torch.is_grad_enabled():
        forbid = functools.partial(_forbid_gradient, is_due=loses_gradient)
        return torch_private.tree_map(forbid, fetch_all(output))
    return fetch_all(output) if _has_lazy(output) else None


def _has_lazy(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_has_lazy(item) for item in value)
    if isinstance(value, dict):
        return any(_has_lazy(item) for item in value.values())
    return isinstance(value, LazyTensor)


def _forbid_gradient(value: Any, is_due: bool) -> Any:
    """A tensor whose gradient, if one is asked for, is an error rather than half of the truth.

    is_due: on one rank it would have one even if it requires none here.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if is_due and value.is_floating_point() and not value.requires_grad:
        value = value.detach().requires_grad_()
    return _NoGradient.apply(value) if value.requires_grad else value  # type: ignore[no-untyped-call]


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise DrumlineError(
            "rank 0: no gradient comes back from layers on other ranks, so this one would be "
            "wrong; use the distributed model for inference only, under torch.no_grad()."
        )


def _leave(driver: PipelineDriver | None) -> None:
    if driver is not None:
        driver.leave(1 if getattr(sys, "last_value", None) is not None else 0)
