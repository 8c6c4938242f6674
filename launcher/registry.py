"""The launchers by name. A launcher is a module, or any object, with these names:

- NAME: what `--launcher` and `current(launcher=...)` call it
- detect(environ) -> LaunchInfo | None: who this process is, if this launcher started it; raises
  LaunchInfoError if its variables are half set
- run(job) -> list: start the ranks, and return their results by rank; or
- command(job) -> list[str]: the engine's own command line that does so (see
  launcher/external/backend_launcher.py)
- HONOURS, optional: which of start.OPTIONS it honours, if not all; the others are refused
- environment(job) -> dict[str, str], optional: what the engine needs beside os.environ
- HONOURS, STARTS_ALL_NODES, foreseen(job), optional: see launcher/launch_job.py and
  launcher/cli/dry_run.py
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

# Registering is for the life of the process, like importing: the one table here that grows.
_registered: dict[str, Any] = {}


def register(launcher: Any) -> None:
    """Make a launcher known to `current`, `launch` and the command line; asked before ours."""
    for needed in ("NAME", "detect"):
        if not hasattr(launcher, needed):
            raise TypeError(
                f"{launcher!r} has no {needed}: see launcher/registry.py for what makes a launcher"
            )
    if launcher.NAME in BUILT_IN:
        raise ValueError(
            f"the launcher name {launcher.NAME!r} is taken by {BUILT_IN[launcher.NAME]}"
        )
    _registered[launcher.NAME] = launcher


def find(name: str) -> Any:
    """The launcher of that name. Raises ValueError, with the names there are, for any other."""
    if name in _registered:
        return _registered[name]
    if name in BUILT_IN:
        return importlib.import_module(BUILT_IN[name])
    for entry in _installed():
        if entry.name == name:
            return entry.load()
    raise ValueError(f"no launcher is called {name!r}: choose among {', '.join(names())}")


def names() -> Iterator[str]:
    """Every launcher that find knows: those registered here, ours, those of installed packages."""
    yield from _registered
    yield from BUILT_IN
    yield from (entry.name for entry in _installed())


def every() -> Iterator[Any]:
    """The launchers, innermost first, each looked for and imported only when reached."""
    return map(find, names())


def _installed() -> Iterable[Any]:
    from importlib.metadata import entry_points  # reads every installed package: not for nothing

    return entry_points(group=ENTRY_POINTS)
