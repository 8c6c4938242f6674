"""`device_map="fastest"`: whole layers on each rank, or each layer cut over the ranks of a node.

A token passes whole layers one after the other, whoever has them; ranks that share a layer are at
work at the same time, and add up what they have twice a layer. What is faster is measured.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator import Coordinator
from drumline.core.consistency import check_same_on_all_ranks
from drumline.core.device_map import first_device
from drumline.core.mesh import Mesh
from drumline.errors import PlanError
from drumline.liveness.stopped_ranks import on_lookout
from drumline.planner.cost_model import DeviceSpeeds, GroupSpeed, estimate, estimate_tensor_parallel
from drumline.planner.load_options import LoadOptions
from drumline.planner.measure import measure_group_speeds, measure_speeds
from drumline.strategies.pipeline_parallel import load_over_stages, refuse_device
from drumline.strategies.pipeline_tp import load_over_teams
from drumline.strategies.plan_inputs import PlanInputs, survey
from drumline.tensor_parallel.sharded_model import cut_checkpoint, find, own_device

WORTH_IT = 1.1
"""So many times as fast a cut layer has to be: its sums are taken in another order."""

ALIKE = ("dtype", "batch", "length", "max_memory", "backend", "cuda_graphs")
"""What all ranks have to be asked for alike, or they would measure and choose differently."""


def load_fastest(path: str | Path, coor: Coordinator | None, asked: LoadOptions) -> Any:
    """The model as it is expected to be fastest. Collective; see `load`."""
    refuse_device(asked)
    whole, *cut = _in_order(path, coor, asked)
    for over_teams in cut:
        with contextlib.suppress(PlanError):  # no room: every rank finds the same
            return load_over_teams(path, coor, over_teams)
    return load_over_stages(path, coor, whole)


def _in_order(path: str | Path, coor: Coordinator | None, asked: LoadOptions) -> list[LoadOptions]:
    """What was asked for, with the speeds of this cluster; and over teams, the fastest first, where
    that can be and is worth it. The same on every rank."""
    with contextlib.ExitStack() as stack:
        if coor is None:
            coor = stack.enter_context(Coordinator())
        stack.enter_context(on_lookout(coor, lambda rank: "its part of the measurements"))
        check_same_on_all_ranks(coor, {name: repr(getattr(asked, name)) for name in ALIKE})
        found = survey(coor, path, asked)
        speeds = measure_speeds(coor, found.room, found.dtype, asked.backend)
        asked = replace(asked, speeds=speeds)
        if asked.cuda_graphs or not _have_one_device_each(coor, found):
            return [asked]
        teams = measure_group_speeds(coor, own_device(coor), found.dtype)
        sizes = _worth_it(found, teams, speeds)
        reader = "rank0" if found.source.blind else None
        cut = [replace(asked, device_map="auto", tp=size, reader=reader) for size in sizes]
        return [asked, *(each for each in cut if _can_be(coor, path, each))]


def _have_one_device_each(coor: Coordinator, found: PlanInputs) -> bool:
    """Whether each rank computes where a rank of a team would, and nowhere else."""
    mine = [d for rank, d in found.room if rank == coor.rank and d not in ("cpu", "disk")]
    is_own = first_device(mine) == own_device(coor) and coor.local_rank == coor.info.local_rank
    return coor.all_true(len(mine) < 2 and is_own)


def _worth_it(found: PlanInputs, teams: list[GroupSpeed], speeds: DeviceSpeeds) -> list[int]:
    """How many ranks had better share a layer, if several; the fastest first."""
    try:
        whole = found.plan("fastest", speeds)
        alone = estimate(found.parts, whole, speeds, found.step).tokens_a_second
    except PlanError:
        alone = 0.0  # there is room for parts of layers, if at all
    rates = {
        team.size: estimate_tensor_parallel(found.parts, team, speeds, found.step).tokens_a_second
        for team in teams
    }
    wanted = [size for size, rate in rates.items() if rate > WORTH_IT * alone]
    return sorted(wanted, key=lambda size: -rates[size])


def _can_be(coor: Coordinator, path: str | Path, asked: LoadOptions) -> bool:
    """Whether every rank can cut this model so, with these options. Collective."""
    grid = Mesh({"pp": coor.world_size // (asked.tp or 1), "tp": asked.tp or 1})
    files, configs = find(coor, path, grid, asked)
    try:
        cut_checkpoint(coor, files, configs, grid, asked)
    except Exception:  # which says no, whatever it is: options for from_pretrained alone, too
        return coor.all_true(False)
    return coor.all_true(True)
