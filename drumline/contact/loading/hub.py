"""Models that are named by their id on the Hub: the folder where their files are kept.

print(local_folder("Qwen/Qwen3-0.6B"))            # in the cache of huggingface_hub

Its cache, its token and HF_HUB_OFFLINE mean what they do everywhere.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from drumline.errors import CheckpointError

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py")
"""What a model is made of; other formats of the same weights stay where they are."""
COPIES = ("*/*.safetensors", "consolidated*.safetensors")
"""The same weights once more, by names that their makers' own code has: gpt-oss, Mistral."""


def is_hub_id(path: str | Path) -> bool:
    """True for `org/name` where no such folder is."""
    return bool(ID.fullmatch(str(path))) and not Path(path).exists()


def local_folder(path: str | Path, revision: str | None = None, gguf: str | None = None) -> Path:
    """The folder of a checkpoint on this machine; what the Hub alone has is downloaded first.

    revision: a branch, tag or commit of the Hub. gguf: the name of a GGUF file in it. Blocks until
    all files are there. Raises CheckpointError for what neither this machine nor the Hub has.
    """
    if not is_hub_id(path):
        return Path(path)
    from huggingface_hub import snapshot_download  # not needed for a folder

    parts, copies = [gguf] if gguf else [*PATTERNS], [*COPIES]
    try:
        folder = snapshot_download(
            str(path), revision=revision, allow_patterns=parts, ignore_patterns=copies
        )
        return Path(folder)
    except (OSError, ValueError) as error:
        why = textwrap.shorten(str(error), 300)
        raise CheckpointError(
            f"{path} is not a folder here, and the Hub does not give a model of this name "
            f"({type(error).__name__}: {why}); give the path of a folder, or an id that you may "
            "read (`hf auth login`), and see that HF_HUB_OFFLINE is not set."
        ) from error
