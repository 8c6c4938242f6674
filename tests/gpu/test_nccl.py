"""NCCL on a real GPU, shared by the ranks of each test. `make gpu` runs it, without a network.

The short tests come first: whoever has the GPU for minutes only learns most from them.
"""

import socket

import pytest
import torch

import launcher
from tests.gpu import between_gpus, one_gpu
from tests.gpu.one_gpu import (
    finish,
    leaks,
    needs_compiler,
    needs_gpu,
    needs_two_gpus,
    result_of,
    run,
    start,
    wrong_nodes,
)

pytestmark = [needs_gpu, pytest.mark.timeout(250)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_sums_scaled_sums_registered_memory_and_splits(world_size):
    found = run("the_known_cases", world_size)
    expected = [world_size, 2.0 * world_size, world_size]
    assert [values[:3] for values in found] == [expected] * world_size
    assert [values[3] for values in found] == [-1.0] * (world_size - 1) + [7.0]


def test_the_sample_of_the_rfc_runs_with_nccl_chosen_by_itself():
    assert run("by_default", 1) == [["nccl", 1.0]]


@pytest.mark.parametrize("mode", ["waiting", "blocking"])
def test_captured_calls_wait_for_replay_and_mix_with_eager_ones(mode):
    assert run("capture_and_replay", 2, mode) == [[1.0, 16.0, 2.0]] * 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_decoding_a_model_cut_over_ranks_is_replayed_from_a_graph(world_size):
    """Embedding, attention, MLP and head have their sums and gathers inside the captured step."""
    pytest.importorskip("transformers", reason="needs transformers, 5 or newer")
    for whole, stepped, replayed in run("decode_in_a_graph", world_size):
        assert stepped == whole and replayed == whole


def test_a_first_use_inside_a_capture_is_a_clear_error():
    for said in run("first_use_in_a_capture", 2):
        assert "would run for the first time inside the capture" in said


def test_calls_go_on_after_a_capture_that_failed():
    for said, mean in run("failed_capture", 2):
        assert "captur" in said and mean == 2.0


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_graph_holds_one_kernel_for_each_captured_call_and_copies_nothing(world_size):
    for nodes in run("captured_nodes", world_size, "65"):
        assert wrong_nodes(nodes, 65) == ""


def test_a_capture_that_recorded_nothing_is_noticed():
    (nodes,) = run("captured_nodes", 1, "0")
    assert "0 kernels for 65 calls" in wrong_nodes(nodes, 65)


def test_sums_keep_a_nan_and_max_and_min_lose_it():
    """As docs/communicator.md says of NCCL."""
    for kept in run("kept_nans", 2):
        assert kept == {name: name.startswith("sum") for name in kept}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_graph_of_65_calls_costs_little_memory(world_size):
    assert all(mib < 10 for mib in run("graph_memory", world_size))


@pytest.mark.parametrize("world_size", [1, 2])
def test_close_is_refused_while_a_graph_lives(world_size):
    for said in run("close_with_a_live_graph", world_size):
        assert "1 CUDA graph(s)" in said and "reset()" in said


@pytest.mark.parametrize("world_size", [1, 2])
def test_abort_is_bounded_although_a_graph_lives(world_size):
    assert all(took_s < 10 for took_s in run("abort_with_a_live_graph", world_size))


@pytest.mark.parametrize("mode", ["waiting", "blocking"])
def test_a_killed_peer_is_named_by_the_survivors_in_time(mode):
    ended = finish(start("killed_peer", 2, mode))
    assert ended[1][0] == -9
    assert ended[0][0] == 0, ended[0][1]
    said, took_s = result_of(ended[0][1])
    assert "rank 1" in said and took_s < 20


def test_a_peer_that_is_killed_during_replays_is_named_by_check():
    ended = finish(start("killed_in_replay", 2))
    assert ended[1][0] == -9
    assert ended[0][0] == 0, ended[0][1]
    said, took_s, after = result_of(ended[0][1])
    assert "rank 1" in said and took_s < 20 and after == 3


@pytest.mark.parametrize("mode", ["waiting", "blocking"])
def test_a_rank_that_stays_away_is_a_timeout_and_abort_frees_the_gpu(mode):
    found = run("absent_rank", 2, mode)
    assert "not done in time" in found[0][0]
    assert found[0][1] < 20


@pytest.mark.parametrize("mode", ["waiting", "blocking"])
@pytest.mark.parametrize("fault", ["absent", "killed"])
def test_the_ranks_that_are_left_shrink_a_revoked_communicator_and_go_on(mode, fault):
    ended = finish(start("shrunk", 3, mode, fault))
    assert ended[2][0] == (-9 if fault == "killed" else 0)
    for code, text in ended[:2]:
        assert code == 0, text
        said, lost_s, shrunk_s, world_size, mean, closed = result_of(text)
        assert ("rank 2" if fault == "killed" else "not done in time") in said, said
        assert lost_s < 20 and shrunk_s < 20
        assert (world_size, mean, closed) == (2, 2.0, "nothing")


def test_the_error_of_a_hang_has_what_ras_says():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    said = run("absent_rank_and_ras", 2, str(port))[0]
    assert "not done in time" in said and "says:" in said and "NCCL" in said.split("says:")[1], said


def test_calls_follow_torchs_stream_without_a_wait_of_the_host():
    assert run("streams", 2) == [[0.0, 2.0, 2.0]] * 2  # not done when the call returned


@needs_compiler
def test_a_compiled_function_with_an_allreduce_runs_eagerly_and_captured():
    pytest.importorskip("triton", reason="torch.compile needs triton for a GPU")
    assert run("compiled", 2, timeout_s=200) == [[5.0, 5.0]] * 2


def test_a_communicator_leaves_nothing_behind():
    (left,) = run("create_and_destroy", 1, timeout_s=100)
    assert leaks(left) == [], left


def test_what_a_communicator_left_behind_would_be_noticed():
    """A MiB of the device, memory of the host, a descriptor and a thread, planted in each life."""
    (left,) = run("create_and_destroy", 1, "8", "60", "leak", timeout_s=100)
    assert leaks(left) == list(one_gpu.LEFT_BEHIND), left


def test_bad_arguments_raise_before_anything_is_enqueued():
    for told in run("mistakes", 2):
        assert all(text.split(":")[0] != "nothing" for text in told), told
        assert "ValueError" in told[0] and "on cpu" in told[0]
        assert "closed Communicator" in told[-1]


def test_the_harness_says_which_path_shares_the_gpu():
    found = one_gpu.nccl_environment("launch", 3)
    assert ("NCCL_HOSTID" in found) != ("NCCL_MULTI_RANK_GPU_ENABLE" in found)


@needs_two_gpus
def test_nccl_conforms_between_gpus():
    counts = launcher.launch(between_gpus.conform, torch.cuda.device_count())
    assert all(count > 50 for count in counts)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_nccl_conforms(world_size):
    found = run("conform", world_size, timeout_s=200)
    assert all(counts["passed"] > 50 for counts in found)


def test_nccl_in_blocking_mode_conforms():
    found = run("conform", 2, "nccl", "blocking", timeout_s=200)
    assert all(counts["passed"] > 50 for counts in found)


@pytest.mark.parametrize("world_size", [1, 2])
def test_nccl_through_cupy_conforms(world_size):
    pytest.importorskip("cupy", reason="needs cupy-cuda13x or cupy-cuda12x")
    found = run("conform", world_size, "cupy", timeout_s=200)
    assert all(counts["passed"] > 40 for counts in found)
