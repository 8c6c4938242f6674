"""SGLang's entry points: SGLang's CPU engine over drumline, if DRUMLINE_SGLANG=1. Never run yet.

DRUMLINE_SGLANG=1 SGLANG_USE_CPU_ENGINE=1 python -m sglang.launch_server --tp 2 ...

Written from the source of the versions below, and tested against its signatures: no SGLang installs
without CUDA. SGLang calls both functions in each of its processes, and swallows what they raise.
"""

from __future__ import annotations

from typing import Any

import launcher

ENGINE = "sglang"
VERSIONS = (0, 5, 23), (0, 5, 24)  # the first, and the one after the last, that was read
PLATFORM = "drumline.engines.sglang_platform.SglangPlatform"
SUM = "sglang.srt.distributed.parallel_state.GroupCoordinator.all_reduce"


def is_on() -> bool:
    """True if it was asked for, also wrongly: the import of the platform raises that."""
    try:
        return launcher.engine_request(ENGINE) is not None
    except ValueError:
        return True


def platform() -> str | None:
    """The class of the platform, for SGLang to import; None unless it was asked for."""
    return PLATFORM if is_on() else None


def hooks() -> None:
    """Register what replaces SGLang's own functions, if it was asked for."""
    if is_on():
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(SUM, all_reduce, HookType.AROUND)


def all_reduce(original: Any, group: Any, input_: Any) -> Any:
    """GroupCoordinator.all_reduce, in place, by a Communicator of the group instead of gloo's."""
    import torch

    is_taken = input_.is_cpu and input_.is_contiguous() and not torch.compiler.is_compiling()
    if group.world_size == 1 or not is_taken:
        return original(group, input_)
    return _communicator(group).allreduce(input_)


def _communicator(group: Any) -> Any:
    """The group's own, opened by its first sum, which all its ranks call."""
    from communicator import Communicator

    if not hasattr(group, "drumline_communicator"):
        request = launcher.engine_request(ENGINE)
        timeout_s = 300.0 if request is None or request.timeout_s is None else request.timeout_s
        group.drumline_communicator = Communicator.over(
            group.cpu_group, timeout_s=timeout_s, device_type="cpu"
        )
    return group.drumline_communicator
