"""What the benchmark of collectives says of a library's results can be wrong."""

import pytest
import torch

from benchmarks import libraries
from benchmarks.collectives import OPERATIONS
from benchmarks.mpi_library import Library


class Idle(Library):
    """Does nothing, as rank 1 of 2."""

    def collective(self, operation, tensor, out):
        return lambda: None

    def point(self, tensor, peer):
        return lambda: None, lambda: None


@pytest.mark.parametrize("operation", [each for each in OPERATIONS if each != "barrier"])
def test_a_library_that_does_nothing_is_found_wrong(operation):
    rank = 0 if operation == "reduce" else 1  # whose result it is
    idle = Idle("idle", None, rank, 2)
    assert not libraries.is_right(idle, operation, 64, torch.float32)
