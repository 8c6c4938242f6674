"""Whatever instructions the processor has, and whatever stores, a reduction has the same bits."""

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


SLOT = 128 << 10  # bytes of a round of two ranks that have a core each
ROUNDS = {  # bytes, and elements more
    "a tail in the third round": (2 * SLOT, 1),
    "three whole rounds": (3 * SLOT, 0),
    "many rounds and a tail": (6 * SLOT, 1021),
}


def added(count, dtype):
    """The sum of two ranks, rounded once."""
    parts = [values(rank, count, dtype) for rank in range(2)]
    if dtype in (torch.float16, torch.bfloat16):
        return (parts[0].float() + parts[1].float()).to(dtype)
    return parts[0] + parts[1]


@pytest.mark.parametrize("stores", ["ordinary", "streaming"])
@pytest.mark.parametrize("instructions", ["plain", *UNITS])
def test_many_rounds_have_the_bits_of_one(ranks, instructions, stores):
    """While a round is reduced, one that comes later is fetched; it must change nothing."""
    if not UNITS.get(instructions, set()) <= flags():
        pytest.skip(f"this processor has no {instructions}; one that has it compares the bits")

    def body(info):
        options = {"instructions": instructions, "stores": stores}
        with Coordinator(info) as coor, Communicator(coor, backend="shm", **options) as comm:
            wrong = []
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int8):
                for name, (nbytes, more) in ROUNDS.items():
                    count = nbytes // dtype.itemsize + more
                    mine, out = values(comm.rank, count, dtype), torch.empty(count, dtype=dtype)
                    comm.allreduce(mine, out=out)
                    comm.allreduce(mine)
                    expected = added(count, dtype).view(torch.uint8)
                    if not all(torch.equal(x.view(torch.uint8), expected) for x in (mine, out)):
                        wrong.append((dtype, name))
            return wrong

    assert ranks(body, 2) == [[], []]
