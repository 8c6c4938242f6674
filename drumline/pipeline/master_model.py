"""The transformers model on the master, some of whose modules run on other ranks."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from drumline.checkpoint.plan_executor import LoadStats
from drumline.core.device_map import DeviceMap
from drumline.core.layer_kinds import kinds_of
from drumline.core.mixed_classes import mixed_class
from drumline.errors import exit_code
from drumline.offload.prefetcher import WeightPrefetcher
from drumline.pipeline import unsupported
from drumline.pipeline.driver import PipelineDriver
from drumline.pipeline.fast_paths import warn_if_off
from drumline.pipeline.overlap import MicrobatchMixin
from drumline.pipeline.paged_generation import PagedGenerationMixin
from drumline.pipeline.pass_hooks import UnrecordedOutputs, install_hooks
from drumline.pipeline.remote_layer import RemoteModule
from drumline.pipeline.unsupported import UnsupportedMixin
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
        if self._driver is not None:
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
        if remote is None:
            remote = {name: rank for name, (rank, _) in device_map.places.items() if rank != 0}
        try:
            warn_if_off()
            _connect(model, driver, remote)
        except BaseException as error:  # of which the other ranks, which serve by now, hear so
            model.close(exit_code(error))
            raise
    return model


def _connect(model: Any, driver: PipelineDriver, remote: Mapping[str, int]) -> None:
    unrecorded: UnrecordedOutputs = []
    numbers = itertools.count(1)

    def scale(*scaling: Any) -> None:
        driver.record("scale_weight", next(numbers), *scaling)

    tied = {name for pair in getattr(model, "all_tied_weights_keys", {}).items() for name in pair}
    kinds = kinds_of({name: model.get_submodule(name) for name in remote})
    for name, rank in remote.items():
        module = model.get_submodule(name)
        module.forward = RemoteModule(driver, name, module, rank, kinds[name])
        unsupported.make_read_only(module, name, rank, unrecorded, scale, tied)
    unsupported.show_device(model, model._first_device)
    install_hooks(model, remote, driver.context, unrecorded)
    message_trace.trace_driver(model, driver)


def _leave(driver: PipelineDriver | None) -> None:
    if driver is not None:
        driver.leave(1 if getattr(sys, "last_value", None) is not None else 0)
