"""Files of the user that would be imported in place of our packages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from launcher.errors import TargetError

PACKAGES = ("launcher", "coordinator", "communicator", "drumline")
INSTALLED = Path(__file__).parents[2]


def check(folders: Iterable[str | Path]) -> None:
    """Raise TargetError if one of these import folders hides one of our packages.

    A folder that holds all of the packages is a checkout of ours, and not the user's.
    """
    for folder in map(Path, folders):
        hiding = [path for name in PACKAGES if (path := _module(folder, name)) is not None]
        is_checkout = len(hiding) == len(PACKAGES) and all(path.is_dir() for path in hiding)
        if hiding and not is_checkout:
            names = ", ".join(repr(path.stem) for path in hiding)
            raise TargetError(
                f"{', '.join(map(str, hiding))} would be imported in place of {names} of drumline, "
                "so no rank was started. Rename the file or folder."
            )


def _module(folder: Path, name: str) -> Path | None:
    """The package or module of this name that an import from folder finds, if it is not ours."""
    package, module = folder / name, folder / f"{name}.py"
    if (package / "__init__.py").is_file():
        ours = INSTALLED / name
        return None if ours.is_dir() and package.samefile(ours) else package
    return module if module.is_file() else None
