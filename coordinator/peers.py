"""Peers: the other ranks with their processes and hosts, and the nodes that they share."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from launcher import LaunchInfo, linux


@dataclass(frozen=True)
class Peer:
    """One rank as the others see it: enough to name it in an error and to find it on its host.

    memory: equal for processes that can share memory: one kernel, one view of pids, one user.
    address: by which the others reach its host. is_traced: is what it does to be recorded?
    stack_fd: its descriptor of the memory for its stacks, if it has one. transport: of its calls,
    "gloo" or nothing.
    """

    rank: int
    local_rank: int
    local_world_size: int
    host: str
    boot_id: str
    pid: int
    start_ticks: int
    memory: str = ""
    address: str = ""
    is_traced: bool = False
    stack_fd: int = -1
    transport: str = ""

    @property
    def machine(self) -> str:
        """Equal for ranks that may be of one node; see group_by_node()."""
        return f"{self.boot_id}/{self.host}/{self.local_world_size}"

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    def pack(self) -> bytes:
        return json.dumps(list(vars(self).values())).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Peer:
        return cls(*json.loads(data))

    @classmethod
    def me(
        cls, info: LaunchInfo, address: str = "", stack_fd: int = -1, transport: str = ""
    ) -> Peer:
        pid, user_namespace = os.getpid(), linux.read_proc_link("self/ns/user")
        return cls(
            info.rank,
            info.local_rank,
            info.local_world_size,
            socket.gethostname(),
            boot_id(),
            pid,
            start_ticks(pid) or 0,
            f"{boot_id()}/{_visible_pids()}/{user_namespace}/{os.getuid()}",
            address,
            info.is_traced,
            stack_fd,
            transport,
        )

    @classmethod
    def unseen(cls, rank: int) -> Peer:
        """A rank that has not joined: only its number is known."""
        return cls(rank, 0, 0, "", "", 0, 0)

    @property
    def is_visible(self) -> bool:
        """True if this process sees the other's in /proc."""
        return self.boot_id == boot_id() and (
            not self.memory or self.memory.split("/")[1] == _visible_pids()
        )

    def is_known_dead(self) -> bool:
        """True if the process ran on this host, and no longer does; False if it cannot be seen."""
        if not self.is_visible:
            return False
        ticks = start_ticks(self.pid)
        if ticks is None and self.start_ticks and linux.process_stat(self.pid) is None:
            return not linux.exists(self.pid)  # this process may have no descriptor to read it
        return ticks != (self.start_ticks or None)


def _visible_pids() -> str:
    """The pid namespace of this process; its own alone where /proc shows that of others."""
    namespace, pid = linux.read_proc_link("self/ns/pid"), str(os.getpid())
    return namespace if linux.read_proc_link("self") == pid else f"{namespace}:{pid}"


def boot_id() -> str:
    """An id of this machine since its boot; its name where the kernel tells none."""
    return linux.boot_id() or socket.gethostname()


def start_ticks(pid: int) -> int | None:
    """The start time of pid; None if it has ended."""
    stat = linux.process_stat(pid)
    return stat.start_time if stat is not None and stat.is_alive else None


def group_by_node(peers: Sequence[Peer]) -> list[list[int]]:
    """The ranks of each node, nodes in order of their first rank.

    A node is what the launcher counted as one: a set of ranks on one machine whose local_ranks are
    0 .. local_world_size-1, each once. Two such sets on one machine are two nodes.
    """
    nodes: list[dict[int, Peer]] = []
    open_nodes: dict[str, list[dict[int, Peer]]] = {}
    for peer in sorted(peers, key=lambda peer: peer.rank):
        same_host = open_nodes.setdefault(peer.machine, [])
        node = next((node for node in same_host if peer.local_rank not in node), None)
        if node is None:
            node = {}
            same_host.append(node)
            nodes.append(node)
        node[peer.local_rank] = peer
    return [[node[local].rank for local in sorted(node)] for node in nodes]
