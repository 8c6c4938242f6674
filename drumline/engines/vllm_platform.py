"""vLLM's platform, with our communicators for its groups of ranks. Only vLLM imports this."""

from __future__ import annotations

from typing import Any

from vllm import platforms
from vllm.utils.import_utils import resolve_obj_by_qualname

from drumline.engines.vllm import detected_platform, timeout_s

COMMUNICATORS = {
    "cpu": "drumline.engines.vllm_communicator.VllmCommunicator",
    "cuda": "drumline.engines.vllm_cuda_communicator.VllmCudaCommunicator",
}


def _detected_platform() -> Any:
    timeout_s()  # raises for a request that says neither yes nor no
    name = detected_platform(platforms.cpu_platform_plugin, platforms.cuda_platform_plugin)
    return resolve_obj_by_qualname(name)


Detected: Any = _detected_platform()


class DrumlinePlatform(Detected):  # type: ignore[misc]  # vLLM has chosen it
    """The platform that vLLM detects."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """As vLLM's. It is called before any worker starts, so a vLLM whose communicators have
        other signatures is refused here; the platform is known, which they import."""
        super().check_and_update_config(vllm_config)
        resolve_obj_by_qualname(COMMUNICATORS[cls.device_type])

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return COMMUNICATORS[cls.device_type]

    @classmethod
    def use_custom_allreduce(cls) -> bool:
        """False: vLLM's own kernel would take small sums on GPUs from the Communicator."""
        return False
