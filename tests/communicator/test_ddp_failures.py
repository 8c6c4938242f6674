"""A collective that fails in DDP's backward is an error there, and the rank can save its work.

The cases are in programs/ddp_failures.py, which forks their ranks.
"""

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "ddp_failures.py"
SURVIVORS = (0, 2)
KILLED = ["plain", "static_graph", "find_unused", "python_hook", "builtin_hook"]


@pytest.fixture(scope="module")
def outcome(warm, tmp_path_factory):
    """The exit codes of a case, and the error of each of its survivors: type, text and time."""
    folder = tmp_path_factory.mktemp("ddp_failures")
    done = warm.run(PROGRAM, folder)
    assert done.returncode == 0, done.stderr

    def read(case, survivors=SURVIVORS):
        codes = json.loads((folder / f"{case}.json").read_text())
        assert [codes[rank] for rank in survivors] == [0] * len(survivors), done.stderr
        return [json.loads((folder / f"{case}.{rank}.json").read_text()) for rank in survivors]

    return read


@pytest.mark.parametrize("case", KILLED)
def test_survivors_of_a_rank_killed_in_backward_name_it(outcome, case):
    for rank, (kind, text, took_s) in zip(SURVIVORS, outcome(case), strict=True):
        assert kind in ("RuntimeError", "PeerLost")  # through DDP's C++ only the text comes
        assert f"PeerLost: rank {rank}: rank 1" in f"{kind}: {text}"
        assert took_s < 10


def test_ranks_that_wait_in_backward_for_a_late_rank_time_out(outcome):
    for _, text, _ in outcome("late"):
        assert "CommunicatorTimeout" in text
        assert "Missing: rank 1" in text


def test_sparse_gradient_is_refused_in_one_sentence(outcome):
    ranks = (0, 1, 2)
    for rank, (kind, text, _) in zip(ranks, outcome("sparse", ranks), strict=True):
        assert kind == "Unsupported"
        assert text.startswith(f"rank {rank}: a communicator moves dense tensors")
