"""The variables of a worker of Ray, and of Ray Train."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.backends.env_table import build, read_numbers, read_variables
from launcher.launch_info import LaunchInfo

NAME = "ray"
TRAIN = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "master_port": "MASTER_PORT",
}


def detect(environ: Mapping[str, str]) -> LaunchInfo | None:
    """The rank of this worker of Ray, started by run or by Ray Train; None for another process."""
    info = LaunchInfo.from_env(environ)
    if info is not None:
        return info if info.extras.get("launcher") == NAME else None
    return _detect_train(environ) if "RAY_JOB_ID" in environ else None


def _detect_train(environ: Mapping[str, str]) -> LaunchInfo | None:
    """A worker of Ray Train's TorchTrainer, whose process group has its store at rank 0."""
    names = (*TRAIN.values(), "MASTER_ADDR", "NODE_RANK", "RAY_JOB_ID")
    variables = read_variables(environ, "Ray Train", (TRAIN["rank"], TRAIN["world_size"]), names)
    if variables is None:
        return None
    return build(
        NAME,
        variables,
        launch_id="-".join(
            variables[name] for name in ("RAY_JOB_ID", "MASTER_ADDR", "MASTER_PORT")
        ),
        master_addr=variables["MASTER_ADDR"],
        extras={"launcher": NAME, "store": "agent"},
        **read_numbers(variables, TRAIN),
    )
