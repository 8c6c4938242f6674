"""Trainers on torch.distributed get on drumline what they get on gloo.

The programs are in programs/trainer_programs.py, which forks their ranks.
"""

import re
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "programs" / "trainer_programs.py"
PROGRAMS = re.findall(r"^@program\(\d\)\ndef (\w+)", FILE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def outcomes(warm, tmp_path_factory):
    """A folder with what went wrong in each program."""
    folder = tmp_path_factory.mktemp("trainer_programs")
    done = warm.run(FILE, folder, timeout=280)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", PROGRAMS)
def test_trainer_gets_the_same_on_gloo_and_on_drumline(outcomes, program):
    assert (outcomes / program).read_text() == ""
