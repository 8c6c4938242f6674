"""Rendezvous under MPI: a launch_id and the address of rank 0, which its environment lacks."""

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

from launcher import ports
from launcher.launch_info import LaunchInfoError
from launcher.system import host_addresses, linux

NAME_NBYTES = 256  # of a host name in messages; longer than any name DNS allows
UCRED = struct.Struct("iII")  # struct ucred, unix(7): pid, uid, gid
DISCARD_PORT = 9  # no packet is sent there
HINT = (
    "Set MASTER_ADDR (and, under MPICH, LAUNCH_ID, any new word) for all ranks, or give "
    "--master-addr to `python -m launcher run --launcher mpi`, or install mpi4py for this MPI."
)


def name_from_pmi(environ: Mapping[str, str]) -> str:
    """A launch_id from the process at the other end of Hydra's PMI_FD; "" if there is none.

    Nothing is sent: a rank that has spoken there without MPI_Init would end the others on its exit.
    """
    try:
        with socket.socket(fileno=os.dup(int(environ["PMI_FD"]))) as pmi:
            peer = pmi.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size)
            pid, _, _ = UCRED.unpack(peer)
    except (KeyError, ValueError, OverflowError, OSError):
        return ""
    stat = linux.process_stat(pid)
    return f"mpi-{socket.gethostname()}-{pid}-{stat.start_time}" if stat else ""


@functools.cache  # collective: a second call would wait for ranks that do not make it
def exchange(world_size: int, host: str, launch_id: str) -> tuple[str, str, int]:
    """The launch_id, drawn if it is empty, an address of rank 0 that other nodes reach, and its
    port: other kernels may keep other ports for themselves. Collective over MPI's world."""
    mpi = _mpi4py()
    if not mpi.Is_initialized():  # the program may have set mpi4py.rc.initialize = False
        mpi.Init()
    world = mpi.COMM_WORLD
    if world.Get_size() != world_size:
        raise LaunchInfoError(
            f"mpiexec started {world_size} ranks, but mpi4py sees {world.Get_size()}, as it has "
            f"loaded another MPI, {mpi.Get_library_version().splitlines()[0]!r}: the ranks cannot "
            f"use it. {HINT}"
        )
    hosts = bytearray(NAME_NBYTES * world_size)
    world.Allgather([_padded(host), mpi.BYTE], [hosts, mpi.BYTE])
    answer = bytearray(3 * NAME_NBYTES)
    if world.Get_rank() == 0:
        others = [_text(hosts, rank) for rank in range(1, world_size)]
        name = launch_id or f"mpi-{secrets.token_hex(8)}"
        facts = name, _address(host, others), str(ports.candidates(name)[0])
        answer[:] = b"".join(map(_padded, facts))
    world.Bcast([answer, mpi.BYTE], root=0)
    name, addr, port = (_text(answer, index) for index in range(3))
    if not addr:
        raise LaunchInfoError(
            f"rank {world.Get_rank()}: no address is known at which other nodes reach rank 0, on "
            f"{_text(hosts, 0)!r}, which has no route to any of their names. {HINT}"
        )
    return launch_id or name, addr, int(port)


def _mpi4py() -> Any:
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise LaunchInfoError(
            "mpiexec sets neither the name of the launch nor the address of rank 0, and mpi4py, "
            f"through which the ranks could exchange them, does not load ({error}). {HINT}"
        ) from error


def _padded(text: str) -> bytes:
    return text.encode()[:NAME_NBYTES].ljust(NAME_NBYTES, b"\0")


def _text(buffer: bytearray, index: int) -> str:
    return buffer[index * NAME_NBYTES : (index + 1) * NAME_NBYTES].rstrip(b"\0").decode()


def _address(host: str, others: list[str]) -> str:
    """The address at which the other nodes reach this one, host; "" if there is none."""
    for other in others:
        if other != host and (address := _local_address_for(other)):
            return address
    return ""


def _local_address_for(other: str) -> str:
    """The address from which the kernel would send to other; "" for a loopback or no route."""
    with contextlib.suppress(OSError):
        targets = socket.getaddrinfo(other, DISCARD_PORT, type=socket.SOCK_DGRAM)
        for *_, target in targets:
            address = host_addresses.local_address_for(target)
            if not address.startswith("127.") and address != "::1":
                return address
    return ""
