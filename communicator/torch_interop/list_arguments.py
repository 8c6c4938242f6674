"""Checks of what torch.distributed's calls are given, before anything moves.

check(list_collectives.gather, Place("rank 1", "gather", 1, 2), outs, tensor, 0)

What stays on a rank is compared as what travels is. A part has the shape and the dtype of the place
it goes to, as torch's own backends ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from communicator.calls.arguments import check_peer
from communicator.p2p.flat_tensors import expanded_dims
from communicator.torch_interop import list_collectives

Tensors = Sequence[torch.Tensor]
Item = TypeVar("Item")


class Place(NamedTuple):
    """A call on a rank. me: that rank in errors."""

    me: str
    call: str
    rank: int
    world_size: int

    def error(self, text: str) -> ValueError:
        return ValueError(f"{self.me}, {self.call}: {text}")


def check(move: Callable[..., None], place: Place, *arguments: Any) -> None:
    """Raise ValueError unless move can take these arguments, as far as this rank can tell."""
    if move in CHECKS:
        CHECKS[move](place, *arguments)


def only_item(place: Place, items: Sequence[Item]) -> Item:
    """The one tensor, or list of tensors, that a call gets for the one device of a rank."""
    if len(items) != 1:
        raise place.error(
            f"takes one tensor, for the one device of this rank, and got {len(items)}. Call it "
            "once for each; or the coalesced form, where there is one."
        )
    return items[0]


def equal_lengths(place: Place, **lists: Sequence[Any]) -> None:
    """Raise ValueError unless these lists are of one length, and not empty."""
    if len({*map(len, lists.values())}) > 1 or not all(map(len, lists.values())):
        counts = " and ".join(f"{name} of {len(items)}" for name, items in lists.items())
        raise place.error(f"got {counts}. Give one of each for every tensor, and at least one.")


def check_coalesced_lists(place: Place, outs: Tensors, tensors: Tensors) -> None:
    """Raise ValueError unless the lists are of one length, with the same shapes."""
    equal_lengths(place, inputs=tensors, outputs=outs)
    for index, (out, tensor) in enumerate(zip(outs, tensors, strict=True)):
        _check_shape(place, f"output {index}", out, tensor)


def check_outputs(place: Place, outs: Tensors) -> None:
    """Raise ValueError if all that is written along a dim of an output would be one number."""
    for index, out in enumerate(outs):
        if out.layout == torch.strided and expanded_dims(out):
            raise place.error(
                f"output {index} of {tuple(out.shape)} is expanded, with strides {out.stride()}: "
                "what is written there would be lost except one number. Pass its clone()."
            )


def check_root(place: Place, root: int, root_tensor: int = 0) -> None:
    check_peer(place.me, place.call, root, place.world_size, "root")
    if root_tensor != 0:
        raise place.error(f"rootTensor={root_tensor}: each rank has one tensor, of number 0.")


def _check_coalesced(place: Place, tensors: Tensors, op: Any) -> None:
    _check_same_kind(place, "tensor", tensors, tensors[0])


def _check_allgather(place: Place, outs: Tensors, tensor: torch.Tensor) -> None:
    _check_list(place, "outputs", outs, tensor)
    _check_shape(place, f"output {place.rank}", outs[place.rank], tensor)


def _check_reduce_scatter(place: Place, out: torch.Tensor, rows: Tensors, op: Any) -> None:
    _check_list(place, "inputs", rows, out)
    _check_shape(place, f"input {place.rank}", rows[place.rank], out)


def _check_gather(place: Place, outs: Tensors, tensor: torch.Tensor, dst: int) -> None:
    check_root(place, dst)
    _check_list_of_root(place, "outputs", outs, tensor, dst)


def _check_scatter(place: Place, out: torch.Tensor, rows: Tensors, src: int) -> None:
    check_root(place, src)
    _check_list_of_root(place, "inputs", rows, out, src)


def _check_list_of_root(
    place: Place, name: str, tensors: Tensors, like: torch.Tensor, root: int
) -> None:
    if place.rank == root:
        _check_list(place, name, tensors, like)
        for index, tensor in enumerate(tensors):
            _check_shape(place, f"{name[:-1]} {index}", tensor, like)
    elif tensors:
        raise place.error(f"only the root, rank {root} of the group, gives {name}. Give none here.")


def _check_allgather_flat(place: Place, out: torch.Tensor, tensor: torch.Tensor) -> None:
    _check_same_kind(place, "output", [out], tensor)
    _check_rows(place, "output", out, "input", tensor)


def _check_reduce_scatter_flat(
    place: Place, out: torch.Tensor, tensor: torch.Tensor, op: Any
) -> None:
    _check_same_kind(place, "input", [tensor], out)
    _check_rows(place, "input", tensor, "output", out)


def _check_rows(
    place: Place, name: str, whole: torch.Tensor, part_name: str, part: torch.Tensor
) -> None:
    """Raise unless whole is one part for each rank, stacked or one after the other."""
    stacked = (place.world_size, *part.shape)
    joined = (place.world_size * part.shape[0], *part.shape[1:]) if part.dim() else stacked
    if tuple(whole.shape) not in (stacked, joined):
        raise place.error(
            f"the {name} is {tuple(whole.shape)}, and must be {joined} or {stacked} for an "
            f"{part_name} of {tuple(part.shape)} on each of {place.world_size} ranks."
        )


def _check_alltoall(place: Place, outs: Tensors, tensors: Tensors) -> None:
    _check_list(place, "inputs", tensors, tensors[0] if tensors else None)
    _check_list(place, "outputs", outs, tensors[0])
    _check_shape(place, f"output {place.rank}", outs[place.rank], tensors[place.rank])


def _check_alltoall_flat(
    place: Place,
    out: torch.Tensor,
    tensor: torch.Tensor,
    out_sizes: Sequence[int],
    sizes: Sequence[int],
) -> None:
    _check_same_kind(place, "output", [out], tensor)
    _check_split(place, "output", out, out_sizes)
    _check_split(place, "input", tensor, sizes)
    own_out, own = (
        list_collectives.split_rows(whole, counts, place.world_size)[place.rank].numel()
        for whole, counts in ((out, out_sizes), (tensor, sizes))
    )
    if own_out != own:
        raise place.error(
            f"this rank's part for itself has {own} elements, and its place in the output "
            f"{own_out}. Make both the same."
        )


def _check_split(place: Place, name: str, whole: torch.Tensor, sizes: Sequence[int]) -> None:
    num_rows = whole.shape[0] if whole.dim() else None
    if num_rows is None or (not sizes and num_rows % place.world_size):
        raise place.error(
            f"the {name} is {tuple(whole.shape)}, which cannot be cut into {place.world_size} "
            "equal parts along its first dim. Pass the sizes of the parts."
        )
    is_split = len(sizes) == place.world_size and min(sizes) >= 0 and sum(sizes) == num_rows
    if sizes and not is_split:
        raise place.error(
            f"{name} sizes {list(sizes)} must be {place.world_size} counts, one for each rank, "
            f"and {num_rows} in sum."
        )


def _check_list(place: Place, name: str, tensors: Tensors, like: torch.Tensor | None) -> None:
    if len(tensors) != place.world_size or like is None:
        raise place.error(
            f"got {len(tensors)} {name}, and needs {place.world_size}, one for each rank."
        )
    _check_same_kind(place, name[:-1], tensors, like)


def _check_same_kind(place: Place, name: str, tensors: Tensors, like: torch.Tensor) -> None:
    expected = (like.dtype, like.device, like.layout)
    for index, tensor in enumerate(tensors):
        actual = (tensor.dtype, tensor.device, tensor.layout)
        if actual != expected:
            words, others = (", ".join(map(str, kind)) for kind in (actual, expected))
            raise place.error(
                f"{name} {index} is of {words}, and the others of {others}. Convert it first."
            )


def _check_shape(place: Place, name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    if tensor.shape != like.shape:
        raise place.error(
            f"{name} is {tuple(tensor.shape)}, and {tuple(like.shape)} belongs there. It would be "
            "filled with wrong numbers."
        )


CHECKS: dict[Callable[..., None], Callable[..., None]] = {
    list_collectives.allreduce_coalesced: _check_coalesced,
    list_collectives.allgather: _check_allgather,
    list_collectives.allgather_flat: _check_allgather_flat,
    list_collectives.reduce_scatter: _check_reduce_scatter,
    list_collectives.reduce_scatter_flat: _check_reduce_scatter_flat,
    list_collectives.gather: _check_gather,
    list_collectives.scatter: _check_scatter,
    list_collectives.alltoall: _check_alltoall,
    list_collectives.alltoall_flat: _check_alltoall_flat,
}
