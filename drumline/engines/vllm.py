"""The entry point of vLLM's platform plugins: vLLM over our Communicator, if DRUMLINE_VLLM=1.

DRUMLINE_VLLM=1 python -m vllm.entrypoints.openai.api_server --model MODEL --tensor-parallel-size 2

vLLM calls platform() in each of its processes, and swallows what it raises. So everything that can
be wrong is checked where vLLM imports the platform that it names, or asks it about its config.
"""

from __future__ import annotations

import launcher

ENGINE = "vllm"
PLATFORM = "drumline.engines.vllm_platform.DrumlinePlatform"
DEVICE_COMMUNICATORS = "vllm.distributed.device_communicators"


def platform() -> str | None:
    """The class of the platform, for vLLM to import; None unless it was asked for."""
    try:
        return None if launcher.engine_request(ENGINE) is None else PLATFORM
    except ValueError:
        return PLATFORM  # whose import raises it


def timeout_s(engine: str = ENGINE) -> float:
    """The deadline of each call among the engine's workers."""
    request = launcher.engine_request(engine)
    return 300.0 if request is None or request.timeout_s is None else request.timeout_s
