"""The launchers by name. A launcher is a module, or any object, with these names:

- NAME: the name for `--launcher` and `current(launcher=...)`
- detect(environ) -> LaunchInfo | None: the rank that this launcher made of this process; raises
  LaunchInfoError if its variables are half set
- run(job) -> list: start the ranks, and return their results by rank; or
- command(job) -> list[str]: the backend launcher's own command line that does so (see
  launcher/external/backend_launcher.py)
- SUPPORTS, optional: the supported ones of launch_job.OPTIONS, if not all; others are refused
- environment(job) -> dict[str, str], optional: variables for command, beside os.environ and ours
- STARTS_ALL_NODES, optional: one command starts the ranks of all nodes
- expected_info(job) -> dict, optional: for `--dry-run`, see launcher/cli/dry_run.py
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any

ENTRY_POINTS = "launcher.launchers"

# Innermost first: a rank of a launcher further up may well have the variables of one further down.
BUILT_IN = {
    "multiprocessing": "launcher.backends.multiprocessing",
    "threads": "launcher.backends.threads",
    "torchrun": "launcher.backends.torchrun",
    "ray": "launcher.backends.ray",
    "mpi": "launcher.backends.mpi",
    "slurm": "launcher.backends.slurm",
}

# Registering is for the life of the process, like importing.
_registered: dict[str, Any] = {}


def register(launcher: Any) -> None:
    """Make a launcher known to `current`, `launch` and the command line; detected before ours."""
    for attribute in ("NAME", "detect"):
        if not hasattr(launcher, attribute):
            raise TypeError(
                f"{launcher!r} has no {attribute}: launcher/registry.py lists what a launcher needs"
            )
    if launcher.NAME in BUILT_IN:
        raise ValueError(
            f"the launcher name {launcher.NAME!r} is taken by {BUILT_IN[launcher.NAME]}"
        )
    _registered[launcher.NAME] = launcher


def find(name: str) -> Any:
    """The launcher of that name. Raises ValueError, with the known names, for any other."""
    if name in _registered:
        return _registered[name]
    if name in BUILT_IN:
        return importlib.import_module(BUILT_IN[name])
    for entry in _entry_points():
        if entry.name == name:
            return entry.load()
    raise ValueError(f"no launcher is called {name!r:.99}: choose among {', '.join(names())}")


def names() -> Iterator[str]:
    """Every launcher that find knows: those registered here, ours, those of installed packages."""
    yield from _registered
    yield from BUILT_IN
    yield from (entry.name for entry in _entry_points())


def all_launchers() -> Iterator[Any]:
    """The launchers, innermost first, each imported only when reached."""
    return map(find, names())


def _entry_points() -> Iterable[Any]:
    from importlib.metadata import entry_points  # slow: it reads every installed package

    return entry_points(group=ENTRY_POINTS)
