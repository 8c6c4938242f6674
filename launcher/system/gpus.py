"""The GPUs of this node, by UUID, without opening one.

A CUDA context in the launcher would be inherited by its ranks, which could not use it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRIVER = Path("/dev/nvidiactl")
REMEDY = "nvidia-smi (it fails as well; after an update of the driver, reboot)"
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class GpuDevice:
    """uuid: of the GPU, or of its MIG instance; parent: in that case, of the GPU itself."""

    uuid: str
    parent: str = ""


def visible(environ: Mapping[str, str] = os.environ) -> list[GpuDevice]:
    """The devices a process with this environment may use, in CUDA's order; none without a driver.

    CUDA_VISIBLE_DEVICES is read as CUDA reads it (CUDA programming guide, "Environment variables"):
    indices, UUIDs or their unambiguous prefixes, and nothing after the first that matches nothing.
    Indices count in the order of the PCI bus, which is CUDA's if all GPUs of the node are equal.
    """
    if not DRIVER.exists() or environ.get(VISIBLE, "0").strip() in ("", "-1"):
        return []
    gpus = all_gpus()
    return gpus if VISIBLE not in environ else list(_selected(environ[VISIBLE], gpus))


def is_restricted() -> bool:
    """True if this process may use some of the GPUs of its node only, as under srun."""
    return DRIVER.exists() and len(visible()) < len(all_gpus())


def for_ranks(nprocs: int, share: bool) -> dict[int, dict[str, str]]:
    """The LaunchInfo.extras for the device of each local rank that has one.

    Rank i gets the i-th visible device, and a rank beyond the last gets none; with share, those
    begin again at the first.
    """
    gpus = visible()
    count = nprocs if share and gpus else min(nprocs, len(gpus))
    return {rank: {"device": gpus[rank % len(gpus)].uuid} for rank in range(count)}


def all_gpus() -> list[GpuDevice]:
    """Every GPU of this node; a GPU that is partitioned (MIG) is listed as its instances."""
    with nvml_session() as nvml:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return [device for handle in handles for device in _devices(nvml, handle)]


def used_nbytes() -> dict[int, int]:
    """Memory of this node's GPUs that each process uses, by pid, as far as the driver tells."""
    used: dict[int, int] = {}
    if DRIVER.exists():
        with suppress(OSError), nvml_session() as nvml:
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    nbytes = process.usedGpuMemory or 0  # None where the driver does not tell
                    used[process.pid] = used.get(process.pid, 0) + nbytes
    return used


@contextmanager
def nvml_session() -> Iterator[Any]:
    """NVML as a module, initialised for the body.

    Raises ImportError without its bindings, and OSError where it does not work.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise OSError(
            f"the GPUs of this machine cannot be listed, as NVML says {error}. Try {REMEDY}, or "
            f"set {VISIBLE} to nothing, for ranks without one."
        ) from error


def _devices(nvml: Any, handle: Any) -> Iterator[GpuDevice]:
    """The GPU, or its MIG instances."""
    uuid = nvml.nvmlDeviceGetUUID(handle)
    try:
        has_mig = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError_NotSupported:
        has_mig = False
    if not has_mig:
        yield GpuDevice(uuid)
        return
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(nvml.NVMLError_NotFound):
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            yield GpuDevice(nvml.nvmlDeviceGetUUID(instance), parent=uuid)


def _selected(text: str, gpus: list[GpuDevice]) -> Iterator[GpuDevice]:
    whole = [gpu for gpu in gpus if not gpu.parent]
    for part in map(str.strip, text.split(",")):
        if part.isdecimal():
            matches = whole[int(part) : int(part) + 1]
        else:
            matches = [gpu for gpu in gpus if part and gpu.uuid.startswith(part)]
        if len(matches) != 1:
            return
        yield matches[0]
