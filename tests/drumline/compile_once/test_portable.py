"""A program traced on one rank is right on all of them, or does not get out."""

from pathlib import Path

HERE = Path(__file__).parent


def test_one_trace_is_right_on_every_rank_and_baked_ones_are_refused(warm):
    done = warm.run("-m", "launcher", "run", "-n", "2", HERE / "portable_ranks.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("names the process group") == 2
    assert done.stdout.count("depends on the rank") == 2
    assert done.stdout.count("of a single process") == 2
