"""Dicts of tensors and plain values, moved as a description and then the memory of each tensor.

Their names and plain values travel as the Coordinator's do (msgpack), so nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from communicator.backend import Backend
from communicator.calls.dtypes import DTYPES, dtype_name
from coordinator import CoordinatorError, object_codec

Move = Callable[[torch.Tensor], object]
"""Sends a tensor, or fills it: send, recv or broadcast with the peer filled in."""
TENSOR, VALUE = "tensor", "value"
TORCH_DTYPES = {info.name: info.torch for info in DTYPES}


def write(backend: Backend, call: str, values: dict[str, Any], move: Move) -> None:
    """Move a dict. Raises for what cannot be sent, after the receiver has heard so."""
    problem: Exception | None = None
    rank = backend.coor.info.rank
    try:
        if not isinstance(values, Mapping):
            raise TypeError(
                f"{backend.rank_name()}, {call}: needs a dict of tensors, not "
                f"{type(values).__name__}"
            )
        tensors = [_in_order(item) for item in values.values() if isinstance(item, torch.Tensor)]
        for tensor in tensors:
            backend.check_tensor(call, tensor)
        data = object_codec.packed({name: _described(v) for name, v in values.items()}, rank)
        if why := object_codec.why_unsendable(data):
            advice = "Beside tensors only None, bool, int, float, str, bytes, lists go"
            raise ValueError(f"{why}. {advice}")
        object_codec.unpacked(data, rank)  # raises what would be raised by the receiver alone
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        problem, data = error, object_codec.UNSENDABLE + str(error).rstrip(".").encode()
    try:
        move(torch.tensor([len(data)], device=backend.device))
        move(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(backend.device))
    except Exception as error:
        raise problem or error from None  # what is wrong here comes first
    if problem is not None:
        raise problem
    for part in _memory(tensors):
        move(part)


def read(backend: Backend, move: Move) -> dict[str, Any]:
    """The dict that a peer writes. Raises CoordinatorError if that could not send it."""
    length = torch.zeros(1, dtype=torch.int64, device=backend.device)
    move(length)
    backend.follow_calls()
    data = torch.empty(int(length), dtype=torch.uint8, device=backend.device)
    move(data)
    backend.follow_calls()
    described = data.cpu().numpy().tobytes()
    if why := object_codec.why_unsendable(described):  # with its advice
        raise CoordinatorError(f"{backend.rank_name()}: {why}.")
    rows = object_codec.unpacked(described, backend.coor.info.rank)
    values = {name: _undescribed(backend, *row) for name, row in rows.items()}
    tensors = [values[name] for name, (kind, _) in rows.items() if kind == TENSOR]
    for part in _memory(tensors):
        move(part)
    return values


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor contiguous in memory; as it is if it has no such order, to be refused in words."""
    return tensor.contiguous() if tensor.layout == torch.strided else tensor


def _described(value: Any) -> list[Any]:
    if not isinstance(value, torch.Tensor):
        return [VALUE, value]
    return [TENSOR, [list(value.shape), dtype_name(value.dtype)]]


def _undescribed(backend: Backend, kind: str, value: Any) -> Any:
    if kind == VALUE:
        return value
    shape, dtype = value
    return torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=backend.device)


def _memory(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of each tensor that has any."""
    return (tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel())
