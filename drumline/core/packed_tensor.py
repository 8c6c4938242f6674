"""Weights that are kept in the few bits of their checkpoint, and unpacked when an operation reads.

weight = PackedTensor.of({"0": blocks}, unpack, (4096, 4096), torch.bfloat16)
functional.linear(hidden, weight)       # a plain weight exists for as long as this call takes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from coordinator import torch_private
from drumline.core.cpu.products import linear
from drumline.core.shards import Region
from drumline.errors import RefusedUse

Parts = Mapping[str, torch.Tensor]


class Unpack(Protocol):
    @property
    def is_native(self) -> bool:
        """True if loops in C++ do it on the CPU, and multiply() finds a way."""

    def __call__(self, parts: Parts, region: Region) -> torch.Tensor:
        """Make a box of the weight from the parts, on their device."""

    def multiply(
        self, parts: Parts, inputs: torch.Tensor, entry: int | None
    ) -> torch.Tensor | None:
        """inputs @ weight.T without making the weight, or with one entry of a stack.

        inputs: [n, columns] float32 on the CPU, n at most MOST_INPUTS. None if it cannot be done.
        """


@dataclass(frozen=True)
class UnpackEntry:
    """One entry of a stack."""

    unpack: Unpack
    number: int

    @property
    def is_native(self) -> bool:
        return self.unpack.is_native

    def __call__(self, parts: Parts, region: Region) -> torch.Tensor:
        return self.unpack(parts, Region((self.number, *region.start), (1, *region.size)))[0]

    def multiply(
        self, parts: Parts, inputs: torch.Tensor, entry: int | None
    ) -> torch.Tensor | None:
        return self.unpack.multiply(parts, inputs, self.number)


MOST_INPUTS = 8
"""With more of them a weight is made once for all: torch's product of matrices is faster then."""

PART_MARK = ":"
"""Between the name of a weight and that of one of its parts; no name of a module's has it."""

CPU = torch.device("cpu")
DESCRIPTIONS = "device dtype grad grad_fn is_leaf is_meta layout ndim requires_grad shape"
QUESTIONS = "__hash__ dim element_size is_complex is_contiguous is_floating_point numel size stride"
PLAIN_FUNCTIONS = {
    *(getattr(torch.Tensor, name).__get__ for name in DESCRIPTIONS.split()),
    *(getattr(torch.Tensor, name) for name in [*QUESTIONS.split(), "requires_grad_"]),
}
"""What a tensor answers without its values."""


class PackedTensor(torch.Tensor):
    """A weight of a shape and dtype, whose memory is that of its parts. It cannot be written to.

    An operation gets it unpacked, in memory of its own that is free again afterwards; where rows
    are looked up, or one matrix of a stack is taken, only these are.
    """

    parts: dict[str, torch.Tensor]
    unpack: Unpack

    @classmethod
    def of(
        cls, parts: Parts, unpack: Unpack, shape: Sequence[int], dtype: torch.dtype
    ) -> PackedTensor:
        device = next(iter(parts.values())).device
        packed: PackedTensor = torch_private.make_wrapper(
            cls, torch.Size(shape), dtype=dtype, device=device
        )
        packed.parts, packed.unpack = dict(parts), unpack
        return packed

    def with_parts(self, parts: Parts) -> PackedTensor:
        """This weight, with its parts elsewhere."""
        return PackedTensor.of(parts, self.unpack, self.shape, self.dtype)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes that are kept."""
        return sum(part.nbytes for part in self.parts.values())

    def box(self, region: Region) -> torch.Tensor:
        """A box of the weight, as a plain tensor."""
        with torch.no_grad():
            return self.unpack(self.parts, region).to(self.dtype)

    def whole(self) -> torch.Tensor:
        return self.box(Region((0,) * self.dim(), tuple(self.shape)))

    def rows(self, start: int, count: int) -> torch.Tensor:
        """Some entries of the first dimension, one behind the other."""
        at = (start, *(0 for _ in self.shape[1:]))
        return self.box(Region(at, (count, *self.shape[1:])))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in PLAIN_FUNCTIONS:
            with torch_private.plain_functions():
                return func(*args, **kwargs)
        if own := OWN_FUNCTIONS.get(func):
            return own(*args, **kwargs)
        _refuse_to_write(func, args, kwargs)
        return func(*_unpacked(args), **_unpacked(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*_unpacked(args), **_unpacked(kwargs or {}))


def _unpacked(value: Any) -> Any:
    """A copy of arguments, with plain tensors for packed ones."""
    if isinstance(value, PackedTensor):
        return value.whole()
    if type(value) in (tuple, list):
        return type(value)(map(_unpacked, value))
    if type(value) is dict:
        return {key: _unpacked(item) for key, item in value.items()}
    return value


def _refuse_to_write(func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> None:
    name = getattr(func, "__name__", "")
    writes = name in ("__setitem__", "__set__") or (name[-1:] == "_" and name[-2:] != "__")
    written = [kwargs.get("out")]
    if writes or kwargs.get("inplace"):  # nn.init gives a `tensor` by name; _foreach_ takes lists
        written += args[:1] or (kwargs.get("tensor"), kwargs.get("input"))
    if any(isinstance(leaf, PackedTensor) for leaf in torch_private.tree_leaves(written)):
        raise RefusedUse(
            f"{name} writes into a weight that is kept in the blocks of its checkpoint, which hold "
            "no other values; load the model with dequantize=True."
        )


def _to(packed: PackedTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """On another device it is packed, too."""
    device, dtype = torch_private.parse_to(*args, **kwargs)
    if dtype not in (None, packed.dtype):
        return packed.whole().to(*args, **kwargs)
    if device in (None, packed.device):
        return packed
    return packed.with_parts({name: part.to(device) for name, part in packed.parts.items()})


def _take(packed: PackedTensor, key: Any) -> torch.Tensor:
    """One matrix of a stack, as experts are taken; or whatever else is asked for."""
    is_number = isinstance(key, int) or (isinstance(key, torch.Tensor) and key.dim() == 0)
    if not is_number or isinstance(key, bool):
        return packed.whole()[key]
    number = range(len(packed))[int(key)]
    if packed.dim() != 3:
        return packed.rows(number, 1)[0]
    unpack, shape = UnpackEntry(packed.unpack, number), packed.shape[1:]
    return PackedTensor.of(packed.parts, unpack, shape, packed.dtype)


def _linear(input: Any, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A few inputs are multiplied with the packed values, where there is a way to do so.

    The product differs from that with the plain weight by the order of its sums alone.
    """
    product = None
    if isinstance(weight, PackedTensor) and _is_multiplied(input, weight):
        inputs = input.reshape(-1, input.shape[-1]).float().contiguous()
        product = weight.unpack.multiply(weight.parts, inputs, None)
    if product is None:
        return linear(*_unpacked((input, weight, bias)))  # as the plain weight's layer does
    if bias is not None:
        product += bias
    return product.to(input.dtype).view(*input.shape[:-1], -1)


