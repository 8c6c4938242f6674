"""The operations of rank 0's server, and what the arguments of each must be."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

# What asking for nonsense raises
BAD_REQUEST = (ValueError, TypeError, KeyError, AttributeError, OverflowError)


class Op(StrEnum):
    """An operation of the server, equal to its name in a request."""

    __hash__ = str.__hash__
    __str__ = str.__str__

    SET = "set"
    GET = "get"
    WAIT = "wait"
    ADD = "add"
    SWAP = "swap"
    DELETE = "delete"
    COUNT = "count"
    RENDEZVOUS = "rendezvous"
    NUMBER = "number"
    ARRIVED = "arrived"
    HEARTBEAT = "heartbeat"
    REPORT = "report"
    REPORTS = "reports"
    UNWELL = "unwell"
    PROCESSES = "processes"
    LOOK = "look"
    SHOW = "show"
    LEAVE = "leave"


LOCAL_OPS = frozenset(Op) - {Op.WAIT, Op.RENDEZVOUS, Op.NUMBER, Op.LEAVE}  # answered at once

CALL_STATUS = (str, int, str, float)
CALLS = {str: CALL_STATUS}  # by group
# A tuple is a list of these; [kind] a list and {key: kind} a dictionary of any length.
ARGUMENTS: dict[str, Any] = {
    Op.SET: (str, bytes),
    Op.GET: (str,),
    Op.WAIT: ([str],),
    Op.ADD: (str, int),
    Op.SWAP: (str, bytes, bytes),
    Op.DELETE: (str,),
    Op.COUNT: (str,),
    Op.RENDEZVOUS: (str, int, int, bytes, str),
    Op.NUMBER: (str, int, int, bytes),
    Op.ARRIVED: (str,),
    Op.HEARTBEAT: (int, [str], {int: (float, bool, dict)}),  # dict: CALLS, if somebody asks
    Op.REPORT: (str, bytes),
    Op.REPORTS: ([int],),
    Op.UNWELL: (str, str, int),
    Op.PROCESSES: ([int],),
    Op.LOOK: (float,),
    Op.SHOW: ({int: bytes},),
}


def check_arguments(op: str, arguments: Sequence[Any]) -> None:
    """Raise one of BAD_REQUEST if they are not what the operation takes."""
    if not matches(arguments, ARGUMENTS[op]):
        raise TypeError(f"its arguments must be {ARGUMENTS[op]}")


def matches(value: Any, kind: Any) -> bool:
    """True if the value is of a kind, as in ARGUMENTS."""
    if isinstance(kind, tuple):
        is_list = isinstance(value, list | tuple) and len(value) == len(kind)
        return is_list and all(map(matches, value, kind))
    if isinstance(kind, list):
        return isinstance(value, list) and all(matches(element, kind[0]) for element in value)
    if isinstance(kind, dict):
        (pair,) = kind.items()
        return isinstance(value, dict) and all(matches(list(item), pair) for item in value.items())
    return isinstance(value, kind)
