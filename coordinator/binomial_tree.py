"""The shape of the tree of nodes: binomial, so that a logarithm of steps reaches all of them."""

from __future__ import annotations


def parent_of(index: int) -> int:
    """The parent node: without the lowest bit."""
    return index & (index - 1)


def children_of(index: int, size: int) -> list[int]:
    children, bit = [], 1
    while index | bit < size and not index & bit:
        children.append(index | bit)
        bit <<= 1
    return children


def subtree_of(index: int, size: int) -> range:
    """The node and all below it: numbers that share its leading bits."""
    span = index & -index or size
    return range(index, min(index + span, size))