def _is_multiplied(hidden: Any, packed: PackedTensor) -> bool:
    is_plain = type(hidden) is torch.Tensor and hidden.device == packed.device == CPU
    return (
        is_plain
        and not (hidden.requires_grad and torch.is_grad_enabled())
        and not torch.is_autocast_enabled("cpu")
        and (hidden.dtype, hidden.shape[-1:]) == (packed.dtype, packed.shape[1:])
        and 0 < hidden.numel() <= MOST_INPUTS * packed.shape[1]
    )


def _embed(
    ids: torch.Tensor, packed: Any, padding_idx: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """The rows of these ids alone; padding and the rest only matter to gradients and norms."""
    is_plain = not ids.numel() or isinstance(ids, PackedTensor)
    if is_plain or kwargs.get("max_norm") or any(args[:1]):
        return functional.embedding(*_unpacked((ids, packed, padding_idx, *args)), **kwargs)
    unique, places = torch.unique(ids, return_inverse=True)
    numbers = unique.tolist()
    if numbers[0] < 0 or numbers[-1] >= len(packed):
        raise IndexError(f"the ids {numbers[0]} to {numbers[-1]} are not in 0 to {len(packed) - 1}")
    table = torch.cat([packed.rows(*run) for run in _runs(numbers)])
    return functional.embedding(places, table)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The start and length of each stretch of ascending numbers without a gap."""
    start = 0
    for at, number in enumerate(numbers):
        if at + 1 == len(numbers) or numbers[at + 1] != number + 1:
            yield numbers[start], at + 1 - start
            start = at + 1


OWN_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.detach: lambda packed: packed.with_parts(packed.parts),
    torch.Tensor.data.__get__: torch.Tensor.detach,  # type: ignore[attr-defined]
    torch.Tensor.to: _to,
    torch.Tensor.__getitem__: _take,
    torch.Tensor.__len__: lambda packed: packed.shape[0],
    functional.embedding: _embed,
    functional.linear: _linear,
}
"""What is done without unpacking the whole weight."""


def is_unpacked_by_torch(weight: torch.Tensor) -> bool:
    return isinstance(weight, PackedTensor) and not weight.unpack.is_native


def named_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that have memory, by name: the tensor itself, or what a packed one is kept in."""
    if isinstance(tensor, PackedTensor):
        yield from ((f"{name}{PART_MARK}{key}", part) for key, part in tensor.parts.items())
    else:
        yield name, tensor


def joined(
    tensors: Mapping[str, torch.Tensor], like: Callable[[str], torch.Tensor]
) -> dict[str, Any]:
    """Tensors by name, with a packed one in place of its parts. like: the present one of a name."""
    result: dict[str, Any] = {}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        weight, mark, key = name.partition(PART_MARK)
        if mark:
            parts.setdefault(weight, {})[key] = tensor
        else:
            result[name] = tensor
    for name, own in parts.items():
        packed: Any = like(name)  # which may be of another class, as what is read-only
        result[name] = nn.Parameter(PackedTensor.with_parts(packed, own), requires_grad=False)
    return result
