"""The communicators of a process group: one for each kind of device, opened when it is first used.

comms = LazyCommunicators(ranks, ("cpu", "cuda"), chosen={"cpu": Shm, "cuda": None})
comms.of("cpu").allreduce(tensor)
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from communicator.backend import Backend
from communicator.communicator import Communicator
from communicator.errors import CommunicatorError, Unsupported
from communicator.p2p.group_ranks import GroupRanks
from communicator.selection import choose_for_devices
from coordinator import Coordinator

Chosen = dict[str, type[Backend] | None]


class LazyCommunicators:
    """chosen: the class for each kind of device, if all ranks know it already."""

    def __init__(
        self, ranks: GroupRanks, device_types: Sequence[str], chosen: Chosen | None = None
    ) -> None:
        self._ranks, self._device_types, self._chosen = ranks, device_types, chosen
        self._lock = threading.Lock()
        self._opened: dict[str, Communicator | None] = {}
        self._is_closed = False

    @property
    def chosen(self) -> Chosen:
        """The best class for each kind of device, or None. The first call is collective."""
        if self._chosen is None:
            self._chosen = choose_for_devices(self._ranks.coordinator(), self._device_types)
        return self._chosen

    def of(self, device_type: str) -> Communicator:
        """The communicator for tensors there. The first call is collective."""
        comm = self._opened.get(device_type) or self._open(device_type)
        if comm is None:
            self.refuse(device_type)
        return comm

    def if_opened(self, device_type: str) -> Communicator | None:
        return self._opened.get(device_type)

    def check(self, device_type: str) -> None:
        """Raise Unsupported for a kind of device that is known to have none."""
        chosen = self._chosen
        if device_type not in self._device_types or (chosen and chosen[device_type] is None):
            self.refuse(device_type)

    def refuse(self, device_type: str) -> NoReturn:
        raise Unsupported(
            f"{self._ranks.rank_name()}: no backend moves tensors on {device_type!r} among these "
            f"{self._ranks.world_size} ranks. Move the tensor to the CPU, or install a backend."
        )

    def _open(self, device_type: str) -> Communicator | None:
        with self._lock:
            if self._is_closed:
                me = self._ranks.rank_name()
                raise CommunicatorError(f"{me}: the group was destroyed.")
            if device_type not in self._opened:
                kind = self.chosen.get(device_type)
                self._opened[device_type] = _open_if_any(kind, self._ranks.coordinator())
            return self._opened[device_type]

    def set_timeout(self, timeout_s: float) -> None:
        """Of those that are open, and those that will be."""
        with self._lock:
            self._ranks.set_timeout(timeout_s)
            for comm in self._opened.values():
                if comm is not None:
                    comm.set_timeout(timeout_s)

    def abort(self) -> None:
        """Make calls that wait raise, where the backend has a way to."""
        for comm in list(self._opened.values()):
            if comm is not None:
                with suppress(Unsupported):
                    comm.abort()

    def close(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._ranks.close()  # ends an _open that waits for other ranks
            self._lock.acquire()
        try:
            self._is_closed = True
            for comm in self._opened.values():
                if comm is not None:
                    comm.close()
        finally:
            self._lock.release()
        self._ranks.close()


def _open_if_any(kind: type[Backend] | None, coor: Coordinator) -> Communicator | None:
    """None too if the ranks cannot open it, which all of them learn."""
    try:
        return None if kind is None else Communicator._of(kind, coor)
    except Unsupported:
        return None
