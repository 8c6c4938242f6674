"""Models over ranks that share a GPU. GPU_STAND_IN=cpu runs them without one (stand_in.py)."""

import pytest

from tests.gpu.one_gpu import needs_gpu_or_stand_in, run

pytest.importorskip("transformers", reason="needs transformers, 5 or newer")
from tests.gpu import decode

# isort: split
from drumline.stages.cuda_graphs import NUM_WARM_UPS

pytestmark = [needs_gpu_or_stand_in, pytest.mark.timeout(250)]


def test_tokens_over_a_static_cache_are_replayed_and_are_those_of_one_process(tmp_path):
    (whole, said), (num_replays,) = run("stages_in_graphs", 2, str(tmp_path))
    assert said == whole
    most = decode.COUNT - 1 - NUM_WARM_UPS
    assert num_replays in (most - 1, most)  # the first token teaches, if it comes with a mask


def test_tokens_are_the_same_where_hidden_states_go_from_device_to_device(tmp_path):
    (whole, tokens, num_comms), _ = run("model_ranks.device_hops", 2, str(tmp_path))
    assert tokens == whole
    assert num_comms == 2


def test_every_rank_of_a_tensor_parallel_model_generates_the_same(tmp_path):
    for whole, tokens in run("model_ranks.tensor_parallel", 2, str(tmp_path)):
        assert tokens == whole


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_weights_come_from_elsewhere_to_the_gpu_when_they_run(tmp_path, place):
    ((whole, tokens),) = run("model_ranks.offloaded", 1, str(tmp_path), place)
    assert tokens == whole


def test_a_program_moves_from_the_cpu_to_the_gpu_and_back():
    ((there, back),) = run("model_ranks.hoisted", 1)
    assert there < 1e-4 and back < 1e-5
