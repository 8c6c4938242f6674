"""The operations of rank 0's server, and what the arguments of each must be."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

# What asking for nonsense raises
BAD_REQUEST = (ValueError, TypeError, KeyError, AttributeError, OverflowError)


CALL_STATUS = (str, int, str, float)
CALLS = {str: CALL_STATUS}  # by group


class Op(StrEnum):
    """An operation of the server, equal to its name in a request.

    arguments: what they must be. A tuple is a list of these; [kind] a list and {key: kind} a
    dictionary of any length.
    """

    arguments: tuple[Any, ...]

    def __new__(cls, name: str, *arguments: Any) -> Op:
        op = str.__new__(cls, name)
        op._value_, op.arguments = name, arguments
        return op

    __hash__ = str.__hash__
    __str__ = str.__str__

    SET = "set", str, bytes
    GET = "get", str
    WAIT = "wait", [str]
    ADD = "add", str, int
    SWAP = "swap", str, bytes, bytes
    DELETE = "delete", str
    COUNT = "count", str
    RENDEZVOUS = "rendezvous", str, int, int, bytes, str
    NUMBER = "number", str, int, int, bytes
    ARRIVED = "arrived", str
    HEARTBEAT = "heartbeat", int, [str], {int: (float, bool, dict)}  # CALLS, if somebody asks
    REPORT = "report", str, bytes
    REPORTS = "reports", [int]
    UNWELL = "unwell", str, str, int
    LOOK = "look", float
    SHOW = "show", {int: bytes}
    LEAVE = ("leave",)


LOCAL_OPS = frozenset(Op) - {Op.WAIT, Op.RENDEZVOUS, Op.NUMBER, Op.LEAVE}  # answered at once


def check_arguments(op: str, arguments: Sequence[Any]) -> None:
    """Raise one of BAD_REQUEST if they are not what the operation takes."""
    kinds = Op(op).arguments
    if not matches(arguments, kinds):
        raise TypeError(f"its arguments must be {kinds}")


def matches(value: Any, kind: Any) -> bool:
    """True if the value is of a kind, as in the arguments of an Op."""
    if isinstance(kind, tuple):
        is_list = isinstance(value, list | tuple) and len(value) == len(kind)
        return is_list and all(map(matches, value, kind))
    if isinstance(kind, list):
        return isinstance(value, list) and all(matches(element, kind[0]) for element in value)
    if isinstance(kind, dict):
        (pair,) = kind.items()
        return isinstance(value, dict) and all(matches(list(item), pair) for item in value.items())
    return isinstance(value, kind)
