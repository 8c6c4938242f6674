"""A program traced on one rank is right on all of them, or does not get out."""

from pathlib import Path

import pytest
import torch

from drumline import HoistError, trace_portable

HERE = Path(__file__).parent


def test_a_torch_that_cannot_trace_for_every_rank_is_named(monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0+cpu"))
    with pytest.raises(HoistError, match=r"needs torch 2\.12 or newer, and this is 2\.11\.0"):
        trace_portable(lambda: None, 2)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 names groups in its traces")
def test_one_trace_is_right_on_every_rank_and_baked_ones_are_refused(warm):
    done = warm.run("-m", "launcher", "run", "-n", "2", HERE / "portable_ranks.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("names the process group") == 2
    assert done.stdout.count("depends on the rank") == 6
    assert done.stdout.count("of a single process") == 2
