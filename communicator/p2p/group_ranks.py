"""The ranks of a process group, and the Coordinator that they make once they need one.

ranks = GroupRanks(coor, [3, 1], "pair", timeout_s=300.0)  # exchanges nothing
with Communicator(ranks.coordinator()) as comm:  # here they meet
    ...
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import SupportsIndex

from torch.distributed import PrefixStore, ProcessGroup, Store, get_process_group_ranks

from communicator.errors import CommunicatorError, CommunicatorTimeout, PeerLost
from coordinator import Coordinator, CoordinatorError, CoordinatorTimeout, torch_private

APART = "drumline"  # the prefix of our keys in the store of a process group


class GroupRanks:
    """Some ranks of a Coordinator, in this order; all of them, which have met, without places.

    name: of the group; no other group of these ranks has it. timeout_s: of the group's calls.
    keeps_whole: close() leaves the Coordinator of all ranks open, for later groups.
    """

    def __init__(
        self,
        whole: Coordinator,
        places: Sequence[int] | None = None,
        name: str = "",
        timeout_s: float | None = None,
        keeps_whole: bool = False,
    ) -> None:
        self._whole, self._name, self._keeps_whole = whole, name, keeps_whole
        self._places = tuple(range(whole.world_size) if places is None else places)
        self._coor = whole if places is None else None
        self._lock = threading.Lock()
        self._is_closed = False
        self.timeout_s = whole.timeout_s if timeout_s is None else timeout_s
        self.ranks = tuple(whole.ranks[place] for place in self._places)
        self.peers = tuple(whole.peers[place] for place in self._places)
        self.rank, self.world_size = self._places.index(whole.rank), len(self._places)
        self.check_more: Callable[[], None] = lambda: None  # raises what the caller noticed

    @property
    def number(self) -> int:
        """A number that no other group of the whole has."""
        text = f"{self._whole.info.launch_id}/{self._name}/{self._places}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def rank_name(self, rank: int | None = None) -> str:
        """A rank of the group in errors, or this one: as the whole numbers it."""
        return self._whole.rank_name(self._places[self.rank if rank is None else rank])

    def coordinator(self) -> Coordinator:
        """The Coordinator of these ranks alone. The first call is collective over them."""
        with self._lock:
            if self._coor is None:
                with _communicator_errors():
                    self._coor = self._whole.split(
                        self._places, timeout_s=self.timeout_s, name=self._name, check=self._check
                    )
                assert self._coor is not None, "this rank is one of them"
                self._coor.timeout_s = self.timeout_s
            return self._coor

    def set_timeout(self, timeout_s: float) -> None:
        """Give later calls of this rank another deadline."""
        self.timeout_s = timeout_s
        if self._coor is not None:
            self._coor.timeout_s = timeout_s

    def close(self) -> None:
        """End calls that wait for other ranks with an error."""
        self._is_closed = True
        if self._coor is not None and not (self._keeps_whole and self._coor is self._whole):
            self._coor.close()

    def _check(self) -> None:
        if self._is_closed:
            raise CommunicatorError(f"{self.rank_name()}: the group was destroyed.")
        self.check_more()


@contextmanager
def _communicator_errors() -> Iterator[None]:
    """Raise what a Coordinator raises as the error of a communicator that is being made."""
    try:
        yield
    except CoordinatorTimeout as error:
        raise CommunicatorTimeout(
            f"{error} If they do, give them a longer timeout in init_process_group(timeout=...)."
        ) from error
    except PeerLost:
        raise
    except CoordinatorError as error:
        raise CommunicatorError(str(error)) from error


def meet(
    store: Store, rank: int, world_size: int, timeout_s: float, numbers: Sequence[int] = ()
) -> Coordinator:
    """The Coordinator of ranks that share a store. Collective. numbers: torch's, for errors."""
    with _communicator_errors():
        return Coordinator.over(store, rank, world_size, ranks=numbers, timeout_s=timeout_s)


def coordinator_over(
    ranks: object, rank: int | None, world_size: int | None, timeout_s: float
) -> Coordinator:
    """The Coordinator of a process group, or of the ranks that share a store. Collective."""
    if isinstance(ranks, ProcessGroup):
        if rank is not None or world_size is not None:
            raise ValueError(
                f"Communicator.over(group, {rank!r}, {world_size!r}): the group knows its ranks. "
                "Pass rank and world_size with a Store alone, and the backend as backend=."
            )
        store = PrefixStore(APART, torch_private.store_of(ranks))
        numbers: list[int] = []
        with suppress(KeyError):  # of a group without init_process_group
            numbers = get_process_group_ranks(ranks)
        return meet(store, ranks.rank(), ranks.size(), timeout_s, numbers)
    if not isinstance(ranks, Store):
        kind = type(ranks).__name__
        raise TypeError(f"Communicator.over({kind}): needs a torch ProcessGroup or a torch Store")
    indices = [int(number) for number in (rank, world_size) if isinstance(number, SupportsIndex)]
    if len(indices) < 2 or not 0 <= indices[0] < indices[1]:
        raise ValueError(
            f"Communicator.over(store, rank={rank!r}, world_size={world_size!r}): pass the rank of "
            "this process, and the number of ranks that share the store, as numbers."
        )
    rank, world_size = indices
    return meet(ranks, rank, world_size, timeout_s)
