"""The dtypes and reduction ops of drumline, and their names and numbers in other libraries.

op_name(torch.distributed.ReduceOp.SUM)     # "sum"
dtype_info(torch.bfloat16).safetensors      # "BF16"
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ReduceOp

Op = str | ReduceOp.RedOpType
"""A reduction: the name of one of OPS, or torch's member for it."""


@dataclass(frozen=True)
class OpInfo:
    """A reduction op: our name, torch's member, ncclRedOp_t, and MPI's name of what it reduces by.

    avg is a sum that is divided at the end where a library has no average.
    """

    name: str
    torch: ReduceOp.RedOpType
    nccl: int
    mpi: str


OPS = {
    op.name: op
    for op in (
        OpInfo("sum", ReduceOp.SUM, 0, "SUM"),
        OpInfo("prod", ReduceOp.PRODUCT, 1, "PROD"),
        OpInfo("max", ReduceOp.MAX, 2, "MAX"),
        OpInfo("min", ReduceOp.MIN, 3, "MIN"),
        OpInfo("avg", ReduceOp.AVG, 4, "SUM"),
    )
}
NAMES_OF_TORCH_OPS = {op.torch: op.name for op in OPS.values()}


@dataclass(frozen=True)
class DtypeInfo:
    """A torch dtype elsewhere; None where a library does not have it.

    safetensors: its name in a checkpoint's header.
    dlpack: code and bits of DLDataType.
    number: comm_dtype of communicator.h; below 12 also ncclDataType_t. What has none is not moved.
    mpi: MPI's name of what it reduces (MPI 4.1, section 6.9.2).
    is_reduced: whether torch on the CPU reduces it, and so every backend.
    """

    torch: torch.dtype
    safetensors: str | None = None
    dlpack: tuple[int, int] | None = None
    number: int | None = None
    mpi: str | None = None
    is_reduced: bool = True

    @property
    def name(self) -> str:
        return dtype_name(self.torch)


# The order is also the number of a dtype in messages between pipeline stages: append only.
DTYPES = (
    DtypeInfo(torch.float32, "F32", (2, 32), 7, "FLOAT"),
    DtypeInfo(torch.bfloat16, "BF16", (4, 16), 9),
    DtypeInfo(torch.float16, "F16", (2, 16), 6),
    DtypeInfo(torch.float64, "F64", (2, 64), 8, "DOUBLE"),
    DtypeInfo(torch.int64, "I64", (0, 64), 4, "INT64_T"),
    DtypeInfo(torch.int32, "I32", (0, 32), 2, "INT32_T"),
    DtypeInfo(torch.int16, "I16", (0, 16), 101, "INT16_T"),
    DtypeInfo(torch.int8, "I8", (0, 8), 0, "INT8_T"),
    DtypeInfo(torch.uint8, "U8", (1, 8), 1, "UINT8_T"),
    DtypeInfo(torch.bool, "BOOL", (6, 8), 100),
    DtypeInfo(torch.complex64, "C64", (5, 64), 103, "C_FLOAT_COMPLEX"),
    DtypeInfo(torch.float8_e4m3fn, "F8_E4M3", (10, 8), 10),
    DtypeInfo(torch.float8_e5m2, "F8_E5M2", (12, 8), 11),
    DtypeInfo(torch.complex128, None, (5, 128), 104, "C_DOUBLE_COMPLEX"),
    DtypeInfo(torch.uint64, "U64", (1, 64), 5, is_reduced=False),
    DtypeInfo(torch.uint32, "U32", (1, 32), 3, is_reduced=False),
    DtypeInfo(torch.uint16, "U16", (1, 16), 102, is_reduced=False),
    DtypeInfo(torch.float8_e4m3fnuz, "F8_E4M3FNUZ", (11, 8), 105, is_reduced=False),
    DtypeInfo(torch.float8_e5m2fnuz, "F8_E5M2FNUZ", (13, 8), 106, is_reduced=False),
    DtypeInfo(torch.float8_e8m0fnu, "F8_E8M0", (14, 8), 107, is_reduced=False),
    DtypeInfo(torch.float4_e2m1fn_x2, "F4", (17, 4), is_reduced=False),
)
_BY_TORCH_DTYPE = {info.torch: info for info in DTYPES}
SMALL_FLOATS = {
    info.torch
    for info in DTYPES
    if info.is_reduced and info.torch.is_floating_point and info.torch.itemsize < 4
}
"""Dtypes whose sums are taken in float32: of many terms they would lose their last bits."""


def keeps_nan(dtype: torch.dtype, op: str) -> bool:
    """True if every library's reduction keeps a NaN; the max or min of some loses it."""
    return op not in ("max", "min") or not dtype.is_floating_point


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without that of torch, as messages and errors have it."""
    return str(dtype).removeprefix("torch.")


def dtype_info(dtype: torch.dtype) -> DtypeInfo:
    """The row of DTYPES for dtype; without any name elsewhere if there is none."""
    return _BY_TORCH_DTYPE.get(dtype, DtypeInfo(dtype, is_reduced=False))


def op_name(op: object) -> str:
    """Our name of an op, of which SUM, PRODUCT, MIN, MAX, AVG of torch's ReduceOp are others.

    Raises ValueError for any other.
    """
    if isinstance(op, str) and op in OPS:
        return op
    if isinstance(op, ReduceOp.RedOpType) and op in NAMES_OF_TORCH_OPS:
        return NAMES_OF_TORCH_OPS[op]
    raise ValueError(
        f"op={op!r} is none of {', '.join(OPS)}, nor ReduceOp.SUM, PRODUCT, MAX, MIN or AVG"
    )
