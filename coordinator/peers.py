"""Who the other ranks are, and which of them share a node."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher import LaunchInfo


@dataclass(frozen=True)
class Peer:
    """One rank as the others see it: enough to name it in an error and to find it on its host."""

    rank: int
    local_rank: int
    local_world_size: int
    host: str
    boot_id: str
    pid: int
    start_ticks: int

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, data: bytes | str) -> Peer:
        return cls(**json.loads(data))

    @classmethod
    def me(cls, info: LaunchInfo) -> Peer:
        pid = os.getpid()
        ticks = start_ticks(pid)
        host, boot = socket.gethostname(), boot_id()
        return cls(
            info.rank,
            info.local_rank,
            info.local_world_size,
            host,
            boot,
            pid,
            ticks if ticks else 0,
        )

    def is_seen_dead(self) -> bool:
        """Did the process run on this host, and no longer does? False where we cannot see."""
        return self.boot_id == boot_id() and start_ticks(self.pid) != (self.start_ticks or None)


def boot_id() -> str:
    """Differs between machines and between boots; the same in containers of one machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def start_ticks(pid: int) -> int | None:
    """When pid started (proc(5), field 22), None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def nodes(peers: Sequence[Peer]) -> list[list[int]]:
    """The ranks of each node, nodes in order of their first rank.

    A node is what the launcher counted as one: a set of ranks on one machine whose local_ranks are
    0 .. local_world_size-1, each once. Two such sets on one machine are two nodes.
    """
    found: list[dict[int, Peer]] = []
    for peer in sorted(peers, key=lambda peer: peer.rank):
        for node in found:
            first = next(iter(node.values()))
            if _same_node(first, peer) and peer.local_rank not in node:
                node[peer.local_rank] = peer
                break
        else:
            found.append({peer.local_rank: peer})
    return [[node[local].rank for local in sorted(node)] for node in found]


def _same_node(one: Peer, other: Peer) -> bool:
    keys = ("boot_id", "host", "local_world_size")
    return all(getattr(one, key) == getattr(other, key) for key in keys)
