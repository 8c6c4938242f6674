"""The CUDA devices that this process sees, and what is free on them, without using them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def accelerators() -> dict[str, dict[str, Any]]:
    """By name: the free bytes, and an id that every process on the node has for the device."""
    if not torch.cuda.is_available():
        return {}
    ids = [str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())]
    return {f"cuda:{n}": {"id": uuid, "free": _free(n, uuid)} for n, uuid in enumerate(ids)}


def _free(number: int, uuid: str) -> int:
    """From NVML if it knows the device: asking CUDA would take memory on it for a context."""
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
        finally:
            pynvml.nvmlShutdown()
    return int(torch.cuda.mem_get_info(number)[0])
