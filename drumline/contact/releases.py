"""The releases of each library that drumline's contact with it was read in.

print(", ".join(READ["transformers"]), installed("transformers"))
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from importlib import metadata

from drumline.errors import MissingPackage

READ = {
    "transformers": ("5.21.0", "5.22.2", "5.23.0", "5.24.0"),
    "accelerate": ("1.1.0", "1.15.0"),
    "safetensors": ("0.8.0",),
}
"""From the lowest to the newest; pyproject.toml ends its ranges before the minor behind that."""


def installed(library: str) -> str:
    """The version of a library that is installed."""
    return metadata.version(library)


def minor(version: str) -> tuple[int, ...]:
    """Major and minor number of a version, such as (5, 24) of 5.24.0; empty of no version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def end_of_range(library: str) -> str:
    """The lowest minor version that was not read, such as 5.25."""
    major, number = minor(READ[library][-1])
    return f"{major}.{number + 1}"


def unread(library: str, version: str) -> str | None:
    """A sentence on a version that is newer than all that were read; None if it is not."""
    versions = READ[library]
    if minor(version) <= minor(versions[-1]):
        return None
    first, last = (".".join(map(str, minor(read))) for read in (versions[0], versions[-1]))
    return (
        f"{library} {version} was not read by this drumline (read: {first} to {last}), so what it "
        f"changed may raise or be slower; if so, pip install '{library}<{end_of_range(library)}'."
    )


@contextlib.contextmanager
def named_if_gone(library: str) -> Iterator[None]:
    """Within, imports from a library. Raises MissingPackage for a name that it does not have."""
    try:
        yield
    except ImportError as error:
        raise MissingPackage(
            f"{library} {installed(library)} does not have what drumline takes from it ({error}); "
            f"pip install '{library}=={READ[library][-1]}', the newest that was read."
        ) from error
