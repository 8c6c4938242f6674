"""torch.distributed on our communicators gives what it gives on gloo.

The programs are in programs/torch_door.py, which imports torch once and forks the ranks of each.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DOOR = HERE / "programs" / "torch_door.py"
PROGRAMS = re.findall(r"^@program\(\d\)\ndef (\w+)", DOOR.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """A folder with what went wrong in each program."""
    folder = tmp_path_factory.mktemp("torch_door")
    environ = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    subprocess.run([sys.executable, DOOR, folder], env=environ, check=True, timeout=110)
    return folder


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_gives_the_same_on_gloo_and_on_drumline(outcomes, program):
    assert (outcomes / program).read_text() == ""
