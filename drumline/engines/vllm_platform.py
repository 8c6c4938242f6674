"""vLLM's platform, with our communicators for its groups of ranks. Only vLLM imports this."""

from __future__ import annotations

from typing import Any

import vllm
from vllm import platforms
from vllm.utils.import_utils import resolve_obj_by_qualname

from drumline.engines import check_version
from drumline.engines.vllm import ENGINE, VERSIONS, detected_platform, timeout_s

COMMUNICATORS = {
    "cpu": "drumline.engines.vllm_communicator.VllmCommunicator",
    "cuda": "drumline.engines.vllm_cuda_communicator.VllmCudaCommunicator",
}


def _detected_platform() -> Any:
    check_version(ENGINE, vllm.__version__, *VERSIONS)
    timeout_s()
    name = detected_platform(platforms.cpu_platform_plugin, platforms.cuda_platform_plugin)
    return resolve_obj_by_qualname(name)


Detected: Any = _detected_platform()


class DrumlinePlatform(Detected):  # type: ignore[misc]  # vLLM has chosen it
    """The platform that vLLM detects."""

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return COMMUNICATORS[cls.device_type]

    @classmethod
    def use_custom_allreduce(cls) -> bool:
        """False: vLLM's own kernel would take small sums on GPUs from the Communicator."""
        return False
