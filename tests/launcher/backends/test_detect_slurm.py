"""What SLURM's variables say; the values are those of srun 22.05."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import LaunchInfoError
from launcher.backends import slurm
from launcher.backends.slurm_nodelist import expand_nodes, expand_tasks
from launcher.runtime import rank_environment

# Task 4 of `srun -N 4 -n 7`, on the third of nodes with 2, 2, 2 and 1 tasks.
TASK = {
    "SLURM_JOB_ID": "17",
    "SLURM_NTASKS": "7",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.250",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[08-10],gpu12",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "4,5",
}
SHELL_IN_ALLOCATION = {
    "SLURM_JOB_ID": "17",
    "SLURM_NTASKS": "7",
    "SLURM_NNODES": "4",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_NODELIST": "gpu[08-10],gpu12",
}
BATCH_SCRIPT = {
    **SHELL_IN_ALLOCATION,
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
}


def test_task_of_a_step_is_a_rank():
    info = slurm.detect(TASK)
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (4, 7, 0, 2)
    assert info.launch_id == "slurm-17.3"


def test_last_node_has_fewer_tasks():
    """Its GROUP_RANK, for scripts of torchrun, was 6: its rank, divided by its one task."""
    last = {**TASK, "SLURM_NODEID": "3", "SLURM_PROCID": "6", "SLURM_GTIDS": "6"}
    info = slurm.detect(last)
    assert info.local_world_size == 1
    assert rank_environment.torchrun_variables(info, 1, 0)["GROUP_RANK"] == "3"


def test_master_is_the_first_node_of_the_step_and_not_the_node_of_srun():
    assert slurm.detect(TASK).master_addr == "gpu08"


def test_step_on_one_node_meets_on_loopback():
    one_node = {
        **TASK,
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "gpu08",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_GTIDS": "0,1",
    }
    assert slurm.detect(one_node).master_addr == "127.0.0.1"


def test_all_tasks_of_a_step_agree_on_where_to_meet():
    other = {**TASK, "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_GTIDS": "0,1"}
    infos = [slurm.detect(TASK), slurm.detect(other)]
    assert len({(info.launch_id, info.master_addr, info.master_port) for info in infos}) == 1


def test_two_steps_of_one_job_are_two_launches():
    first, second = slurm.detect(TASK), slurm.detect({**TASK, "SLURM_STEP_ID": "4"})
    assert first.launch_id != second.launch_id
    assert first.master_port != second.master_port


def test_size_is_the_step_s_and_not_the_allocation_s():
    info = slurm.detect({**TASK, "SLURM_NTASKS": "64", "SLURM_TASKS_PER_NODE": "16(x4)"})
    assert (info.world_size, info.local_world_size) == (7, 2)


def test_explicit_master_goes_before_the_node_list():
    info = slurm.detect({**TASK, "MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "4567"})
    assert (info.master_addr, info.master_port) == ("10.1.2.3", 4567)


@pytest.mark.parametrize("environ", [SHELL_IN_ALLOCATION, BATCH_SCRIPT], ids=["salloc", "sbatch"])
def test_shell_inside_an_allocation_is_not_a_rank(environ):
    assert slurm.detect(environ) is None


def test_interactive_step_is_not_a_rank():
    assert slurm.detect({**TASK, "SLURM_STEP_ID": str(0xFFFFFFFA)}) is None


def test_batch_script_submitted_from_inside_a_step_is_told_whose_variables_it_has():
    """sbatch passes on the variables of the step it was called in, beside SLURM_PROCID=0."""
    with pytest.raises(LaunchInfoError, match="--export=NONE"):
        slurm.detect({**TASK, **BATCH_SCRIPT})


@pytest.mark.parametrize("name", [name for name in slurm.NAMES])
def test_incomplete_variables_name_the_missing_one(name):
    incomplete = {key: value for key, value in TASK.items() if key != name}
    with pytest.raises(LaunchInfoError, match=f"{name} not set"):
        slurm.detect(incomplete)


def test_missing_variable_is_named_once():
    with pytest.raises(LaunchInfoError) as caught:
        slurm.detect({**TASK, "SLURM_STEP_NUM_TASKS": ""})
    assert str(caught.value).count("SLURM_STEP_NUM_TASKS") == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"SLURM_PROCID": "7", "SLURM_GTIDS": "4,7"},
        {"SLURM_NODEID": "4"},
        {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"},
        {"SLURM_STEP_TASKS_PER_NODE": "two"},
        {"SLURM_STEP_NODELIST": "gpu[08-"},
        {"SLURM_LOCALID": "2"},
    ],
    ids=str,
)
def test_contradiction_is_an_error_with_the_values(wrong):
    with pytest.raises(LaunchInfoError, match="SLURM_STEP_NUM_TASKS': '7'"):
        slurm.detect({**TASK, **wrong})


def test_number_that_is_invalid_is_an_error_that_names_the_variable():
    with pytest.raises(LaunchInfoError, match="SLURM_LOCALID='first'"):
        slurm.detect({**TASK, "SLURM_LOCALID": "first"})


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("login", ["login"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("a,b[2-3],c-4", ["a", "b2", "b3", "c-4"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
    ],
)
def test_compressed_node_list_expands_in_its_order(text, nodes):
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize(
    "text", ["", "n[1-3", "n1]", "n[3-1]", "n[a-b]", "n[]", ",n1", "n1,,n2", "n[1-]"]
)
def test_malformed_node_list_is_an_error(text):
    with pytest.raises(ValueError, match="node list"):
        expand_nodes(text)


@pytest.mark.parametrize("text", ["", "2(x3", "2,", "x3", "2(3)"])
def test_malformed_task_list_is_an_error(text):
    with pytest.raises(ValueError, match="tasks per node"):
        expand_tasks(text)


@pytest.mark.parametrize(
    ("expand", "text"),
    [
        (expand_nodes, "n[1-999999999]"),
        (expand_nodes, "n[1-9999999999999]"),
        (expand_nodes, "[1-300]" * 9),
        (expand_nodes, ",".join(["n[1-60000]"] * 50)),
        (expand_tasks, "2(x999999999)"),
        (expand_tasks, "2(x" + 5000 * "9" + ")"),
    ],
)
def test_a_list_of_more_nodes_than_there_are_fills_no_memory(expand, text):
    """A few letters were made a list of all the names that they stand for."""
    with pytest.raises(ValueError, match="in a list of SLURM"):
        expand(text)


@given(st.lists(st.integers(min_value=1, max_value=99), min_size=1, max_size=30))
def test_task_list_expands_to_one_count_a_node(counts):
    runs = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    text = ",".join(f"{count}(x{times})" if times > 1 else f"{count}" for count, times in runs)
    assert expand_tasks(text) == counts


@given(
    st.lists(st.integers(min_value=0, max_value=999), min_size=1, max_size=30), st.integers(1, 4)
)
def test_node_list_of_numbers_expands_to_each(numbers, width):
    text = "n[" + ",".join(str(number).zfill(width) for number in numbers) + "]"
    assert expand_nodes(text) == [f"n{number:0{width}}" for number in numbers]
