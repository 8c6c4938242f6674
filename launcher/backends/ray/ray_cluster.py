"""Starting ranks under Ray: one actor each, in a placement group over the nodes of a cluster."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from launcher import launch_secret, target
from launcher.backends.ray import NAME
from launcher.backends.ray.ray_actor import Rank
from launcher.backends.ray.ray_signals import Signals, interrupted
from launcher.errors import Failure, LaunchError, LaunchTimeout
from launcher.job import LOOPBACK, Job
from launcher.launch_info import LaunchInfo
from launcher.records import json_values

PLACEMENT_S = 300.0  # for a busy cluster to find room
GRACE_S = 1.0  # after a failure, for the death that caused it to be noticed
FOR_EVER_S = 1e8
PRINTED_S = 1.0  # for Ray to bring what ranks printed last; it reads their files now and then
NO_CLUSTER = "Could not find any running Ray instance"  # ray/_private/services.py
# Every rank sees every GPU of its node, as under the other launchers.
ENVIRONMENT = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}


def run(job: Job) -> list[Any]:
    """Each rank's result, by rank. A node gets as many ranks as it has room for.

    Raises LaunchError as soon as one rank fails or its process is gone, after ending the others.
    """
    job = replace(job, target=target.by_reference(job.target))
    ray = _import_ray()
    with (
        Signals() as signals,
        _connected(ray, job, signals),
        _placed(ray, job, signals) as group,
        _seated(ray, job, group) as seats,
    ):
        calls = _call(job, seats, _infos(ray, job, seats, signals))
        results, failures = _gather(ray, calls, job.timeout_s, signals)
    if failures:
        first = failures[0]
        text = f"{first.summary()}\n\n{first.traceback or first.message}"
        raise LaunchError(text, tuple(failures), first.exit_code)
    if len(results) < _world_size(job):
        raise _too_long(job)
    return [results[rank] for rank in range(_world_size(job))]


def _too_long(job: Job) -> LaunchTimeout:
    return LaunchTimeout(f"the launch took longer than {job.timeout_s} s", exit_code=124)


def _import_ray() -> Any:
    # Read when ray is imported: without it, of equal lines from several ranks one is shown.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise LaunchError(
            f"ranks cannot be started under Ray: {error}. `pip install ray`, or choose another "
            "--launcher."
        ) from error


def _world_size(job: Job) -> int:
    return job.nprocs * job.nnodes


@contextlib.contextmanager
def _connected(ray: Any, job: Job, signals: Signals) -> Iterator[None]:
    """In this context, a cluster: the program's own, the one RAY_ADDRESS names, or a new one."""
    if ray.is_initialized():
        yield
        return
    try:
        _connect(ray, job)
    except SystemExit as stopped:  # which is how Ray takes SIGTERM, here and from here on
        raise interrupted(signal.SIGTERM) from stopped
    signals.note()
    try:
        yield
    finally:
        time.sleep(PRINTED_S)
        ray.shutdown()


def _connect(ray: Any, job: Job) -> None:
    try:
        ray.init(address="auto")
    except ConnectionError as error:
        if NO_CLUSTER not in str(error):  # one that does not answer, or several
            raise LaunchError(
                f"Ray has a cluster that cannot be joined: {error}. Ranks elsewhere would be left "
                "out; start it again, or name the one you mean in RAY_ADDRESS (or unset it, and "
                "`ray stop`, for a new one on this machine)."
            ) from error
        ray.init(num_cpus=max(_world_size(job), os.cpu_count() or 1), include_dashboard=False)


@contextlib.contextmanager
def _placed(ray: Any, job: Job, signals: Signals) -> Iterator[Any]:
    """A placement group with room for every rank."""
    bundles, strategy = _bundles(job, gpus=ray.cluster_resources().get("GPU", 0))
    _check_room(ray, job)
    group = ray.util.placement_group(bundles, strategy=strategy)
    try:
        timeout_s = min(PLACEMENT_S, job.timeout_s or PLACEMENT_S)
        if not signals.wait(ray, [group.ready()], timeout_s):
            raise LaunchTimeout(
                f"the Ray cluster has no room for {bundles} ({strategy}): it has "
                f"{ray.cluster_resources()}, and {ray.available_resources()} of that is free, so "
                "the ranks would wait. `ray status` shows who has the rest.",
                exit_code=124,
            )
        yield group
    finally:
        ray.util.remove_placement_group(group)


def _bundles(job: Job, gpus: float) -> tuple[list[dict[str, float]], str]:
    """What to ask of the cluster: one bundle a node if nodes are asked for, else one a rank."""
    each = {"CPU": 1.0} | ({"GPU": 1.0} if gpus >= _world_size(job) else {})
    if job.nnodes == 1:
        return [each] * job.nprocs, "PACK"
    node = {name: number * job.nprocs for name, number in each.items()}
    return [node] * job.nnodes, "STRICT_SPREAD"


