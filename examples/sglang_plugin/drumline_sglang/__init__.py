"""SGLang's entry points: SGLang's CPU engine over drumline, if DRUMLINE_SGLANG=1. Never run yet.

DRUMLINE_SGLANG=1 SGLANG_USE_CPU_ENGINE=1 python -m sglang.launch_server --tp 2 ...

Written from SGLang's source, and tested against what sglang_signatures.json records of it: no
SGLang installs without CUDA. SGLang calls both functions in each of its processes, and swallows
what they raise.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import launcher

ENGINE = "sglang"
PLATFORM = "drumline_sglang.cpu_platform.SglangPlatform"
FOLDER = Path(__file__).parent
GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator"


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
        warnings.warn(
            "DRUMLINE_SGLANG=1: no model was ever run with this plugin; compare its tokens with "
            "those of SGLang alone before you rely on it.",
            stacklevel=2,
        )
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        for hook in (all_reduce, all_gather, reduce_scatter_along_dim):
            HookRegistry.register(f"{GROUP}.{hook.__name__}", hook, HookType.AROUND)


def all_reduce(original: Any, group: Any, input_: Any) -> Any:
    """The sum in place, by a Communicator of the group."""
    if not _is_ours(group, input_) or not input_.is_contiguous():
        return original(group, input_)
    return _communicator(group).allreduce(input_)


def all_gather(
    original: Any, group: Any, input_: Any, dim: int = -1, output_tensor_list: Any = None
) -> Any:
    """The tensors of all ranks, joined along dim, unless they are for a list."""
    if not _is_ours(group, input_) or output_tensor_list is not None:
        return original(group, input_, dim, output_tensor_list)
    return _communicator(group).allgather(input_.contiguous(), dim=dim)


def reduce_scatter_along_dim(original: Any, group: Any, input_: Any, dim: int = -1) -> Any:
    """This rank's part of the sum, which is cut along dim."""
    if not _is_ours(group, input_):
        return original(group, input_, dim)
    return _communicator(group).reduce_scatter(input_.contiguous(), dim=dim)


def _is_ours(group: Any, input_: Any) -> bool:
    import torch

    return group.world_size > 1 and input_.is_cpu and not torch.compiler.is_compiling()


def _communicator(group: Any) -> Any:
    """The group's own, opened by its first call, which all its ranks make."""
    from communicator import Communicator

    if not hasattr(group, "drumline_communicator"):
        request = launcher.engine_request(ENGINE)
        timeout_s = 300.0 if request is None or request.timeout_s is None else request.timeout_s
        group.drumline_communicator = Communicator.over(
            group.cpu_group, timeout_s=timeout_s, device_type="cpu"
        )
    return group.drumline_communicator
