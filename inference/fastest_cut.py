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
from inference.cut_model import own_device
from inference.device_map import first_device
from inference.errors import PlanError
from inference.fastest import Speeds, Together, estimate, estimate_together
from inference.lookout import on_lookout
from inference.nd_load import together
from inference.options import Options
from inference.over_stages import load_over_stages
from inference.over_teams import load_over_teams
from inference.speed import measure_speeds, measure_together
from inference.survey import Survey, survey

WORTH_IT = 1.1
"""So many times as fast a cut layer has to be: its sums are taken in another order."""


def load_fastest(path: str | Path, coor: Coordinator | None, asked: Options) -> Any:
    """The model as it is expected to be fastest. Collective; see `load`."""
    whole, *cut = _in_order(path, coor, asked)
    for over_teams in cut:
        with contextlib.suppress(PlanError):  # this model cannot be cut so, or has no room
            return load_over_teams(path, coor, over_teams)
    return load_over_stages(path, coor, whole)


def _in_order(path: str | Path, coor: Coordinator | None, asked: Options) -> list[Options]:
    """What was asked for, with the speeds of this cluster; and over teams, the fastest first, where
    that is worth it."""
    with contextlib.ExitStack() as stack:
        if coor is None:
            coor = stack.enter_context(Coordinator())
        stack.enter_context(on_lookout(coor, lambda rank: "its part of the measurements"))
        found = survey(coor, path, asked)
        speeds = measure_speeds(coor, found.room, found.dtype, asked.backend)
        asked = replace(asked, speeds=speeds)
        stays_whole = asked.cuda_graphs or asked.device is not None
        if stays_whole or not _have_one_device_each(coor, found):
            return [asked]
        teams = measure_together(coor, own_device(coor), found.dtype)
        sizes = together(coor, lambda: _worth_it(found, teams, speeds))
    reader = "rank0" if found.source.blind else None
    return [asked, *(replace(asked, device_map="auto", tp=n, reader=reader) for n in sizes)]


def _have_one_device_each(coor: Coordinator, found: Survey) -> bool:
    """Whether each rank computes where a rank of a team would, and nowhere else."""
    mine = [d for rank, d in found.room if rank == coor.rank and d not in ("cpu", "disk")]
    return coor.vote(len(mine) < 2 and first_device(mine) == own_device(coor))


def _worth_it(found: Survey, teams: list[Together], speeds: Speeds) -> list[int]:
    """How many ranks had better share a layer, if several; the fastest first."""
    alone = estimate(found.parts, found.plan("fastest", speeds), speeds, found.step)
    rates = {
        team.size: estimate_together(found.parts, team, speeds, found.step).tokens_a_second
        for team in teams
    }
    wanted = [size for size, rate in rates.items() if rate > WORTH_IT * alone.tokens_a_second]
    return sorted(wanted, key=lambda size: -rates[size])
