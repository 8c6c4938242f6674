"""NCCL's RAS: what its threads in all processes of a launch know of a hang, asked over a socket."""

from __future__ import annotations

import socket
import time

from communicator import timings

MAX_NBYTES = 8192  # of an answer: its first lines sum it up


def ras_text(address: str | None) -> str:
    """For the end of an error, RAS's answer to "verbose status", or why there is none.

    address: as in NCCL_RAS_ADDR, "localhost:28028"; without one there is nothing to add. Blocks for
    ras_s at most.
    """
    if address is None:
        return ""
    deadline = time.monotonic() + timings.TIMINGS.ras_s
    host, _, port = address.rpartition(":")
    answer = b""
    try:
        peer = (host.strip("[]"), int(port))
        with socket.create_connection(peer, timeout=timings.TIMINGS.ras_s) as connection:
            connection.sendall(b"verbose status\n")
            while len(answer) < MAX_NBYTES and (part := connection.recv(MAX_NBYTES)):
                answer += part
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
    except (OSError, ValueError) as error:
        if not answer:
            return f"\nNCCL's RAS at {address} did not answer: {error}"
    return f"\nNCCL's RAS at {address} says:\n{answer[:MAX_NBYTES].decode(errors='replace')}"
