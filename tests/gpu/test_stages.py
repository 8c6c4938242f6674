"""A model over ranks that share a GPU: their layers for one token are replayed as CUDA graphs."""

import pytest

from tests.gpu.one_gpu import needs_gpu, run

pytest.importorskip("transformers", reason="needs transformers, 5 or newer")
from tests.gpu import decode

# isort: split
from drumline.stages.cuda_graphs import NUM_WARM_UPS

pytestmark = [needs_gpu, pytest.mark.timeout(250)]


def test_tokens_over_a_static_cache_are_replayed_and_are_those_of_one_process(tmp_path):
    (whole, said), (num_replays,) = run("stages_in_graphs", 2, str(tmp_path))
    assert said == whole
    assert num_replays == decode.COUNT - 1 - NUM_WARM_UPS
