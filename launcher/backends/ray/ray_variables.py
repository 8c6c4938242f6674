"""The variables of a worker of Ray, and of Ray Train."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.backends.env_table import PLAIN, build_plain, read_variables
from launcher.launch_info import LaunchInfo

NAME = "ray"


def detect(environ: Mapping[str, str]) -> LaunchInfo | None:
    """The rank of this worker of Ray, started by run or by Ray Train; None for another process."""
    info = LaunchInfo.from_env(environ)
    if info is not None:
        return info if info.extras.get("launcher") == NAME else None
    return _detect_train(environ) if "RAY_JOB_ID" in environ else None


def _detect_train(environ: Mapping[str, str]) -> LaunchInfo | None:
    """A worker of Ray Train's TorchTrainer, whose process group has its store at rank 0."""
    names = (*PLAIN, "NODE_RANK", "RAY_JOB_ID")
    variables = read_variables(environ, "Ray Train", ("RANK", "WORLD_SIZE"), names)
    if variables is None:
        return None
    parts = ("RAY_JOB_ID", "MASTER_ADDR", "MASTER_PORT")
    launch_id = "-".join(variables[name] for name in parts)
    return build_plain(NAME, variables, launch_id, launcher=NAME, store="agent")
