"""The GPUs of this node, by UUID, found without opening one.

A CUDA context in the launcher would stay in its ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRIVER = Path("/dev/nvidiactl")
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Device:
    """uuid: of the GPU, or of its MIG instance; parent: then of the GPU itself."""

    uuid: str
    parent: str = ""


def visible(environ: Mapping[str, str] = os.environ) -> list[Device]:
    """The devices a process with this environment may use, in CUDA's order; none without a driver.

    CUDA_VISIBLE_DEVICES is read as CUDA reads it (CUDA programming guide, "Environment variables"):
    numbers or UUIDs or their unambiguous beginnings, and nothing after the first that fits nothing.
    Numbers count in the order of the PCI bus, which is CUDA's if all GPUs of the node are alike.
    """
    if not DRIVER.exists():
        return []
    gpus = every()
    return gpus if VISIBLE not in environ else list(_chosen(environ[VISIBLE], gpus))


def of_ranks(nprocs: int, share: bool) -> dict[int, dict[str, str]]:
    """What LaunchInfo.extras says of the device of each local rank that has one.

    Rank i has the i-th visible device to itself, and a rank beyond the last has none; share lets
    those begin again at the first.
    """
    gpus = visible()
    count = nprocs if share and gpus else min(nprocs, len(gpus))
    return {rank: {"device": gpus[rank % len(gpus)].uuid} for rank in range(count)}


def every() -> list[Device]:
    """Every GPU of this node; a GPU that is divided (MIG) is listed as its instances."""
    with opened() as nvml:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return [device for handle in handles for device in _divided(nvml, handle)]


@contextmanager
def opened() -> Iterator[Any]:
    """NVML as a module, as long as the body runs. Raises ImportError without its bindings."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _divided(nvml: Any, handle: Any) -> list[Device]:
    uuid = nvml.nvmlDeviceGetUUID(handle)
    try:
        is_divided = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError_NotSupported:
        is_divided = False
    return list(_instances(nvml, handle, uuid)) if is_divided else [Device(uuid)]


def _instances(nvml: Any, handle: Any, parent: str) -> Iterator[Device]:
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError_NotFound:
            continue
        yield Device(nvml.nvmlDeviceGetUUID(instance), parent)


def _chosen(text: str, gpus: list[Device]) -> Iterator[Device]:
    whole = [gpu for gpu in gpus if not gpu.parent]
    for part in map(str.strip, text.split(",")):
        if part.isdigit():
            fitting = whole[int(part) : int(part) + 1]
        else:
            fitting = [gpu for gpu in gpus if part and gpu.uuid.startswith(part)]
        if len(fitting) != 1:
            return
        yield fitting[0]
