"""SGLang's platform for CPUs, with our backend for its groups. Only SGLang imports this."""

from __future__ import annotations

import sglang.version
from sglang.srt import platforms
from sglang.srt.platforms.cpu import CpuSRTPlatform

import launcher
from communicator import Unsupported
from drumline.engines import check_signatures
from drumline.torch_autoload import NAME, register
from drumline_sglang import ENGINE, FOLDER, GROUP

launcher.engine_request(ENGINE)  # raises for a request that says neither yes nor no
check_signatures(
    ENGINE,
    sglang.version.__version__,
    "sglang.srt.platforms",
    "sglang.srt.platforms.cpu.CpuDeviceMixin",
    "sglang.srt.plugins.hook_registry.HookRegistry",
    folder=FOLDER,
)
if not platforms._is_cpu_available():
    raise Unsupported(
        "DRUMLINE_SGLANG=1 without SGLANG_USE_CPU_ENGINE=1: drumline's adapter was written for "
        "SGLang's CPU engine alone. Set that, or unset DRUMLINE_SGLANG to run SGLang without it."
    )
register()  # also where torch was told to load no backend by itself


class SglangPlatform(CpuSRTPlatform):  # type: ignore[misc]  # SGLang has no types here
    """The one that SGLang has for CPUs."""

    def get_torch_distributed_backend_str(self) -> str:
        """Ours, if SGLang's groups are those that the hooks are for: only now are they imported."""
        check_signatures(ENGINE, sglang.version.__version__, GROUP, folder=FOLDER)
        return NAME
