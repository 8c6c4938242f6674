"""Whatever instructions the processor has, a reduction has the bits of the plain code."""

from pathlib import Path

import pytest
import torch

from communicator import Communicator
from coordinator import Coordinator

FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
# Around a vector, around the block that is widened at once, and enough to go from two ends.
COUNTS = (1, 15, 67, 1021, 20_011)
UNITS = {"avx2": {"avx2", "f16c"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}


def flags():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def values(rank, count, dtype):
    """All bits there are, so infinities, denormals and both zeros among them; but no NaN, whose
    bits no standard settles."""
    generator = torch.Generator().manual_seed(7 * rank + count)
    nbytes = count * dtype.itemsize
    found = torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8).view(dtype)
    if dtype not in FLOATS:
        return found
    return torch.where(found.double().isnan(), 1.0, found.double()).to(dtype)


def reduced(comm):
    """The bits of every reduction; of NaN only that it is one."""
    found = []
    for dtype in FLOATS + WHOLE:
        for op in ("sum", "prod", "max", "min", "avg")[: 5 if dtype in FLOATS else 4]:
            for count in COUNTS:
                result = comm.allreduce(values(comm.rank, count, dtype), op)
                if dtype in FLOATS:
                    result = torch.where(result.double().isnan(), 2.0, result.double())
                found.append(result.view(torch.uint8))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("instructions", UNITS)
def test_every_reduction_has_the_bits_of_the_plain_code(ranks, instructions, world_size):
    if not UNITS[instructions] <= flags():
        pytest.skip(f"this processor has no {instructions}; one that has it compares the bits")

    def body(info):
        with Coordinator(info) as coor:
            with Communicator(coor, backend="shm", instructions="plain") as comm:
                plain = reduced(comm)
            with Communicator(coor, backend="shm", instructions=instructions) as comm:
                return all(map(torch.equal, plain, reduced(comm)))

    assert all(ranks(body, world_size))
