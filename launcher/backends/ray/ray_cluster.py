"""Launches under Ray: an actor for each rank, in a placement group over the cluster's nodes."""

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

from launcher import errors, launch_secret, target, timings
from launcher.backends.ray.ray_actor import RankActor
from launcher.backends.ray.ray_signals import DeferredSignals
from launcher.backends.ray.ray_variables import NAME
from launcher.errors import TIMEOUT_CODE, Failure, LaunchError, LaunchTimeout
from launcher.job import LOOPBACK, Job
from launcher.launch_info import NODE_RANK, LaunchInfo
from launcher.records import json_values
from launcher.runtime import rank_environment

NO_CLUSTER = "Could not find any running Ray instance"  # ray/_private/services.py
# Every rank sees every GPU of its node, as under the other launchers.
ENVIRONMENT = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def run(job: Job) -> list[Any]:
    """Each rank's result, by rank. A node gets as many ranks as it has free CPUs.

    Raises LaunchError as soon as one rank fails or its process is gone, after ending the others.
    """
    deadline = time.monotonic() + (job.timeout_s or timings.TIMINGS.longest_timeout_s)
    job = replace(job, target=target.by_reference(job.target))
    ray = _import_ray()
    with (
        DeferredSignals() as signals,
        _connected(ray, job, signals),
        _placed(ray, job, signals, deadline) as group,
        _actors(ray, job, group) as actors,
    ):
        infos, torch_port = _rendezvous(ray, job, actors, signals, deadline)
        calls = _call(job, actors, infos, torch_port)
        results, failures = _gather(ray, calls, deadline, signals)
    if failures:
        raise errors.failed(failures, note=failures[0].message * (not failures[0].traceback))
    if len(results) < _world_size(job):
        raise errors.timed_out(job.timeout_s)
    return [results[rank] for rank in range(_world_size(job))]


def _import_ray() -> Any:
    # Read when ray is imported; the default shows only one of equal lines from several ranks.
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
def _connected(ray: Any, job: Job, signals: DeferredSignals) -> Iterator[None]:
    """Use the program's cluster, the one that RAY_ADDRESS names, or a new one."""
    if ray.is_initialized():
        yield
        return
    try:
        _connect(ray, job)
    except SystemExit as stopped:  # how Ray handles SIGTERM, here and from here on
        raise errors.interrupted(signal.SIGTERM) from stopped
    signals.install()
    try:
        yield
    finally:
        time.sleep(timings.TIMINGS.ray_lag_s)
        ray.shutdown()


def _connect(ray: Any, job: Job) -> None:
    try:
        ray.init(address="auto")
    except ConnectionError as error:
        if NO_CLUSTER not in str(error):  # a cluster that does not answer, or several
            raise LaunchError(
                f"Ray has a cluster that cannot be joined: {error}. Start it again, or name "
                "another in RAY_ADDRESS (or unset it, and `ray stop`, for one on this machine)."
            ) from error
        ray.init(num_cpus=max(_world_size(job), os.cpu_count() or 1), include_dashboard=False)


@contextlib.contextmanager
def _placed(ray: Any, job: Job, signals: DeferredSignals, deadline: float) -> Iterator[Any]:
    """A placement group with a CPU for every rank."""
    bundles, strategy = _bundles(job, gpus=ray.cluster_resources().get("GPU", 0))
    _check_cpus(ray, job)
    group = ray.util.placement_group(bundles, strategy=strategy)
    try:
        now = time.monotonic()
        until = min(deadline, now + timings.TIMINGS.ray_placement_s)
        if not signals.wait(ray, [group.ready()], until):
            if deadline <= now:  # the import of Ray, and joining it, took the whole time
                raise errors.timed_out(job.timeout_s)
            raise LaunchTimeout(
                f"the Ray cluster cannot place {bundles} ({strategy}): it has "
                f"{ray.cluster_resources()}, and {ray.available_resources()} of that is free. "
                "`ray status` shows who uses the rest.",
                exit_code=TIMEOUT_CODE,
            )
        yield group
    finally:
        ray.util.remove_placement_group(group)


def _bundles(job: Job, gpus: float) -> tuple[list[dict[str, float]], str]:
    """Resource bundles and strategy: a bundle a node for several nodes, otherwise one a rank."""
    per_rank = {"CPU": 1.0} | ({"GPU": 1.0} if gpus >= _world_size(job) else {})
    if job.nnodes == 1:
        return [per_rank] * job.nprocs, "PACK"
    node = {name: number * job.nprocs for name, number in per_rank.items()}
    return [node] * job.nnodes, "STRICT_SPREAD"


def _check_cpus(ray: Any, job: Job) -> None:
    cpus = ray.cluster_resources().get("CPU", 0)
    if cpus < _world_size(job):
        raise LaunchError(
            f"{_world_size(job)} ranks need a CPU each, and the whole Ray cluster has {cpus:g}: "
            "they would never start. Start fewer ranks, or more nodes with "
            "`ray start --address ADDRESS --num-cpus N`."
        )


