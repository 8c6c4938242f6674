"""A communicator of the ranks of an old one that are left, by ncclCommShrink."""

from __future__ import annotations

from typing import Any

from communicator.backends.plugin import PluginBackend
from communicator.errors import CommunicatorError


def options(backend: PluginBackend, old: Any) -> dict[str, Any]:
    """Options of the library for `backend`, whose ranks are those of `old` that are left.

    old: a Communicator. Collective. Raises CommunicatorError on every rank.
    """
    left = backend.coor.allgather_object(old.rank)
    excluded = sorted({*range(old.world_size)} - {*left})
    is_shrinkable = old.backend == backend.name and excluded and left == sorted(left)
    if not is_shrinkable or old._backend.is_usable():
        raise CommunicatorError(
            f"{backend._me}: shrink_of= takes a Communicator over {backend.name} that has lost "
            f"peers, on the ranks that are left, in its order; these are its ranks {left} of "
            f"{old.world_size}, over {old.backend}. Leave shrink_of= out."
        )
    return {"parent": old._backend._comm.handle(), "excluded": ":".join(map(str, excluded))}
