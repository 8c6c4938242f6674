"""NCCL's RAS: what its threads in all processes of a launch know of a hang, asked over a socket."""

from __future__ import annotations

import socket

from communicator import timings

MAX_NBYTES = 8192  # of an answer: its first lines sum it up


def ras_status(address: str) -> str:
    """RAS's answer to "verbose status", or why there is none. Blocks for ras_s at most a read.

    address: as in NCCL_RAS_ADDR, "localhost:28028".
    """
    host, _, port = address.rpartition(":")
    answer = b""
    try:
        peer = (host.strip("[]"), int(port))
        with socket.create_connection(peer, timeout=timings.TIMINGS.ras_s) as connection:
            connection.sendall(b"verbose status\n")
            while len(answer) < MAX_NBYTES and (part := connection.recv(MAX_NBYTES)):
                answer += part
    except (OSError, ValueError) as error:
        if not answer:
            return f"NCCL's RAS at {address} did not answer: {error}"
    return f"NCCL's RAS at {address} says:\n{answer[:MAX_NBYTES].decode(errors='replace')}"
