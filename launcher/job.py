"""Job: the description of a launch, the same for every launcher.

job = Job(Target("script", "train.py"), args=("--steps", "10"), nprocs=4)
job.rank_command()        # [python, train.py, --steps, 10]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from launcher import timings
from launcher.authentication.launch_token import LaunchToken
from launcher.launch_info import MAX_PORT
from launcher.records import json_values

LOOPBACK = "127.0.0.1"


def new_launch_id() -> str:
    """A random launch id."""
    return os.urandom(8).hex()


@dataclass(frozen=True)
class Target:
    """The script, module or function that each rank runs.

    kind and name: a script by its path, a module by its name, or a function by its reference
        ("package.module:qualified.name", or "/path/to/script.py:qualified.name").
    function: the function itself, if this process has it.
    """

    kind: Literal["script", "module", "function"]
    name: str
    function: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Job:
    """Everything that is needed to start the ranks of one node, also by a backend launcher.

    args: strings for a script or a module, any values for a function.
    nprocs: ranks on this node. nnodes, node_rank: the nodes, and this one among them.
    master_addr: where rank 0 listens. master_port: 0 lets the launcher choose.
    log_dir: a folder for one file per rank and stream. preload: modules to import once, before the
    ranks are forked; None for what launcher/local/auto_preload.py finds in the script.
    bind: pin each rank to cores of its own. share_devices: let ranks share GPUs.
    trace: the folder for the recordings of ranks, see launcher/trace/recorder.py.
    results_dir: the folder for the results of ranks that a backend launcher starts.
    encrypt: encrypt what the Coordinators and Communicators of the ranks send.
    restart_count: launches of the same job that have failed before this one.
    token: what the commands of several nodes prove to each other; command: what the first one was
    given, on it and on those that join it. secret: the launch secret, once the nodes have met.
    ranks_of_nodes: ranks on each node, once they have met; empty for nprocs on each.
    torch_port: torch.distributed's over several nodes, once it has been told to all.
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
    preload: tuple[str, ...] | None = None
    share_devices: bool = False
    trace: str | None = None
    results_dir: str | None = None
    encrypt: bool = False
    restart_count: int = 0
    token: LaunchToken | None = field(default=None, repr=False)
    command: tuple[str, ...] = ()
    secret: bytes | None = field(default=None, repr=False)
    ranks_of_nodes: tuple[int, ...] = ()
    torch_port: int = 0

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ValueError(f"{problem}, so nothing was started")

    def _problems(self) -> Iterator[str]:
        """The invalid values in words; wrong types first, as the rest compares values."""
        for name in ("nprocs", "nnodes", "node_rank", "master_port"):
            if type(value := getattr(self, name)) is not int:
                yield f"{name} must be a whole number, not {value!r}"
        for name in ("launch_id", "master_addr"):
            if not isinstance(value := getattr(self, name), str):
                yield f"{name} must be a string, not {value!r}"
        if type(self.timeout_s) not in (int, float, type(None)):
            yield f"timeout_s must be a number of seconds or None, not {self.timeout_s!r}"
        names = () if self.preload is None else self.preload
        is_sequence = isinstance(names, (tuple, list))
        if not is_sequence or not all(isinstance(name, str) for name in names):
            yield f"preload must be a sequence of the names of modules, not {self.preload!r}"
        if self.nprocs < 1:
            yield f"{self.nprocs} ranks is less than one"
        if self.nnodes < 1:
            yield f"{self.nnodes} nodes is less than one"
        if not 0 <= self.node_rank < self.nnodes:
            yield f"node rank {self.node_rank} is not among {self.nnodes} nodes"
        if not 0 <= self.master_port <= MAX_PORT:
            yield f"master port {self.master_port} is not in [0, {MAX_PORT}]"
        if self.timeout_s is not None and not self.timeout_s > 0:
            yield f"a timeout of {self.timeout_s} s is not positive"
        if self.timeout_s is not None and self.timeout_s > timings.TIMINGS.longest_timeout_s:
            yield f"a timeout of {self.timeout_s} s is over a year (leave it out for none)"
        for name, text in {"launch id": self.launch_id, "master address": self.master_addr}.items():
            if not text or text != text.encode(errors="ignore").replace(b"\0", b"").decode():
                yield f"the {name} {text[:99]!r} must not be empty, be UTF-8 and have no NUL"

    @property
    def world_size(self) -> int:
        """The ranks on all nodes."""
        return sum(self.ranks_of_nodes) or self.nnodes * self.nprocs

    @property
    def first_rank(self) -> int:
        """The first rank of this node."""
        earlier = self.ranks_of_nodes[: self.node_rank]
        return sum(earlier) if self.ranks_of_nodes else self.node_rank * self.nprocs

    def rank_command(self) -> list[str]:
        """The command that a backend launcher runs once per rank."""
        return [sys.executable, *self.python_arguments()]

    def python_arguments(self) -> list[str]:
        """rank_command without its `python`, for backend launchers that add the interpreter."""
        if self.results_dir:
            folder, kind, name = self.results_dir, self.target.kind, self.target.name
            plain = map(str, self.args) if kind != "function" else [json_values.dumps(self.args)]
            return ["-m", "launcher.external.rank_main", folder, kind, name, *plain]
        assert self.target.kind != "function", "no folder for a function's results"
        module = ["-m"] if self.target.kind == "module" else []
        return [*module, self.target.name, *map(str, self.args)]
