"""The LaunchInfo of every rank of one node, where we start the ranks."""

from __future__ import annotations

import os

from launcher.job import Job
from launcher.launch_info import ENCRYPT, NODE_RANK, TRACE, LaunchInfo
from launcher.system import gpus, nesting


def infos_for_node(
    job: Job, port: int, extras: dict[str, str], first_extras: dict[str, str]
) -> list[LaunchInfo]:
    """The LaunchInfo of every rank of this node; first_extras in place of extras for the first."""
    devices = gpus.for_ranks(job.nprocs, job.share_devices)
    common = {
        **nesting.extras(os.environ),
        **({TRACE: job.trace} if job.trace else {}),
        **({ENCRYPT: "1"} if job.encrypt else {}),
        **({NODE_RANK: str(job.node_rank)} if job.nnodes > 1 else {}),
    }
    return [
        LaunchInfo(
            launch_id=job.launch_id,
            world_size=job.world_size,
            local_world_size=job.nprocs,
            rank=job.first_rank + local_rank,
            local_rank=local_rank,
            master_addr=job.master_addr,
            master_port=port,
            extras={
                **common,
                **(extras if local_rank else first_extras),
                **devices.get(local_rank, {}),
            },
        )
        for local_rank in range(job.nprocs)
    ]
