"""A launcher of one's own, for a job manager that ours do not know: a translation of its variables.

drumline run -n 2 examples/05_own_launcher.py

A package makes it known to every program through an entry point, with no call to register():

    [project.entry-points."launcher.launchers"]
    acme = "acme_jobs:Acme"
"""

import os
from collections.abc import Mapping

import launcher


class Acme:
    """Acme's job manager starts `ACME_TASKS` tasks, `ACME_PER_NODE` on each node."""

    NAME = "acme"

    @staticmethod
    def detect(environ: Mapping[str, str]) -> launcher.LaunchInfo | None:
        """The rank that Acme made of this process, or None. Every variable read is looked for."""
        if not {"ACME_JOB", "ACME_TASK", "ACME_TASKS", "ACME_PER_NODE", "ACME_HEAD"} <= {*environ}:
            return None
        task, per_node = int(environ["ACME_TASK"]), int(environ["ACME_PER_NODE"])
        return launcher.LaunchInfo(
            launch_id=environ["ACME_JOB"],
            world_size=int(environ["ACME_TASKS"]),
            local_world_size=per_node,
            rank=task,
            local_rank=task % per_node,
            master_addr=environ["ACME_HEAD"],
            master_port=23_456,
        )


before = launcher.current()  # whatever started this process
launcher.register(Acme)
os.environ.update(ACME_JOB="j-81", ACME_TASK="5", ACME_TASKS="8", ACME_PER_NODE="4", ACME_HEAD="n0")
info = launcher.current()  # now Acme did: those registered are asked first
assert (info.rank, info.local_rank, info.world_size) == (5, 1, 8)
print(f"was rank {before.rank} of {before.world_size}, is rank {info.rank} of {info.world_size}")
