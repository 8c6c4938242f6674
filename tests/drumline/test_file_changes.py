"""The ways through the code stay as straight as they are: a new turn is a reviewed number here."""

from tests.programs import file_changes

# Changes of file, those without helpers, different ones, files; a few more than counted, as threads
# may wait in other places. Lower them where a way has become straighter.
RUN = (80, 45, 54, 37)
TOKEN = (71, 59, 34, 22)


def _is_within(way, most):
    return all(number <= limit for number, limit in zip(way, most, strict=True))


def test_the_way_from_the_command_line_to_a_script():
    way = tuple(map(int, file_changes.of_run().split()))
    assert _is_within(way, RUN), way


def test_an_allreduce_in_shared_memory_goes_straight_to_c(ranks):
    assert [way.row() for way in ranks(file_changes.allreduce, 2)] == [(0, 0, 0, 0)] * 2


def test_the_way_of_a_token_on_the_first_of_two_ranks(checkpoints, on_master):
    _, path = checkpoints.llama()
    way = on_master(path, 2, file_changes.token).row()
    assert _is_within(way, TOKEN), way
