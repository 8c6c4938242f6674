"""Checks of a call's arguments, before anything moves.

me: this rank as in the launch, by Communicator.rank_name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from communicator.calls.dtypes import dtype_info, op_name
from coordinator import Coordinator, torch_private


class Ranks(Protocol):
    """The ranks of a communicator, for errors."""

    rank: int
    world_size: int

    def rank_name(self, rank: int | None = None) -> str: ...


def check_tensor(me: str, call: str, tensor: torch.Tensor, device: str) -> None:
    """Raise TypeError or ValueError unless a backend can read and write tensor as plain memory.

    device: the type of device that the tensor has to be on, or one device.
    """
    where = f"{me}, {call}"
    if not issubclass(type(tensor), torch.Tensor):  # a proxy says that it is an instance, too
        raise TypeError(f"{where}: needs a torch.Tensor, not {type(tensor).__name__}")
    if torch_private.is_fake(tensor):
        raise TypeError(
            f"{where}: a FakeTensor is a wrapper here, without data to move. Inside a function for "
            "torch.compile call communicator.compile.allreduce, or call from outside of it."
        )
    if _is_wrapper(tensor):
        raise TypeError(
            f"{where}: a {type(tensor).__name__} is a wrapper here and has no data of its own to "
            "move. Pass the tensor inside it; call from outside of torch.func's transforms."
        )
    if problem := _kind_problem(tensor, device) or _memory_problem(tensor):
        raise ValueError(f"{where}: {problem}")


def _kind_problem(tensor: torch.Tensor, device: str) -> str:
    """Why no backend moves tensors of this kind, or ""."""
    if tensor.is_nested:
        return (
            "a nested tensor is not one piece of memory that others could read. Pass its parts, "
            "one by one: tensor.unbind()"
        )
    if tensor.is_meta:
        return (
            "a tensor on meta has a shape and no data to move. Make a real one: "
            "torch.empty_like(tensor, device=comm.device)"
        )
    if device not in (tensor.device.type, str(tensor.device)):
        return (
            f"the tensor is on {tensor.device}, this communicator moves tensors on {device}. "
            f"Move it with .to({device!r}), or choose another backend."
        )
    if tensor.layout != torch.strided:
        return (
            f"a tensor of layout {tensor.layout} is not one plain piece of memory that others "
            "could read. Pass tensor.to_dense()"
        )
    if tensor.is_quantized:
        return (
            f"{tensor.dtype} means something only with its scale, which others do not have. Pass "
            "tensor.dequantize(), or tensor.int_repr() and the scale."
        )
    if dtype_info(tensor.dtype).number is None:
        return (
            f"{tensor.dtype} is not a dtype that communicators know. To reduce, convert the "
            "tensor; to move it, pass .view(torch.uint8)"
        )
    return ""


def _memory_problem(tensor: torch.Tensor) -> str:
    """Why this tensor's memory is not what it shows, or must not be written, or ""."""
    if tensor.is_neg() or tensor.is_conj():
        lazy = "conj" if tensor.is_conj() else "neg"
        return (
            "the tensor is a view whose numbers are changed only when they are read, so others "
            f"would get the wrong ones. Pass tensor.resolve_{lazy}()"
        )
    if not tensor.is_contiguous():
        return (
            f"a tensor of shape {tuple(tensor.shape)} that is not contiguous in memory would be "
            "changed in a copy, and the result lost. Pass tensor.contiguous()."
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        return (
            "autograd does not see what a communicator writes. Pass tensor.detach(), or call under "
            "torch.no_grad()."
        )
    if tensor.numel() and not tensor.data_ptr():
        return (
            "the tensor has no memory: it was freed, as resize_(0) of a storage does, or never "
            "allocated. Pass it while it has its data."
        )
    return ""


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """True for a tensor subclass with a dispatcher of its own, and inside vmap and grad."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return True
    return torch_private.is_transformed(tensor)


def check_like(
    me: str,
    call: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    like: torch.Tensor,
    subject: str = "out is",
    advice: str = "to hold the result. Make it with torch.empty, or leave it out.",
) -> None:
    """Raise ValueError unless a tensor has this shape and the dtype and device of like.

    subject, advice: the beginning and the end of the error's sentence.
    """
    actual = (tuple(tensor.shape), tensor.dtype, tensor.device)
    expected = (shape, like.dtype, like.device)
    if actual != expected:
        raise ValueError(f"{me}, {call}: {subject} {actual}, but must be {expected} {advice}")


def check_apart(me: str, call: str, tensor: torch.Tensor, out: torch.Tensor, rank: int) -> None:
    """Raise ValueError if out shares memory with tensor, unless the call is just in place."""
    in_place = {  # where out begins in a call that is in place, in bytes after the tensor
        "allreduce": 0,
        "allgather": -rank * tensor.nbytes,
        "reduce_scatter": rank * out.nbytes,
    }
    shift = out.data_ptr() - tensor.data_ptr()
    if shift == in_place.get(call) or shift >= tensor.nbytes or -shift >= out.nbytes:
        return
    raise ValueError(
        f"{me}, {call}: out shares memory with the tensor, so one would overwrite the other "
        "while it is read. Pass an out of its own."
    )


def check_settings(coor: Coordinator, timeout_s: float | None, checked_calls: int | None) -> None:
    """Raise ValueError for a deadline, or a number of compared calls, that cannot be one."""
    if timeout_s is not None:
        coor.checked_timeout(timeout_s)
    if checked_calls is not None and (type(checked_calls) is not int or checked_calls < 0):
        raise ValueError(
            f"{coor.rank_name()}: checked_calls={checked_calls!r} must be a number of calls: 0, to "
            "compare none, or more."
        )


def sample_on_meta(me: str, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on meta as empty(shape, dtype) is to be. Raises ValueError if it cannot be."""
    try:
        sample = torch.empty(shape, dtype=dtype, device="meta")
        if sample.is_quantized:
            raise TypeError("it needs a scale")
    except (TypeError, ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"{me}, empty: no tensor has the shape {shape!r} and dtype {dtype!r}: {why}. Pass "
            "sizes from 0 on, and a torch.dtype."
        ) from error
    return sample


def check_op(me: str, call: str, op: object, tensor: torch.Tensor) -> str:
    """The name of the op. Raises ValueError unless the reduction is defined for tensor's dtype."""
    try:
        name, dtype = op_name(op), tensor.dtype
    except ValueError as error:
        raise ValueError(f"{me}, {call}: {error}") from None
    if not dtype_info(dtype).is_reduced and (dtype.is_floating_point or not tensor.is_cuda):
        raise ValueError(
            f"{me}, {call}: {dtype} can be moved but not reduced. Convert it first, to "
            "torch.float32 or torch.int64, say."
        )
    if dtype.is_complex and name != "sum":
        raise ValueError(
            f"{me}, {call}: op={name!r} of complex numbers is not defined. Use op='sum', or reduce "
            "torch.view_as_real(tensor)."
        )
    if dtype == torch.bool and name in ("sum", "avg"):
        raise ValueError(
            f"{me}, {call}: op={name!r} of bool is not defined. Use 'max' for any, 'min' "
            "for all, or convert to an integer first."
        )
    if name == "avg" and not dtype.is_floating_point:
        raise ValueError(
            f"{me}, {call}: the average of {dtype} is no {dtype}. Use op='sum' and divide."
        )
    return name


def check_peer(me: str, call: str, peer: int, world_size: int, name: str) -> None:
    """Raise ValueError unless peer is a rank."""
    if type(peer) is not int or not 0 <= peer < world_size:
        raise ValueError(
            f"{me}, {call}: {name}={peer!r} is not a rank of this communicator of {world_size}"
        )


def check_other(me: str, call: str, peer: int, rank: int) -> None:
    """Raise ValueError if a rank would talk to itself: there is nobody else to answer."""
    if peer == rank:
        raise ValueError(f"{me}, {call}: the peer is this rank itself. Copy the tensor.")


def check_dim(me: str, call: str, tensor: torch.Tensor, dim: int | None) -> int:
    """The dim, 0 for None, as a number that is not negative. Raises ValueError for others."""
    dim = 0 if dim is None else dim
    if type(dim) is not int or not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{me}, {call}: dim={dim!r} is none of {tuple(tensor.shape)}")
    return dim % tensor.dim()


def check_sizes(comm: Ranks, call: str, sizes: Sequence[int], size: int) -> None:
    """Raise ValueError unless there is a size for each rank, and size is this rank's."""
    _check_counts(comm, call, sizes, "for this rank", lambda: sizes[comm.rank], size)


def check_shares(comm: Ranks, call: str, sizes: Sequence[int], size: int) -> None:
    """Raise ValueError unless there is a size for each rank, and size is their sum."""
    _check_counts(comm, call, sizes, "in sum", lambda: sum(sizes), size)


def _check_counts(
    comm: Ranks,
    call: str,
    sizes: Sequence[int],
    what: str,
    actual: Callable[[], int],
    expected: int,
) -> None:
    is_list = isinstance(sizes, Sequence)
    is_count = is_list and all(type(value) is int and value >= 0 for value in sizes)
    if not is_count or len(sizes) != comm.world_size or actual() != expected:
        raise ValueError(
            f"{comm.rank_name()}, {call}: sizes={sizes!r} must be {comm.world_size} counts, "
            f"one for each rank, and {expected} {what}."
        )
