"""What the variables of a worker of Ray say; the values are those of Ray 2.60."""

import pytest

from launcher import LaunchInfo, LaunchInfoError, registry
from launcher.backends import ray
from launcher.backends.ray.ray_cluster import infos_for_nodes

WORKER = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "9948"}
TRAIN = {
    **WORKER,
    "RANK": "1",
    "WORLD_SIZE": "5",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "3",
    "NODE_RANK": "0",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "47409",
}


def test_worker_of_ray_train_is_a_rank():
    info = ray.detect(TRAIN)
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (1, 5, 1, 3)
    assert (info.master_addr, info.master_port) == ("10.0.0.1", 47409)


def test_store_of_ray_train_is_announced():
    assert ray.detect(TRAIN).extras["store"] == "agent"


def test_other_worker_of_ray_is_not_a_rank():
    assert ray.detect(WORKER) is None


def test_rank_of_somebody_else_is_not_ray_s():
    outside = {name: value for name, value in TRAIN.items() if name not in WORKER}
    assert ray.detect(outside) is None


@pytest.mark.parametrize("name", [name for name in TRAIN if name not in WORKER])
def test_incomplete_variables_name_the_missing_one(name):
    incomplete = {key: value for key, value in TRAIN.items() if key != name}
    with pytest.raises(LaunchInfoError, match=f"{name} not set"):
        ray.detect(incomplete)


def test_rank_that_we_started_under_ray_is_ray_s():
    info = LaunchInfo("tuesday", extras={"launcher": "ray"})
    assert ray.detect({**WORKER, **info.to_env()}) == info
    assert ray.detect({**WORKER, **LaunchInfo("tuesday").to_env()}) is None


def test_torchrun_inside_a_worker_of_ray_wins():
    torchrun = {"TORCHELASTIC_RUN_ID": "c2d9", "TORCHELASTIC_RESTART_COUNT": "0"}
    detected = (launcher.detect({**TRAIN, **torchrun}) for launcher in registry.all_launchers())
    assert next(info for info in detected if info).extras["launcher"] == "torchrun"


def test_ranks_of_a_node_are_counted_on_that_node():
    infos = infos_for_nodes("tuesday", ["a", "a", "a", "b", "b"], "10.0.0.1", 4567)
    assert [info.rank for info in infos] == [0, 1, 2, 3, 4]
    assert [info.local_rank for info in infos] == [0, 1, 2, 0, 1]
    assert [info.local_world_size for info in infos] == [3, 3, 3, 2, 2]
