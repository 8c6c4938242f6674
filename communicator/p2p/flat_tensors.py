"""Tensors of any strides as one piece of memory, which backends move.

with flattened(tensor) as whole:
    comm.recv(whole, 1)     # which the tensor has afterwards
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch


def flat_numel(tensor: torch.Tensor) -> int:
    """The number of elements that as_flat_input gives."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def as_flat_input(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in one piece of memory: without autograd, what is lazy done, complex as pairs."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(plain) if plain.is_complex() else plain).contiguous()


def write_back(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Write into the tensor what as_flat_input would give."""
    target = tensor.detach()
    if target.is_complex():
        whole = torch.view_as_complex(whole.view(*target.shape, 2))
    whole = whole.view(target.shape)
    for dim in expanded_dims(target):  # one number is there for all of them
        target, whole = target.narrow(dim, 0, 1), whole.narrow(dim, 0, 1)
    target.copy_(whole)


def expanded_dims(tensor: torch.Tensor) -> list[int]:
    """The dims along which all numbers of a tensor are the same memory."""
    sizes = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    return [dim for dim, (size, stride) in sizes if size > 1 and stride == 0]


@contextmanager
def flattened_all(messages: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
    """Tensors to "send" or "recv", each flat in one piece; what is received ends up in them."""
    with ExitStack() as stack:
        yield [stack.enter_context(flattened(tensor, kind == "recv")) for kind, tensor in messages]


@contextmanager
def flattened(tensor: torch.Tensor, is_written: bool = True) -> Iterator[torch.Tensor]:
    """The tensor, flat in one piece; what is written there ends up in the tensor.

    Not is_written: the tensor is left alone. It may be read-only, or kept by autograd.
    """
    whole = as_flat_input(tensor)
    yield whole.view(-1)
    if is_written and whole.data_ptr() != tensor.data_ptr():
        write_back(tensor, whole)
