"""The one table of dtypes and ops, and the spellings of torch.distributed."""

import re
from pathlib import Path

import pytest
import torch
from torch.distributed import ReduceOp

from communicator import Communicator
from communicator.backends.gloo import Gloo
from communicator.calls.dtypes import DTYPES, OPS, dtype_info, op_name
from coordinator import Coordinator

CSRC = Path(__file__).parents[3] / "csrc"


def constants(path, prefix):
    """The values of an enum's members in a C header."""
    text = (CSRC / path).read_text()
    return {name: int(value) for name, value in re.findall(rf"({prefix}\w+) = (\d+)", text)}


def test_the_table_agrees_with_the_one_of_the_binding():
    numbers, codes = constants("abi/communicator.h", "COMM_"), constants("abi/dlpack.h", "DL_")
    source = (CSRC / "python" / "convert" / "tensor.cpp").read_text()
    rows = re.findall(r"\{(DL_\w+), (\d+), (COMM_\w+)\}", source)
    binding = {((codes[code], int(bits)), numbers[name]) for code, bits, name in rows}
    assert len(binding) == 20
    assert binding == {(info.dlpack, info.number) for info in DTYPES if info.number is not None}


def test_ops_agree_with_the_header():
    numbers = constants("abi/communicator.h", "COMM_")
    assert {op.nccl: f"COMM_{op.name.upper()}" for op in OPS.values()} == {
        numbers[f"COMM_{name}"]: f"COMM_{name}" for name in ("SUM", "PROD", "MAX", "MIN", "AVG")
    }


@pytest.mark.parametrize("info", DTYPES, ids=lambda info: info.name)
def test_every_dtype_is_found_by_torchs(info):
    assert dtype_info(info.torch) is info
    assert info.dlpack is None or info.dlpack[1] in (4, 8 * info.torch.itemsize)


def test_a_dtype_that_is_not_in_the_table_is_not_reduced():
    assert not dtype_info(torch.qint8).is_reduced


def test_torchs_members_name_the_same_ops():
    members = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.AVG)
    assert [op_name(member) for member in members] == list(OPS)


@pytest.mark.parametrize("op", [ReduceOp.BAND, ReduceOp.PREMUL_SUM, 0, None, "mean", [1]], ids=str)
def test_other_ops_are_value_errors(op):
    with pytest.raises(ValueError, match=r"is none of sum, prod, max, min, avg, nor ReduceOp\.SUM"):
        op_name(op)


@pytest.mark.parametrize("backend", ["shm", Gloo], ids=["shm", "gloo"])
def test_calls_of_torch_distributed_work_as_they_are_spelled_there(ranks, backend):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, backend) as comm:
            one = torch.full((2,), comm.rank + 1.0)
            with pytest.raises(ValueError, match=rf"rank {comm.rank}, allreduce: op=.*BXOR"):
                comm.allreduce(one.clone(), ReduceOp.BXOR)
            with pytest.raises(ValueError, match=r"average of|of integers"):
                comm.allreduce(one.int(), ReduceOp.AVG)
            return (
                comm.all_reduce(one.clone(), op=ReduceOp.PRODUCT).tolist(),
                comm.reduce(one.clone(), 0, ReduceOp.MAX)[0].item(),
                comm.reduce_scatter(torch.ones(3, 1), ReduceOp.AVG).item(),
                comm.all_reduce(one, ReduceOp.MIN, out=torch.zeros(2)).tolist(),
                comm.all_gather(torch.tensor(comm.rank)).tolist(),
                comm.all_to_all(torch.full((3,), comm.rank)).tolist(),
            )

    rest = (1.0, [1.0, 1.0], [0, 1, 2], [0, 1, 2])
    results = ranks(body, 3)
    assert results == [([6.0, 6.0], maximum, *rest) for maximum in (3.0, 2.0, 3.0)]
