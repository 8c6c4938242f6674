"""What is to be started: one Job, the same for every launcher.

job = Job(Target("script", "train.py"), args=("--steps", "10"), nprocs=4)
job.rank_command()        # [python, train.py, --steps, 10]
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from launcher.launch_info import MAX_PORT
from launcher.records import json_values

LOOPBACK = "127.0.0.1"
YEAR_S = 366 * 24 * 3600.0  # more seconds than this are no time a clock is waited for with
WHOLE_NUMBERS = ("nprocs", "nnodes", "node_rank", "master_port")


def new_launch_id() -> str:
    return secrets.token_hex(8)


def _is_unicode(text: str) -> bool:
    """Whether it has no lone surrogate, as what the shell gave in another encoding has."""
    return text == text.encode(errors="ignore").decode()


def _are_names(value: Any) -> bool:
    is_sequence = isinstance(value, (tuple, list))
    return is_sequence and all(isinstance(name, str) for name in value)


@dataclass(frozen=True)
class Target:
    """What each rank runs.

    kind and name: a script by its path, a module by its name, or a function by its reference
        ("package.module:qualified.name", or "/path/to/script.py:qualified.name").
    function: the function itself, if this process has it.
    """

    kind: Literal["script", "module", "function"]
    name: str
    function: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Job:
    """Everything a launcher needs to start the ranks of one node, or to ask an engine to.

    args: strings for a script or a module, any values for a function.
    nprocs: ranks on this node. nnodes, node_rank: the nodes, and this one among them.
    master_addr: where rank 0 listens. master_port: 0 lets the launcher choose.
    log_dir: a folder for one file per rank and stream. preload: modules to import once, before the
    ranks are forked.
    bind: pin each rank to cores of its own. share_devices: more ranks than GPUs is meant.
    trace: the folder in which each rank leaves what it records, see launcher/trace/recorder.py.
    results_dir: where launcher.external.rank_main leaves how each rank ended, if an engine runs it.
    """

    target: Target
    args: tuple[Any, ...] = ()
    nprocs: int = 2
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = LOOPBACK
    master_port: int = 0
    launch_id: str = field(default_factory=new_launch_id)
    log_dir: str | None = None
    timeout_s: float | None = None
    bind: bool = False
    preload: tuple[str, ...] = ()
    share_devices: bool = False
    trace: str | None = None
    results_dir: str | None = None

    def __post_init__(self) -> None:
        for look in (self._wrong_types, self._problems):
            for problem, is_wrong in look().items():
                if is_wrong:
                    raise ValueError(f"{problem}, so nothing was started")

    def _wrong_types(self) -> dict[str, bool]:
        numbers = {
            f"{name} must be a whole number, not {getattr(self, name)!r}": (
                type(getattr(self, name)) is not int
            )
            for name in WHOLE_NUMBERS
        }
        texts = {
            f"{name} must be a string, not {getattr(self, name)!r}": (
                not isinstance(getattr(self, name), str)
            )
            for name in ("launch_id", "master_addr")
        }
        return {
            **numbers,
            **texts,
            f"timeout_s must be a number of seconds or None, not {self.timeout_s!r}": (
                type(self.timeout_s) not in (int, float, type(None))
            ),
            f"preload must be a sequence of the names of modules, not {self.preload!r}": (
                not _are_names(self.preload)
            ),
        }

    def _problems(self) -> dict[str, bool]:
        return {
            f"{self.nprocs} ranks is less than one": self.nprocs < 1,
            f"{self.nnodes} nodes is less than one": self.nnodes < 1,
            f"node rank {self.node_rank} is not among {self.nnodes} nodes": (
                not 0 <= self.node_rank < self.nnodes
            ),
            f"master port {self.master_port} is not in [0, {MAX_PORT}]": (
                not 0 <= self.master_port <= MAX_PORT
            ),
            f"a timeout of {self.timeout_s} s is no time": (
                self.timeout_s is not None and not self.timeout_s > 0
            ),
            f"a timeout of {self.timeout_s} s is over a year (leave it out for none)": (
                self.timeout_s is not None and self.timeout_s > YEAR_S
            ),
            "a launch id must have a character, and no NUL": (
                not self.launch_id or "\0" in self.launch_id
            ),
            f"the launch id {self.launch_id!r} is no text that UTF-8 can write": (
                not _is_unicode(self.launch_id)
            ),
        }

    def rank_command(self) -> list[str]:
        """What an engine runs once per rank; the environment tells the rank who it is."""
        return [sys.executable, *self.python_arguments()]

    def python_arguments(self) -> list[str]:
        """rank_command without its `python`, for engines that bring the interpreter themselves."""
        if self.results_dir:
            call = [
                "-m",
                "launcher.external.rank_main",
                self.results_dir,
                self.target.kind,
                self.target.name,
            ]
            plain = self.target.kind != "function"
            return [
                *call,
                *(map(str, self.args) if plain else [json_values.dumps(list(self.args))]),
            ]
        assert self.target.kind != "function", "an engine needs a place for a function's results"
        module = ["-m"] if self.target.kind == "module" else []
        return [*module, self.target.name, *map(str, self.args)]
