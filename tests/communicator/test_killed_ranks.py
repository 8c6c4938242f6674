"""Ranks killed at random in the middle of collectives: every survivor is told, nothing is left.

For two hundred of them, and not as few as here: see programs/killed.py.
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAM = HERE / "programs" / "killed.py"


@pytest.mark.parametrize(("backend", "rounds"), [("shm", 4), ("gloo", 2), ("tcp", 2)])
def test_every_survivor_of_a_killed_rank_raises_and_nothing_is_leaked(
    warm, no_memory_left, backend, rounds
):
    done = warm.run(PROGRAM, backend, rounds)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == rounds
