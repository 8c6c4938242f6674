"""The ways through the code stay as straight as they are: a new turn is a reviewed number here."""

from tests.drumline.conftest import LLAMA
from tests.programs import file_changes

# Changes of file, those without helpers, different ones, files; a few more than counted, as threads
# may wait in other places. Lower them where a way has become straighter.
RUN = (80, 45, 54, 37)
TOKEN = (45, 30, 28, 20)


def _is_within(way, most):
    return all(number <= limit for number, limit in zip(way, most, strict=True))


def test_the_way_from_the_command_line_to_a_script():
    way = tuple(map(int, file_changes.of_run().split()))
    assert _is_within(way, RUN), way


def test_an_allreduce_in_shared_memory_goes_straight_to_c(ranks):
    assert [way.row() for way in ranks(file_changes.allreduce, 2)] == [(0, 0, 0, 0)] * 2


def test_the_way_of_a_token_through_a_layer_of_another_rank(checkpoints, on_master):
    sizes = {**LLAMA, "num_hidden_layers": 2}
    _, path = checkpoints.make("llama-of-two-layers", "LlamaForCausalLM", **sizes)
    where = file_changes.ONE_REMOTE_LAYER
    way = on_master(path, 2, file_changes.token, device_map=where, max_memory=None).row()
    assert _is_within(way, TOKEN), way
