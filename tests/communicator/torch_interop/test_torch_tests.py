"""torch's own tests of torch.distributed pass on drumline: all that gloo passes, and some of MPI's.

programs/torch_tests.py runs them, from the installed wheel, and names what torch keeps for gloo.
"""

import json
import re
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "programs" / "torch_tests.py"

# What torch says of the tests that it does not run here, and why that is no matter of ours.
SKIPPED = {
    "needs a GPU": r"(CUDA|accelerator) is not available|Need at least \d (CUDA|acc\w+) dev",
    "for NCCL alone": r"N(CCL|ccl)|to be one of {'nccl'}",
    "for other numbers of ranks": r"world ?size",
    "for gloo alone": r"torch reserves this to gloo|in C\+\+ torch names all",
    "switched off in torch": r"pytorch/(issues|pull)/\d+$|flak[iy]",
    "for another library or store": r"no torchvision|Requires file:// initialization",
}


def outcomes(warm, folder, world_size):
    done = warm.run(PROGRAM, "drumline", world_size, folder, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "outcomes.json").read_text())


def is_skipped(outcome):
    return outcome.startswith("skipped: ")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world_size", "at_least"),
    [
        (3, 110),
        pytest.param(2, 83, marks=pytest.mark.soak),
        pytest.param(4, 114, marks=pytest.mark.soak),
    ],
)
def test_torchs_own_tests_pass_but_those_that_torch_does_not_run_here(
    warm, tmp_path, no_memory_left, world_size, at_least
):
    found = outcomes(warm, tmp_path, world_size)
    run = {name: outcome for name, outcome in found.items() if not is_skipped(outcome)}
    failed = [f"{name}: {outcome}" for name, outcome in run.items() if outcome != "passed"]
    assert not failed, "\n\n".join(failed)
    assert len(run) >= at_least
    skipped = {outcome for outcome in found.values() if is_skipped(outcome)}
    assert {why for why in skipped if not re.search("|".join(SKIPPED.values()), why)} == set()
