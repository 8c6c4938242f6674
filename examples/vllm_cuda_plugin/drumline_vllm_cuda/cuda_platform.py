"""vLLM's platform for CUDA, with drumline's communicator. Only vLLM imports this."""

from __future__ import annotations

import warnings
from typing import Any

import vllm
from vllm import platforms
from vllm.utils.import_utils import resolve_obj_by_qualname

import launcher
from communicator import Unsupported
from drumline.engines import check_signatures
from drumline.engines.vllm import DEVICE_COMMUNICATORS
from drumline_vllm_cuda import ENGINE, FOLDER

COMMUNICATOR = "drumline_vllm_cuda.communicator.VllmCudaCommunicator"


def _detected_platform() -> Any:
    launcher.engine_request(ENGINE)  # raises for a request that says neither yes nor no
    if (name := platforms.cuda_platform_plugin()) is None:
        raise Unsupported(
            "DRUMLINE_VLLM_CUDA=1: vLLM detects no CUDA here. Unset it to run vLLM without "
            "drumline, or set DRUMLINE_VLLM=1 in its place on CPUs."
        )
    warnings.warn(
        "DRUMLINE_VLLM_CUDA=1: this adapter was written from vLLM's source and was never run on a "
        "GPU; compare the tokens with those of vLLM alone before you rely on them.",
        RuntimeWarning,
        stacklevel=2,
    )
    return resolve_obj_by_qualname(name)


Detected: Any = _detected_platform()


class DrumlineCudaPlatform(Detected):  # type: ignore[misc]  # vLLM has chosen it
    """The platform that vLLM detects."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """As vLLM's, before any worker starts: a vLLM of other signatures is refused here."""
        super().check_and_update_config(vllm_config)
        check_signatures(
            ENGINE,
            vllm.__version__,
            f"{DEVICE_COMMUNICATORS}.base_device_communicator.DeviceCommunicatorBase",
            f"{DEVICE_COMMUNICATORS}.cuda_communicator.CudaCommunicator",
            folder=FOLDER,
        )
        resolve_obj_by_qualname(COMMUNICATOR)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return COMMUNICATOR

    @classmethod
    def use_custom_allreduce(cls) -> bool:
        """False: vLLM's own kernel would take small sums on GPUs from the Communicator."""
        return False
