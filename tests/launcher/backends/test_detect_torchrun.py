"""What torchrun's variables say; the values are those of torchrun 2.13."""

import pytest

from launcher import LaunchInfoError
from launcher.backends import env_table, torchrun

# The second rank on the second of two nodes, with 3 and 2 ranks.
RANK = {
    "TORCHELASTIC_RUN_ID": "c2d9",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "4",
    "WORLD_SIZE": "5",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}
READ = [name for name in RANK if not name.startswith(("GROUP", "TORCHELASTIC_M", "TORCHELASTIC_U"))]


def test_rank_of_torchrun_is_a_rank():
    info = torchrun.detect(RANK)
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (4, 5, 1, 2)
    assert (info.master_addr, info.master_port) == ("10.0.0.1", 29400)


def test_agent_that_listens_at_the_master_is_announced():
    assert torchrun.detect(RANK).extras["store"] == "agent"
    assert "store" not in torchrun.detect({**RANK, "TORCHELASTIC_USE_AGENT_STORE": "False"}).extras


def test_restarted_group_is_another_launch():
    restarted = {**RANK, "TORCHELASTIC_RESTART_COUNT": "1"}
    assert torchrun.detect(RANK).launch_id != torchrun.detect(restarted).launch_id


def test_two_launches_without_a_run_id_of_their_own_are_two_launches():
    """torchrun calls every launch "none" unless --rdzv-id or --standalone is given."""
    first = torchrun.detect({**RANK, "TORCHELASTIC_RUN_ID": "none"})
    second = torchrun.detect({**RANK, "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29401"})
    assert first.launch_id != second.launch_id


def test_process_that_torchrun_did_not_start_is_not_a_rank():
    assert torchrun.detect({"PATH": "/bin", "LOCAL_RANK": "0"}) is None


@pytest.mark.parametrize("name", READ)
def test_incomplete_variables_name_the_missing_one(name):
    incomplete = {key: value for key, value in RANK.items() if key != name}
    with pytest.raises(LaunchInfoError, match=f"{name} not set"):
        torchrun.detect(incomplete)


@pytest.mark.parametrize(
    "wrong", [{"RANK": "5"}, {"LOCAL_RANK": "2"}, {"LOCAL_WORLD_SIZE": "6"}], ids=str
)
def test_contradiction_is_an_error_with_the_values(wrong):
    with pytest.raises(LaunchInfoError, match="'WORLD_SIZE': '5'"):
        torchrun.detect({**RANK, **wrong})


PLAIN = {name: RANK[name] for name in env_table.PLAIN}


def test_variables_of_env_alone_set_by_hand_make_a_rank():
    info = torchrun.detect(PLAIN)
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (4, 5, 1, 2)
    assert "store" not in info.extras


@pytest.mark.parametrize("name", env_table.PLAIN)
def test_incomplete_env_variables_name_the_missing_one(name):
    incomplete = {key: value for key, value in PLAIN.items() if key != name}
    with pytest.raises(LaunchInfoError, match=f"{name} not set"):
        torchrun.detect(incomplete)


def test_variables_of_env_beside_those_of_another_backend_are_left_to_it():
    assert torchrun.detect({**PLAIN, "SLURM_PROCID": "4"}) is None
