"""A rank of a training run that dies, stops or is late is named in the error of the others.

The cases are in programs/trainer_failures.py, which forks their ranks. After the error each rank
that is left has saved its work and loaded it.
"""

import json
import re
from pathlib import Path

import pytest

from tests.cases import soak_all

PROGRAM = Path(__file__).parents[1] / "programs" / "trainer_failures.py"
CASES = re.findall(r'^    "(\w+)": ', PROGRAM.read_text(), re.MULTILINE)
KILLED = ["ddp", "fsdp2", "pipeline", "ddp_python_hook"]
STOPPED = ["ddp_static_graph", "pipeline"]  # the others, and more rounds, take too long
LATE = ["ddp", "fsdp1"]
SURVIVORS, VICTIM = (0, 2), 1
SOON_S, TIMEOUT_S = 15, 1  # half of PATIENT_S there, and HASTY_S


@pytest.fixture
def failure(warm, tmp_path, no_memory_left):
    """failure(case, act): the victim's pid, and by rank the type, text and time of the error."""

    def run(case, act, survivors=SURVIVORS):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        done = warm.run(PROGRAM, folder, case, act)
        assert done.returncode == 0, done.stderr
        outcome = json.loads((folder / "outcome.json").read_text())
        assert outcome["codes"] == [0] * len(survivors)
        return outcome["pid"], dict(zip(survivors, outcome["errors"], strict=True))

    return run


def check_killed(pid, errors):
    for rank, (kind, text, took_s) in errors.items():
        assert kind in ("RuntimeError", "PeerLost")  # through torch's C++ only the text comes
        named = rf"PeerLost: rank {rank}:? .*\brank {VICTIM} \((host \S+ )?pid {pid}"
        assert re.search(named, f"{kind}: {text}")
        assert re.search(r" in (call \d+ \(|recv |send )", text)
        assert took_s < SOON_S


def check_timed_out(_, errors):
    for rank in SURVIVORS:
        kind, text, took_s = errors[rank]
        assert "CommunicatorTimeout" in f"{kind}: {text}"
        assert re.search(rf"rank {rank}:? timed out after .*\brank {VICTIM} ", text)
        assert took_s < TIMEOUT_S + SOON_S


@pytest.mark.parametrize("case", soak_all(CASES, but=KILLED))
def test_survivors_of_a_rank_that_is_killed_name_it_and_save_their_work(failure, case):
    check_killed(*failure(case, "kill"))


@pytest.mark.parametrize("case", soak_all(CASES, but=STOPPED))
def test_ranks_that_wait_for_a_stopped_one_time_out_and_save_their_work(failure, case):
    check_timed_out(*failure(case, "stop"))


@pytest.mark.parametrize("case", soak_all(CASES, but=LATE))
def test_ranks_that_wait_for_a_late_one_time_out_and_it_gets_an_error_too(failure, case):
    check_timed_out(*failure(case, "late", survivors=(0, 1, 2)))


def test_survivors_of_a_rank_that_raises_and_ends_name_it_and_save_their_work(failure):
    pid, errors = failure("ddp", "raise", survivors=(0, 1, 2))
    assert errors.pop(VICTIM)[:2] == ["ValueError", "a bad batch"]
    check_killed(pid, errors)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["ddp", "ddp_by_accelerate", "fsdp2", "pipeline"])
def test_survivors_of_a_rank_killed_at_any_moment_name_it_and_save_their_work(failure, case):
    for _ in range(25):
        check_killed(*failure(case, "random"))
