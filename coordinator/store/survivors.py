"""The ranks that go on when others have failed, as a launch of their own.

Each tells rank 0, which keeps the keys, that it goes on. Once every other rank has failed, or most
of the time is over, rank 0 says who they are, and where it listens for them.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import launcher
from coordinator.call_site import PendingCall
from coordinator.store.prefix_store import PrefixStore
from coordinator.timings import MEETING_SHARE
from launcher import LaunchInfo

POLL_S = 0.01
ANSWER = "launch"
AGREED_ELSEWHERE = ("master_fd", "store")  # facts of the launch before


def lead(
    info: LaunchInfo,
    store: PrefixStore,
    address: str,
    failed: Callable[[], Collection[int]],
    present: Callable[[], Collection[int]],
    release: bool,
    call: PendingCall,
) -> dict[str, Any]:
    """For rank 0: wait for the ranks that have not failed, and say who goes on.

    failed: the ranks whose end is known. present: those that are connected to this one. address:
    where this rank can be reached. release: it is this rank alone.
    """
    goes_on, meeting = {0}, call.restarted(MEETING_SHARE * call.left_s)
    while len(goes_on | {*failed()}) < info.world_size and meeting.left_s > 0:
        time.sleep(POLL_S)
        others = set(range(info.world_size)) - goes_on
        goes_on |= {rank for rank in others if store.get(str(rank), call) is not None}
    # Who listens in on the launch before cannot guess the id of this one.
    launch_id = f"{info.launch_id}-{secrets.token_hex(8)}"
    with launcher.listen(launch_id, address) as listener:
        launch = {
            "launch_id": launch_id,
            "ranks": [0] if release else sorted({0} | goes_on & {*present()}),
            "address": address,
            "port": listener.getsockname()[1],
        }
        store.put(ANSWER, json.dumps(launch).encode(), call)
        return {**launch, "listener": listener.detach()}


def follow(info: LaunchInfo, store: PrefixStore, call: PendingCall) -> dict[str, Any]:
    """For the others: say that this rank goes on, and hear who does."""
    store.put(str(info.rank), b"", call)
    return json.loads(store.wait([ANSWER], call)[0])  # type: ignore[no-any-return]


def launch_info(
    info: LaunchInfo, launch: Mapping[str, Any], node_ranks: Sequence[int]
) -> LaunchInfo:
    """This rank in that launch. node_ranks: the ranks of its node in the launch before."""
    ranks, local = launch["ranks"], [rank for rank in node_ranks if rank in launch["ranks"]]
    extras = {name: text for name, text in info.extras.items() if name not in AGREED_ELSEWHERE}
    if "listener" in launch:
        extras["master_fd"] = str(launch["listener"])
    return replace(
        info,
        launch_id=launch["launch_id"],
        world_size=len(ranks),
        local_world_size=len(local),
        rank=ranks.index(info.rank),
        local_rank=local.index(info.rank),
        master_addr=launch["address"],
        master_port=launch["port"],
        extras=extras,
    )
