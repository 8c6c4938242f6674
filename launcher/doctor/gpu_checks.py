"""The GPUs of this node and what joins them, through NVML: no CUDA context is made."""

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
MOST_LINKS = 18


def gpu_devices() -> Iterator[Finding]:
    """Each by UUID with its memory, and for each pair what lies between."""
    if not gpus.DRIVER.exists():
        yield Finding("gpu", "driver", None, "no NVIDIA driver on this machine")
        return
    try:
        with gpus.opened() as nvml:
            yield from _seen(nvml)
    except ImportError:
        yield Finding("gpu", "NVML", False, "its bindings are missing", "pip install nvidia-ml-py")
    except Exception as error:  # NVML has a class for each of its codes
        remedy = (
            "nvidia-smi (it fails alike; after an update of the driver start the machine again)"
        )
        yield Finding("gpu", "NVML", False, f"{type(error).__name__}: {error}", remedy)


def _seen(nvml: Any) -> Iterator[Finding]:
    yield Finding("gpu", "driver", True, str(nvml.nvmlSystemGetDriverVersion()))
    count = nvml.nvmlDeviceGetCount()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    usable = {device.uuid for device in gpus.visible()}
    usable |= {device.parent for device in gpus.visible()}
    for handle in handles:
        yield _gpu(nvml, handle, usable)
    pairs = [(one, other) for other in range(count) for one in range(other)]
    for one, other in pairs:
        found = _between(nvml, handles[one], handles[other])
        yield Finding("gpu", f"{one} and {other}", True, found)


def _gpu(nvml: Any, handle: Any, usable: set[str]) -> Finding:
    uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    found = f"{name}, {memory.free >> 20} of {memory.total >> 20} MiB free"
    if uuid in usable:
        return Finding("gpu", uuid, True, found)
    return Finding("gpu", uuid, None, f"{found}; hidden by {gpus.VISIBLE}")


def _between(nvml: Any, one: Any, other: Any) -> str:
    level = nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
    links = _links(nvml, one)
    told = f"; {links} NVLinks active on the first" if links else ""
    return LEVELS.get(level, f"topology level {level}") + told


def _links(nvml: Any, handle: Any) -> int:
    """How many NVLinks of this GPU are up; 0 too where it has none."""
    up = 0
    for link in range(MOST_LINKS):
        try:
            up += nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError:
            break
    return up
