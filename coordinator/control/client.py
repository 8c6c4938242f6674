"""A rank's end of the control plane: sends requests to rank 0's server, with a deadline each."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from coordinator.addresses import Address, is_loopback_down
from coordinator.control.framing import Connection, pack, unpack_answer
from coordinator.control.operations import LOCAL_OPS, Op
from coordinator.control.server import MAX_REQUEST_NBYTES, ControlServer
from coordinator.errors import CoordinatorError, CoordinatorTimeout, PeerLost
from coordinator.timings import DEFAULT, CoordinatorTimings
from launcher import (
    ConnectionBroken,
    Credentials,
    Hello,
    LaunchFailed,
    NoMessage,
    NotReady,
    Rejected,
    TruncatedMessage,
    authenticate,
    host_addresses,
    link_state,
    noop,
)


class ServerLost(Exception):
    """Rank 0 is gone for good."""


class Client:
    """Connections of one rank to the server: one for each thread with a request at the moment.

    addresses: where to look for the server, at every attempt. server: if it lives in this process,
    LOCAL_OPS need no connection. on_unreachable: called with the address and the reason after each
    failed attempt, until the first connection.

    Raises CoordinatorTimeout if rank 0 cannot be reached in timeout_s.
    """

    def __init__(
        self,
        addresses: Callable[[], list[Address]],
        credentials: Credentials,
        hello: Hello,
        timeout_s: float,
        server: ControlServer | None = None,
        timings: CoordinatorTimings = DEFAULT,
        on_unreachable: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        self._on_unreachable = on_unreachable
        self._addresses, self._credentials, self._hello = addresses, credentials, hello
        self._server, self._timings = server, timings
        self._rank = hello.rank
        self._lock = threading.RLock()  # __del__ may come at any time
        self._idle: list[Connection] = []
        # Left in the middle of a message, and kept open: to close them would look like a death.
        self._mid_request: list[Connection] = []
        self._in_use: set[Connection] = set()  # of threads that wait for an answer
        self._request = 0
        self._closed = False
        self.why_lost = ""  # once the server is: it does not come back
        self._is_accepted = False
        self._timeout_s = timeout_s
        first = self._connect(time.monotonic() + timeout_s, noop)
        self.local_address = str(first.socket.getsockname()[0]).partition("%")[0]
        self.server_address = host_addresses.endpoint(*first.socket.getpeername())
        self._idle.append(first)
        self._is_accepted = True

    def ask(
        self, op: Op, *arguments: Any, timeout_s: float, idle: Callable[[], None] = noop
    ) -> Any:
        """Return the server's answer. idle: as in Connection.

        Raises NoMessage if it does not come in time, ServerLost if it never will, and
        CoordinatorError if the server cannot make sense of the request.
        """
        if self._server is not None and op in LOCAL_OPS and not self._server.is_over:
            self._check_size(op, sum(len(part) for part in arguments if isinstance(part, bytes)))
            return self._server.ask(op, *arguments, timeout_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        connection, request = self._take(deadline, idle)
        try:
            connection.send_packed(self._packed(request, op, arguments), deadline, idle)
            answered, value, *problem = -1, None
            # Answers to requests that were given up, and pings (request 0), are passed over.
            while answered != request:
                answered, value, *problem = connection.receive(deadline, idle, unpack_answer)
        except TruncatedMessage as error:
            raise NoMessage(str(error)) from error
        except ConnectionBroken as error:
            raise self._lost(str(error)) from error
        finally:
            self._put_back(connection)
        if problem:
            raise CoordinatorError(problem[0])
        return value

    def _packed(self, request: int, op: Op, arguments: tuple[Any, ...]) -> bytes:
        body = pack((request, op, *arguments))
        self._check_size(op, len(body))
        return body

    def _check_size(self, op: Op, nbytes: int) -> None:
        if nbytes > MAX_REQUEST_NBYTES:
            raise CoordinatorError(
                f"rank {self._rank} wanted to {op} {nbytes} bytes at rank 0, which takes at "
                f"most {MAX_REQUEST_NBYTES} at once. Send large data by broadcast() or gather()."
            )

    def _take(self, deadline: float, idle: Callable[[], None]) -> tuple[Connection, int]:
        """A connection for one request, and the request's number."""
        with self._lock:
            if self._closed or self.why_lost:
                raise ServerLost(self.why_lost or "this rank has left")
            connection = self._idle.pop() if self._idle else None
            self._request = request = self._request + 1
        if connection is None:
            connection = self._connect(deadline, idle)
        self._in_use.add(connection)
        return connection, request

    def _lost(self, why: str) -> ServerLost:
        self.why_lost = self.why_lost or why
        return ServerLost(self.why_lost)

    def _put_back(self, connection: Connection) -> None:
        with self._lock:
            self._in_use.discard(connection)
            if self._closed or self.why_lost:
                _close(connection, is_orderly=connection.is_between_messages)
            elif connection.is_between_messages:
                self._idle.append(connection)
            else:
                self._mid_request.append(connection)

    def network_failure(self) -> str:
        """The network failure between this host and rank 0's; "" if none is seen."""
        patience_s = self._timings.acknowledged_s
        for connection in (*self._in_use, *self._mid_request, *self._idle):
            if failure := link_state.describe_silence(connection.socket, patience_s):
                return failure
        return ""

    def close(self, is_orderly: bool = True) -> None:
        """Leave; is_orderly: announce it, so that nobody takes it for a death."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            mid_request, self._mid_request = self._mid_request, []
        for connection in mid_request:
            connection.close()
        for connection in idle:
            _close(connection, is_orderly)

    def drop(self) -> None:
        """Ask nothing in a forked child, whose descriptors are closed."""
        self._closed = True

    def _connect(self, deadline: float, idle: Callable[[], None]) -> Connection:
        """An authenticated connection to the server; tries again until the deadline.

        Once this rank was accepted, a host that refuses the connection runs no rank 0 any longer.
        """
        why, address = "no attempt was made", "an address that nobody knows yet"

        def check() -> None:
            if self.why_lost:
                raise ServerLost(self.why_lost)
            idle()

        while True:
            try:
                addresses = self._addresses()
            except CoordinatorError as error:
                is_temporary = getattr(error.__cause__, "errno", 0) == socket.EAI_AGAIN
                if not is_temporary or time.monotonic() >= deadline:
                    raise
                why, addresses = str(error), []  # the name server may answer later
            for target in addresses:
                address = host_addresses.endpoint(*target)
                is_only = len(addresses) == 1  # else another one may answer
                limit_s = self._timings.handshake_s if is_only else self._timings.connect_s
                until = min(deadline, time.monotonic() + limit_s)
                try:
                    return connect(
                        target, self._credentials, self._hello, until, check, self._timings
                    )
                except LaunchFailed as error:
                    raise PeerLost(
                        f"rank {self._rank} came to join launch {self._credentials.launch_id!r}, "
                        f"but {error} before all had joined. Look at what was printed there last."
                    ) from None
                except Rejected as error:
                    raise self._rejected(address, error) from error
                except (NotReady, OSError) as error:
                    why = str(error)
                    if self._is_accepted and isinstance(error, ConnectionRefusedError):
                        raise self._lost(why) from error
                    if is_loopback_down(target, error):
                        raise CoordinatorError(
                            f"rank {self._rank} cannot reach rank 0 at {address} ({why}): the "
                            "loopback interface is down. `ip link set lo up` starts it."
                        ) from error
            check()
            if addresses and time.monotonic() >= deadline:  # else the name is asked for once more
                raise NoMessage(why) if self._is_accepted else self._unreachable(address, why)
            if not self._is_accepted:
                self._on_unreachable(address, why)
            time.sleep(self._timings.connect_retry_s)

    def _unreachable(self, address: str, why: str) -> CoordinatorTimeout:
        return CoordinatorTimeout(
            f"rank {self._rank} (host {socket.gethostname()}) could not reach rank 0 at {address} "
            f"for {self._timeout_s:.1f} s ({why}). Check that rank 0 is alive, that this host can "
            "reach that address, and that no firewall stands between."
        )

    def _rejected(self, address: str, error: Rejected) -> CoordinatorError:
        credentials = self._credentials
        return CoordinatorError(
            f"rank {self._rank} came to {address} to join launch {credentials.launch_id!r} of "
            f"{credentials.world_size} ranks, but {error}. Give each launch its own --launch-id or "
            "--master-port, and start all its ranks in the same way."
        )


def _close(connection: Connection, is_orderly: bool) -> None:
    try:
        if is_orderly:
            connection.send((0, Op.LEAVE), time.monotonic() + 1)
    except ConnectionBroken:
        pass  # rank 0 was quicker, or is dead
    connection.close()


def connect(
    address: Address,
    credentials: Credentials,
    hello: Hello,
    deadline: float,
    idle: Callable[[], None] = noop,
    timings: CoordinatorTimings = DEFAULT,
) -> Connection:
    """An authenticated connection. Raises OSError, NotReady or Rejected."""
    left_s = max(deadline - time.monotonic(), 0.001)
    raw = socket.socket(host_addresses.family_of(address[0]), socket.SOCK_STREAM)
    try:
        raw.settimeout(min(left_s, timings.connect_s))
        raw.connect(address)
        if raw.getsockname() == raw.getpeername():
            # tcp(7): who connects to a free port of its own range may meet itself
            raise OSError(errno.ECONNREFUSED, "it connected to itself")
        connection = Connection(raw)
        authenticate(connection, credentials, hello, deadline, idle)
    except BaseException:
        raw.close()
        raise
    return connection
