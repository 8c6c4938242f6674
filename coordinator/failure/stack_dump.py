"""Stack dumps: ranks of this node write their Python stacks to their standard error."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from coordinator.peers import Peer

SIGNAL = signal.SIGUSR1
STDERR = 2


def listen() -> None:
    """From now on SIGUSR1 shows this process's stacks, unless the program has a use for it."""
    if signal.getsignal(SIGNAL) is signal.SIG_DFL and not _catches(os.getpid()):
        faulthandler.register(SIGNAL, file=STDERR)


def ask(peers: Iterable[Peer]) -> list[Peer]:
    """Have processes of this host show their stacks; those that will."""
    by_pid = {}
    for peer in peers:
        if peer.is_visible and not peer.is_known_dead() and _catches(peer.pid):
            by_pid[peer.pid] = peer
    for pid in by_pid:
        os.kill(pid, SIGNAL)
    return list(by_pid.values())


def _catches(pid: int) -> bool:
    """Has the process a handler (proc(5), SigCgt)? Without one the signal would end it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)
