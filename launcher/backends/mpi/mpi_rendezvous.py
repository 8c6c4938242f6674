"""What MPI's environment does not say: a name for the launch, and where rank 0 is."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import secrets
import socket
import struct
from collections.abc import Mapping
from typing import Any

from launcher.launch_info import LaunchInfoError
from launcher.system import linux

NAME_NBYTES = 256  # of a host, as its ranks tell each other; longer than any name DNS allows
PEER = struct.Struct("iII")  # struct ucred, unix(7): pid, uid, gid
DISCARD_PORT = 9  # nothing is sent there
WAY_OUT = (
    "Set MASTER_ADDR (and, under MPICH, LAUNCH_ID, any new word) for all ranks, or give "
    "--master-addr to `python -m launcher run --launcher mpi`, or install mpi4py for this MPI."
)


def starter(environ: Mapping[str, str]) -> str:
    """The process that started this node's ranks, at the other end of Hydra's PMI_FD; "" if unseen.

    Only looks: a rank that spoke there without MPI_Init would take the others along when it exits.
    """
    try:
        with socket.socket(fileno=os.dup(int(environ["PMI_FD"]))) as pmi:
            pid, _, _ = PEER.unpack(
                pmi.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
            )
    except (KeyError, ValueError, OSError):
        return ""
    started = linux.start_time(pid)
    return f"mpi-{socket.gethostname()}-{pid}-{started}" if started else ""


@functools.cache  # an MPI process has one world for life: to ask again would be to wait alone
def agree(world_size: int, host: str) -> tuple[str, str]:
    """A launch_id, and an address of rank 0 that other nodes reach. Collective over MPI's world."""
    mpi = _mpi4py()
    if not mpi.Is_initialized():  # the program may have told mpi4py to leave that to it
        mpi.Init()
    world = mpi.COMM_WORLD
    if world.Get_size() != world_size:
        raise LaunchInfoError(
            f"mpiexec started {world_size} ranks, but mpi4py sees {world.Get_size()}, as it has "
            f"loaded another MPI, {mpi.Get_library_version().splitlines()[0]!r}: the ranks cannot "
            f"agree through it. {WAY_OUT}"
        )
    hosts = bytearray(NAME_NBYTES * world_size)
    world.Allgather([_padded(host), mpi.BYTE], [hosts, mpi.BYTE])
    answer = bytearray(2 * NAME_NBYTES)
    if world.Get_rank() == 0:
        others = [_text(hosts, rank) for rank in range(1, world_size)]
        answer[:] = _padded(f"mpi-{secrets.token_hex(8)}") + _padded(_address(host, others))
    world.Bcast([answer, mpi.BYTE], root=0)
    launch_id, addr = _text(answer, 0), _text(answer, 1)
    if not addr:
        raise LaunchInfoError(
            f"rank {world.Get_rank()}: no address is known by which other nodes reach rank 0, on "
            f"{_text(hosts, 0)!r}: it has no route to any of their names. {WAY_OUT}"
        )
    return launch_id, addr


def _mpi4py() -> Any:
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise LaunchInfoError(
            "mpiexec does not say what the launch is called or where rank 0 is, and mpi4py, "
            f"through which the ranks could agree, does not load ({error}). {WAY_OUT}"
        ) from error


def _padded(text: str) -> bytes:
    return text.encode()[:NAME_NBYTES].ljust(NAME_NBYTES, b"\0")


def _text(buffer: bytearray, index: int) -> str:
    return buffer[index * NAME_NBYTES : (index + 1) * NAME_NBYTES].rstrip(b"\0").decode()


def _address(host: str, others: list[str]) -> str:
    """The address by which another node of others sees this one, host; "" if none does."""
    for other in others:
        if other != host and (address := _towards(other)):
            return address
    return ""


def _towards(other: str) -> str:
    """The address from which the kernel would send to other; "" for a loopback or no route."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(
            other, DISCARD_PORT, type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                address = str(probe.getsockname()[0])
            if not address.startswith("127.") and address != "::1":
                return address
    return ""
