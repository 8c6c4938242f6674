"""vLLM's entry point: vLLM over drumline on CUDA, if DRUMLINE_VLLM_CUDA=1. Never run on a GPU.

DRUMLINE_VLLM_CUDA=1 python -m vllm.entrypoints.openai.api_server --model MODEL -tp 2

Written from vLLM's source, and tested without a GPU against what vllm_cuda_signatures.json records
of it. vLLM calls platform() in each of its processes, and swallows what it raises.
"""

from __future__ import annotations

from pathlib import Path

import launcher

ENGINE = "vllm_cuda"
PLATFORM = "drumline_vllm_cuda.cuda_platform.DrumlineCudaPlatform"
FOLDER = Path(__file__).parent


def platform() -> str | None:
    """The class of the platform, for vLLM to import; None unless it was asked for."""
    try:
        return None if launcher.engine_request(ENGINE) is None else PLATFORM
    except ValueError:
        return PLATFORM  # whose import raises it
