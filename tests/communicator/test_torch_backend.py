"""torch.distributed on our communicators gives what it gives on gloo.

The programs are in programs/torch_door.py, which imports what is needed and forks their ranks.
"""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DOOR = HERE / "programs" / "torch_door.py"
PROGRAMS = re.findall(r"^@program\(\d\)\ndef (\w+)", DOOR.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def outcomes(warm, tmp_path_factory):
    """A folder with what went wrong in each program."""
    folder = tmp_path_factory.mktemp("torch_door")
    done = warm.run(DOOR, folder, timeout=110)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_gives_the_same_on_gloo_and_on_drumline(outcomes, program):
    assert (outcomes / program).read_text() == ""
