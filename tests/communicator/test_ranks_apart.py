"""Ranks of one host that share no memory use TCP, as ranks of several hosts do."""

import os
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "apart.py"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make namespaces and be another user")
@pytest.mark.parametrize("kind", ["namespaces", "foreign /proc", "users"])
def test_ranks_that_cannot_share_memory_use_tcp(warm, kind):
    """It was an error: shared memory was chosen, for they are on one host, and did not open."""
    done = warm.run(PROGRAM, kind)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["tcp [3.0, 3.0, 3.0]"] * 2, done.stdout + done.stderr
