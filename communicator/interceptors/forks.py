"""Communicators in a child that a rank forks: refused there, and never freed.

forks.track(comm)
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from communicator.errors import CommunicatorError

_live: weakref.WeakSet[Any] = weakref.WeakSet()
_inherited: list[Any] = []


def track(comm: Any) -> None:
    """Refuse the calls of this Communicator in children that are forked from now on."""
    _live.add(comm)


def _keep_inherited() -> None:
    """In a forked child, never free the parent's Communicators: their threads are not there."""
    _inherited.extend(_live)
    failed = []
    for comm in _inherited:
        try:
            comm._disown(
                CommunicatorError(
                    f"{comm.rank_name()}: process {os.getpid()} was forked from the rank and "
                    "cannot use its communicator: the peers would take it for the rank. Call from "
                    "the rank itself, or start the process as a rank of its own."
                )
            )
        except Exception as problem:  # of a vendor's backend: the others are still refused
            failed.append(problem)
    if failed:
        raise ExceptionGroup("a forked process could not give up communicators", failed)


os.register_at_fork(after_in_child=_keep_inherited)