def _check_room(ray: Any, job: Job) -> None:
    cpus = ray.cluster_resources().get("CPU", 0)
    if cpus < _world_size(job):
        raise LaunchError(
            f"{_world_size(job)} ranks need a CPU each, and the whole Ray cluster has {cpus:g}: "
            "they would wait for ever. Start fewer ranks, or more nodes with "
            "`ray start --address ADDRESS --num-cpus N`."
        )


@dataclass(frozen=True)
class _Seat:
    """Where one rank is: its actor, and its node by id."""

    actor: Any
    node: str


@contextlib.contextmanager
def _seated(ray: Any, job: Job, group: Any) -> Iterator[list[_Seat]]:
    """An actor for each rank, by rank: the ranks of a node follow one another."""
    node_of = ray.util.placement_group_table(group)["bundles_to_node_id"]
    nodes = list(dict.fromkeys(node_of[bundle] for bundle in sorted(node_of)))
    per_bundle = 1 if job.nnodes == 1 else job.nprocs
    bundles = sorted(sorted(node_of) * per_bundle, key=lambda bundle: nodes.index(node_of[bundle]))
    seats: list[_Seat] = []
    try:
        for bundle in bundles:
            seats.append(_Seat(_actor(ray, group, bundle), node_of[bundle]))
        yield seats
    finally:
        for seat in seats:
            ray.kill(seat.actor, no_restart=True)


def _actor(ray: Any, group: Any, bundle: int) -> Any:
    scheduling = importlib.import_module("ray.util.scheduling_strategies")
    place = scheduling.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=bundle
    )
    gpus = group.bundle_specs[bundle].get("GPU", 0) / group.bundle_specs[bundle]["CPU"]
    options = {"num_cpus": 1, "num_gpus": gpus, "runtime_env": ENVIRONMENT}
    return ray.remote(Rank).options(scheduling_strategy=place, **options).remote()


def _infos(ray: Any, job: Job, seats: Sequence[_Seat], signals: Signals) -> list[LaunchInfo]:
    """The LaunchInfo of each rank, once rank 0 listens."""
    nodes = [seat.node for seat in seats]
    addr = job.master_addr
    if len(set(nodes)) > 1 and addr == LOOPBACK:
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        addr = addresses[nodes[0]]
    listening = seats[0].actor.listen.remote(job.launch_id, addr, job.master_port)
    if not signals.wait(ray, [listening], job.timeout_s or FOR_EVER_S):
        raise _too_long(job)
    return infos(job.launch_id, nodes, addr, ray.get(listening))


def infos(launch_id: str, nodes: Sequence[str], addr: str, port: int) -> list[LaunchInfo]:
    """The LaunchInfo of each rank, from the node of each; those of one node follow one another."""
    found: list[LaunchInfo] = []
    for _, group in groupby(nodes):
        size = len(list(group))
        found += [
            LaunchInfo(
                launch_id=launch_id,
                world_size=len(nodes),
                local_world_size=size,
                rank=len(found) + local_rank,
                local_rank=local_rank,
                master_addr=addr,
                master_port=port,
                extras={"launcher": NAME},
            )
            for local_rank in range(size)
        ]
    return found


def _call(job: Job, seats: Sequence[_Seat], infos: Sequence[LaunchInfo]) -> dict[Any, LaunchInfo]:
    """Start every rank's target: Ray's reference to each result, and whose it is."""
    secret = secrets.token_bytes(launch_secret.NBYTES)
    what = (os.getcwd(), job.target.kind, job.target.name, json_values.dumps(list(job.args)))
    return {
        seat.actor.run.remote(info.to_bytes(), secret, *what): info
        for seat, info in zip(seats, infos, strict=True)
    }


def _gather(
    ray: Any, pending: dict[Any, LaunchInfo], timeout_s: float | None, signals: Signals
) -> tuple[dict[int, Any], list[Failure]]:
    """The results by rank, and the failures: first processes that are gone, and felled others."""
    began = time.monotonic()
    deadline = began + (FOR_EVER_S if timeout_s is None else timeout_s)
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    while pending and (left := deadline - time.monotonic()) > 0:
        for call in signals.wait(ray, list(pending), left):
            info = pending.pop(call)
            record = _record(ray, call, info)
            if "failure" not in record:
                results[info.rank] = record["result"]
                continue
            since = time.monotonic() - began
            failures.append(Failure(**{**record["failure"], "time_s": since}))
            deadline = min(deadline, time.monotonic() + GRACE_S)
    return results, sorted(failures, key=lambda failure: bool(failure.traceback))


def _record(ray: Any, call: Any, info: LaunchInfo) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json_values.loads(ray.get(call))
        return record
    except ray.exceptions.RayError as error:
        gone = {"rank": info.rank, "local_rank": info.local_rank, "type": type(error).__name__}
        return {"failure": {**gone, "message": str(error)}}
