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
from inference.fastest import Together, estimate, estimate_together
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
    asked = _measured(path, coor, asked)
    if asked.cuts_layers:
        with contextlib.suppress(PlanError):  # this model cannot be cut so, or has no room
            return load_over_teams(path, coor, asked)
    return load_over_stages(path, coor, replace(asked, device_map="fastest", tp=None, reader=None))


def _measured(path: str | Path, coor: Coordinator | None, asked: Options) -> Options:
    """With the speeds of this cluster, and how many ranks are to share a layer if any."""
    with contextlib.ExitStack() as stack:
        if coor is None:
            coor = stack.enter_context(Coordinator())
        stack.enter_context(on_lookout(coor, lambda rank: "its part of the measurements"))
        found = survey(coor, path, asked)
        speeds = measure_speeds(coor, found.room, found.dtype, asked.backend)
        asked = replace(asked, speeds=speeds)
        if asked.cuda_graphs or not _have_one_device_each(coor, found):
            return asked
        teams = measure_together(coor, own_device(coor), found.dtype)
        best = together(coor, lambda: _best(found, teams, asked))
    if best is None:
        return asked
    reader = "rank0" if found.source.blind else None
    return replace(asked, device_map="auto", tp=best.size, reader=reader)


def _have_one_device_each(coor: Coordinator, found: Survey) -> bool:
    """Whether each rank computes where a rank of a team would, and nowhere else."""
    mine = [d for rank, d in found.room if rank == coor.rank and d not in ("cpu", "disk")]
    return coor.vote(len(mine) < 2 and first_device(mine) == own_device(coor))


def _best(found: Survey, teams: list[Together], asked: Options) -> Together | None:
    """The team that is worth it most, if one is."""
    assert asked.speeds is not None, "they have been measured"
    alone = estimate(found.parts, found.plan("fastest", asked.speeds), asked.speeds, found.step)
    rates = {
        each: estimate_together(found.parts, each, asked.speeds, found.step).tokens_a_second
        for each in teams
    }
    best = max(rates, key=lambda each: rates[each], default=None)
    return best if best and rates[best] > WORTH_IT * alone.tokens_a_second else None
