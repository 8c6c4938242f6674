"""Integers of a few bits, packed into words, and the groups of columns that share a scale.

integers = integers_of(reader, stored, 4, dim=1, spans=[(0, 64), (0, 64)])
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drumline.checkpoint.safetensors_index import StoredTensor, TensorReader
from drumline.core.shards import Region
from drumline.errors import CheckpointError

INT32_BITS = 32


def groups_of_columns(
    reader: TensorReader,
    stored: StoredTensor | None,
    span: tuple[int, int],
    group_size: int,
    num_groups: int,
) -> torch.Tensor:
    """The group of each column of a span, which is its start and size."""
    if stored is None:
        return torch.arange(span[0], sum(span)) // group_size
    groups = reader.box(stored, Region(span[:1], span[1:])).long()
    for group in groups[(groups < 0) | (groups >= num_groups)].tolist():
        raise CheckpointError(
            f"{stored.file}: a column of a quantized weight is in group {group} of {num_groups}, "
            "so nothing says what it is; copy it again."
        )
    return groups


def integers_of(
    reader: TensorReader,
    stored: StoredTensor,
    num_bits: int,
    dim: int,
    spans: Sequence[tuple[int, int]],
    order: Sequence[int] = (),
    shift: int = 0,
) -> torch.Tensor:
    """Integers without sign, of a box of a tensor that is packed into words along `dim`.

    spans: start and size of the box, by dimension. order: the place of each integer in its word.
    shift: what is added to each word.
    """
    per_word = INT32_BITS // num_bits
    start, size = spans[dim]
    first, end = start // per_word, -(-(start + size) // per_word)
    starts, sizes = zip(*spans[:dim], (first, end - first), *spans[dim + 1 :], strict=True)
    words = reader.box(stored, Region(starts, sizes)).movedim(dim, -1).unsqueeze(-1)
    shifts = torch.tensor(order or range(per_word), dtype=torch.int32) * num_bits
    words = words + shift if shift else words
    integers = words >> shifts & (1 << num_bits) - 1
    skipped = start - first * per_word
    return integers.flatten(-2)[..., skipped : skipped + size].movedim(-1, dim)
