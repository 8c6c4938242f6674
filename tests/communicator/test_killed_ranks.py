"""Ranks killed at random in the middle of collectives: every survivor is told, nothing is left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAM = HERE / "programs" / "killed.py"
SOON_S = 5  # generous: the machine may be busy


def segments():
    return {name for name in os.listdir("/dev/shm") if "drumline" in name}


@pytest.mark.parametrize(("backend", "rounds"), [("shm", 20), ("gloo", 8)])
def test_every_survivor_of_a_killed_rank_is_told_and_nothing_is_left(backend, rounds):
    before = segments()
    environ = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, PROGRAM, backend, str(rounds)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    fates = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(fates) == rounds
    for fate in fates:
        victim = fate["victim"]
        assert fate["codes"] == [-9 if rank == victim else 0 for rank in range(3)], fate
        told = [text for rank, text in enumerate(fate["told"]) if rank != victim]
        assert all(f"rank {victim}" in text for text in told), fate
        assert fate["took_s"] < SOON_S, fate
    assert segments() <= before