@dataclass(frozen=True)
class PlacedActor:
    """The actor of one rank, and the id of its node."""

    actor: Any
    node: str


@contextlib.contextmanager
def _actors(ray: Any, job: Job, group: Any) -> Iterator[list[PlacedActor]]:
    """An actor for each rank, by rank: the ranks of a node are consecutive."""
    node_of = ray.util.placement_group_table(group)["bundles_to_node_id"]
    nodes = list(dict.fromkeys(node_of[bundle] for bundle in sorted(node_of)))
    per_bundle = 1 if job.nnodes == 1 else job.nprocs
    bundles = sorted(sorted(node_of) * per_bundle, key=lambda bundle: nodes.index(node_of[bundle]))
    actors: list[PlacedActor] = []
    try:
        for bundle in bundles:
            actors.append(PlacedActor(_actor(ray, group, bundle), node_of[bundle]))
        yield actors
    finally:
        for placed in actors:
            ray.kill(placed.actor, no_restart=True)


def _actor(ray: Any, group: Any, bundle: int) -> Any:
    scheduling = importlib.import_module("ray.util.scheduling_strategies")
    placement = scheduling.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=bundle
    )
    gpus = group.bundle_specs[bundle].get("GPU", 0) / group.bundle_specs[bundle]["CPU"]
    variables = {**ENVIRONMENT, **rank_environment.settings(os.environ)}
    options = {"num_cpus": 1, "num_gpus": gpus, "runtime_env": {"env_vars": variables}}
    return ray.remote(RankActor).options(scheduling_strategy=placement, **options).remote()


def _rendezvous(
    ray: Any, job: Job, actors: Sequence[PlacedActor], signals: DeferredSignals, deadline: float
) -> tuple[list[LaunchInfo], int]:
    """The LaunchInfo of each rank, and the port of torch.distributed, once rank 0 listens."""
    nodes = [placed.node for placed in actors]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    addr, first = job.master_addr, addresses[nodes[0]]
    if len(set(nodes)) > 1 and addr == LOOPBACK:
        addr = first
    listening = actors[0].actor.listen.remote(job.launch_id, addr, job.master_port)
    if not signals.wait(ray, [listening], deadline):
        raise errors.timed_out(job.timeout_s)
    try:
        master_port, torch_port = ray.get(listening)
    except ray.exceptions.RayError as error:  # as where drumline is not installed
        raise LaunchError(f"rank 0 cannot be started on Ray's node {first}: {error}") from error
    return infos_for_nodes(job.launch_id, nodes, addr, master_port), torch_port


def infos_for_nodes(launch_id: str, nodes: Sequence[str], addr: str, port: int) -> list[LaunchInfo]:
    """The LaunchInfo of each rank, from the node of each; those of one node are consecutive."""
    infos: list[LaunchInfo] = []
    for node_rank, (_, group) in enumerate(groupby(nodes)):
        size = len(list(group))
        infos += [
            LaunchInfo(
                launch_id=launch_id,
                world_size=len(nodes),
                local_world_size=size,
                rank=len(infos) + local_rank,
                local_rank=local_rank,
                master_addr=addr,
                master_port=port,
                extras={"launcher": NAME, NODE_RANK: str(node_rank)},
            )
            for local_rank in range(size)
        ]
    return infos


def _call(
    job: Job, actors: Sequence[PlacedActor], infos: Sequence[LaunchInfo], torch_port: int
) -> dict[Any, LaunchInfo]:
    """Start every rank's target: Ray's reference to each result -> the LaunchInfo of its rank."""
    secret = secrets.token_bytes(launch_secret.NBYTES)
    target_args = (os.getcwd(), job.target.kind, job.target.name, json_values.dumps(list(job.args)))
    common = (torch_port, job.restart_count, secret, job.encrypt, *target_args)
    return {
        placed.actor.run.remote(info.to_bytes(), *common): info
        for placed, info in zip(actors, infos, strict=True)
    }


def _gather(
    ray: Any, pending: dict[Any, LaunchInfo], deadline: float, signals: DeferredSignals
) -> tuple[dict[int, Any], list[Failure]]:
    """The results by rank, and the failures: first lost processes, which caused the others."""
    began = time.monotonic()
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    while pending and time.monotonic() < deadline:
        for call in signals.wait(ray, list(pending), deadline):
            info = pending.pop(call)
            record = _record(ray, call, info)
            if "failure" not in record:
                results[info.rank] = record["result"]
                continue
            now = time.monotonic()
            failures.append(Failure(**{**record["failure"], "time_s": now - began}))
            deadline = min(deadline, now + timings.TIMINGS.ray_lag_s)
    return results, sorted(errors.by_cause(failures), key=lambda failure: bool(failure.traceback))


def _record(ray: Any, call: Any, info: LaunchInfo) -> dict[str, Any]:
    try:
        return json_values.loads(ray.get(call))  # type: ignore[no-any-return]
    except ray.exceptions.RayError as error:
        identity = {"rank": info.rank, "local_rank": info.local_rank, "type": type(error).__name__}
        return {"failure": {**identity, "message": str(error)}}
