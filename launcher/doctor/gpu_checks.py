"""GPUs of this node and their interconnect, through NVML: no CUDA context is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.doctor.finding import Finding
from launcher.system import gpus

# nvmlGpuTopologyLevel_t of nvml.h, the closest first
LEVELS = {
    0: "one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one host bridge",
    40: "one NUMA node",
    50: "across NUMA nodes",
}
MAX_NVLINKS = 18


def gpu_devices() -> Iterator[Finding]:
    """Each GPU by UUID with its memory, and the interconnect of each pair."""
    if not gpus.DRIVER.exists():
        yield Finding("gpu", "driver", None, "no NVIDIA driver on this machine")
        return
    try:
        with gpus.nvml_session() as nvml:
            yield from _devices_and_pairs(nvml)
    except ImportError:
        yield Finding("gpu", "NVML", False, "its bindings are missing", "pip install nvidia-ml-py")
    except Exception as error:  # NVML has a class for each of its codes
        cause = error.__cause__ or error
        yield Finding("gpu", "NVML", False, f"{type(cause).__name__}: {cause}", gpus.REMEDY)


def _devices_and_pairs(nvml: Any) -> Iterator[Finding]:
    yield Finding("gpu", "driver", True, str(nvml.nvmlSystemGetDriverVersion()))
    count = nvml.nvmlDeviceGetCount()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    usable = {device.uuid for device in gpus.visible()}
    usable |= {device.parent for device in gpus.visible()}
    for handle in handles:
        yield _gpu(nvml, handle, usable)
    for b in range(count):
        for a in range(b):
            detail = _interconnect(nvml, handles[a], handles[b])
            yield Finding("gpu", f"{a} and {b}", True, detail)


def _gpu(nvml: Any, handle: Any, usable: set[str]) -> Finding:
    uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        detail = f"{name}, {memory.free >> 20} of {memory.total >> 20} MiB free"
    except nvml.NVMLError_NotSupported:  # of a GPU that has the host's memory
        detail = f"{name}, whose driver does not tell its memory"
    if uuid in usable:
        return Finding("gpu", uuid, True, detail)
    return Finding("gpu", uuid, None, f"{detail}; hidden by {gpus.VISIBLE}")


def _interconnect(nvml: Any, a: Any, b: Any) -> str:
    level = nvml.nvmlDeviceGetTopologyCommonAncestor(a, b)
    count = _count_active_nvlinks(nvml, a)
    nvlinks = f"; {count} NVLinks active on the first" if count else ""
    return LEVELS.get(level, f"topology level {level}") + nvlinks


def _count_active_nvlinks(nvml: Any, handle: Any) -> int:
    """The NVLinks of this GPU that are up; 0 if it has none."""
    up = 0
    for link in range(MAX_NVLINKS):
        try:
            up += nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError:
            break
    return up
