"""SLURM: the variables that srun sets in each task of a step, and the command that starts a step.

srun --nodes 2 --ntasks 5 python script.py      # launcher.current() works inside script.py
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.backends.env_table import build, contradiction, read_numbers, read_variables
from launcher.backends.slurm_nodelist import expand_nodes, expand_tasks
from launcher.backends.torch_rendezvous import environment, rendezvous_info
from launcher.job import LOOPBACK, Job
from launcher.launch_info import NODE_RANK, LaunchInfo, integer

__all__ = ["NAME", "command", "detect", "environment"]

NAME = "slurm"
STARTS_ALL_NODES = True
SUPPORTS = frozenset({"bind", "encrypt", "log_dir", "nnodes", "trace"})
# A shell inside an allocation has the job's variables, and a batch script even a SLURM_PROCID;
# only the tasks of a step have a step's.
MARKS = (
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
)
NUMBERS = {
    "rank": "SLURM_PROCID",
    "world_size": "SLURM_STEP_NUM_TASKS",
    "local_rank": "SLURM_LOCALID",
}
NAMES = tuple(
    dict.fromkeys((*MARKS, *NUMBERS.values(), "SLURM_JOB_ID", "SLURM_NODEID", "SLURM_GTIDS"))
)
SPECIAL_STEPS = 0xFFFFFFF0  # slurm.h: from here on a step is the batch script, a shell, a daemon


def detect(environ: Mapping[str, str]) -> LaunchInfo | None:
    """The rank that srun made of this process; None if it is not a task of a step.

    Rank 0 is on the first node of the step: SLURM_LAUNCH_NODE_IPADDR is where srun runs, which may
    be no node of the step at all.
    """
    variables = read_variables(environ, NAME, MARKS, NAMES)
    if variables is None or integer(variables["SLURM_STEP_ID"], "SLURM_STEP_ID") >= SPECIAL_STEPS:
        return None
    nodes, tasks = _layout(variables)
    launch_id = f"slurm-{variables['SLURM_JOB_ID']}.{variables['SLURM_STEP_ID']}"
    return build(
        NAME,
        variables,
        local_world_size=tasks,
        **read_numbers(variables, NUMBERS),
        **rendezvous_info(environ, launch_id, LOOPBACK if len(nodes) == 1 else nodes[0]),
        extras={"launcher": NAME, NODE_RANK: variables["SLURM_NODEID"]},
    )


def _layout(variables: Mapping[str, str]) -> tuple[list[str], int]:
    """The names of the step's nodes, and the number of its tasks on this one."""
    try:
        nodes = expand_nodes(variables["SLURM_STEP_NODELIST"])
        tasks_per_node = expand_tasks(variables["SLURM_STEP_TASKS_PER_NODE"])
        tasks = tasks_per_node[integer(variables["SLURM_NODEID"], "SLURM_NODEID")]
    except (ValueError, IndexError) as error:
        raise contradiction(NAME, variables, str(error)) from error
    if len(nodes) != len(tasks_per_node):
        raise contradiction(NAME, variables, f"{len(nodes)} nodes, tasks on {len(tasks_per_node)}")
    _check_tasks_here(variables, tasks)
    return nodes, tasks


def _check_tasks_here(variables: Mapping[str, str], tasks: int) -> None:
    """A batch script submitted from inside a step inherits the step's variables, not its tasks."""
    ranks_here = variables["SLURM_GTIDS"].split(",")
    if len(ranks_here) != tasks or variables["SLURM_PROCID"] not in ranks_here:
        raise contradiction(
            NAME,
            variables,
            f"task {variables['SLURM_PROCID']:.9} among {len(ranks_here)} of this node, where "
            f"{tasks} should be. A script submitted from inside another step inherits its "
            "variables: submit it with --export=NONE",
        )


def command(job: Job) -> list[str]:
    """srun's command line, which starts the tasks of all nodes at once."""
    size = ["--nodes", str(job.nnodes), "--ntasks", str(job.nnodes * job.nprocs)]
    spread = ["--ntasks-per-node", str(job.nprocs), "--distribution", "block"]
    options = ["--kill-on-bad-exit=1", "--unbuffered", "--disable-status", "--export", "ALL"]
    if not job.bind:
        options += ["--cpu-bind", "none"]
    return ["srun", *size, *spread, *options, *job.rank_command()]
