"""The network under a TCP connection: a link that is down, told from a process that ended."""

from __future__ import annotations

import errno
import socket
import struct

NETWORK_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
# struct tcp_info of linux/tcp.h: retransmits, probes; last_data_recv and last_ack_recv, in ms; rtt,
# in us
TCP_INFO = struct.Struct("=2xBB48xII8xI")


def is_network_error(error: BaseException | None) -> bool:
    """True if the kernel says by this error that the other host does not answer."""
    return isinstance(error, OSError) and error.errno in NETWORK_ERRORS


def remote_host(connection: socket.socket) -> str:
    """The address of the other host; of a connection that has broken, the kernel knows none."""
    try:
        return str(connection.getpeername()[0])
    except (OSError, IndexError):  # not connected, or no connection between hosts
        return "the other host"


def describe_error(connection: socket.socket, remote: str, error: OSError) -> str:
    """Why the connection broke; of a network failure, between which addresses and since when."""
    if not is_network_error(error):
        return str(error)
    _, silent_s, _ = _tcp_info(connection)
    here, name = str(connection.getsockname()[0]), errno.errorcode[error.errno or 0]
    return network_failure(here, remote, silent_s, f"{name}, ")


def is_silent(connection: socket.socket, patience_s: float) -> bool:
    """True if the kernel has sent without an answer, and heard nothing for patience_s.

    patience_s: must exceed a round trip.
    """
    num_unanswered, silent_s, _ = _tcp_info(connection)
    return num_unanswered > 0 and silent_s >= patience_s


def round_trip_s(connection: socket.socket) -> float:
    """The seconds of a round trip, as the kernel has seen them lately; 0 if it has seen none."""
    return _tcp_info(connection)[2]


def describe_silence(connection: socket.socket, patience_s: float) -> str:
    """The network failure under a connection that has not broken yet; "" if there is none."""
    if not is_silent(connection, patience_s):
        return ""
    _, silent_s, _ = _tcp_info(connection)
    return network_failure(str(connection.getsockname()[0]), remote_host(connection), silent_s)


def network_failure(here: str, there: str, silent_s: float, error: str = "") -> str:
    """A network failure in words. error: the name of the errno and a comma, if there was one."""
    silence = f"{error}it has not answered for {silent_s:.1f} s"
    return f"network failure between {here} and {there}: {silence}"


def _tcp_info(connection: socket.socket) -> tuple[int, float, float]:
    """The number of unanswered sends of the kernel, the seconds since it heard anything, and those
    of a round trip."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
        retransmits, probes, data_ms, ack_ms, rtt_us = TCP_INFO.unpack(info)
    except (OSError, struct.error):  # no TCP connection
        return 0, 0.0, 0.0
    return retransmits + probes, min(data_ms, ack_ms) / 1000, rtt_us / 1e6
