"""The packages of the extra `models`. Without them the three lower layers work, and no model."""

from __future__ import annotations

import logging
from functools import cache
from importlib import metadata

from drumline.contact import releases
from drumline.errors import MissingPackage

log = logging.getLogger("drumline")

LOWEST = {
    "transformers": (5, 21),
    "accelerate": (1, 1),
    "huggingface_hub": (1, 31),
    "safetensors": (0, 8),
    "rich": (13,),
}
"""Their lowest versions, as pyproject.toml has them."""


@cache
def require(*names: str) -> None:
    """Raise MissingPackage unless these, or all of them, are installed and new enough."""
    for name in names or LOWEST:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = ""
        if releases.minor(version) < LOWEST[name]:
            raise MissingPackage(_describe(name, version))


@cache
def warn_of_unread() -> None:
    """Log a warning for each library that is newer than drumline's code for it; once a process."""
    for name in releases.READ:
        if sentence := releases.unread(name, releases.installed(name)):
            log.warning("rank 0: %s", sentence)


def _describe(name: str, version: str) -> str:
    lowest = ".".join(map(str, LOWEST[name]))
    return (
        f"This needs {name} >= {lowest}, and {version or 'none'} is installed: `pip install "
        "'drumline[models]'`. Where an engine needs another version, as vLLM does, install that in "
        "an environment of its own; the launcher, Coordinator and Communicator work here."
    )
