"""Ranks that are started again when one of them dies or is suspended; fewer if some do not come up.

ranks = RestartingRanks(scheduler, job, restarts=3)
ranks.wait_until_ready()
ranks.close()
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import launcher
from drumline import timings
from drumline.errors import PeerLost, PlanError
from drumline.serving.front.json_lines import hang_up, messages, to_line
from drumline.serving.front.rank_launch import end_of, first_line, watch
from drumline.serving.front.remote_scheduler import Message, RemoteScheduler

log = logging.getLogger("drumline")

STARTS = 2  # of one number of ranks that may fail: a rank may be killed while it loads, too
UCRED = struct.Struct("3i")  # pid, uid and gid: SO_PEERCRED of unix(7)


class RestartingRanks:
    """Starts ranks from a thread, connects each new rank 0 to the scheduler, and ends them.

    When ranks do not come up again, fewer are started: where a GPU or a host is gone, the rest may
    hold the model. If a plan says that they do not, that is the end.

    job: what the ranks of this node run, as serve_front(), and its arguments without the first two.
    Of several nodes it is the first, and the others run follow_front(). restarts: at most so often.
    tp: ranks that share each layer, so that no fewer of them are of use.
    """

    def __init__(
        self, scheduler: RemoteScheduler, job: launcher.Job, restarts: int, tp: int = 1
    ) -> None:
        self._leader = launcher.NodeLeader(job)
        self._scheduler, self._job, self._restarts, self._tp = scheduler, job, restarts, tp
        self._failed_starts = 0  # since ranks have come up
        self._is_closed = threading.Event()
        self._was_ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="restarting-ranks")
        self._thread.start()

    def wait_until_ready(self) -> None:
        """Return once the model is loaded. Raises the LaunchError of ranks that cannot load it."""
        self._was_ready.result()

    def close(self) -> None:
        """Let the ranks end, and kill them if they do not; return when none is left."""
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._leader):
            error = self._serve()
            if error is not None and self._was_ready.done():
                self._scheduler.fail(PeerLost(str(error)))
            self._leader.end("" if error is None else f"the server has ended: {first_line(error)}")
        if error is not None and not self._was_ready.done():
            self._was_ready.set_exception(error)

    def _serve(self) -> Exception | None:
        """Start ranks until the server is closed; or why no more are started."""
        nodes, most, cause = list(range(self._job.nnodes)), sys.maxsize, ""
        num_ranks = 0
        for count in range(self._restarts + 1):
            if count and (self._failed_starts or not num_ranks):  # the last ones did not come up
                self._is_closed.wait(timings.TIMINGS.start_pause_s)
            self._scheduler.num_restarts = count
            num_ranks = 0
            try:
                limit_s = timings.TIMINGS.node_return_s if self._was_ready.done() else None
                nodes = self._leader.gather(nodes, limit_s, self._is_closed.is_set)
                if self._is_closed.is_set():
                    return None
                nodes, num_ranks = nodes_within(nodes, self._leader.ranks_of_nodes, most)
                self._scheduler.num_missing_ranks = self._num_ranks - num_ranks
                if count:
                    ranks = f"{num_ranks} of {self._num_ranks} ranks"
                    log.warning(
                        "restart %d of %d, %s, after %s", count, self._restarts, ranks, cause
                    )
                error = self._serve_once(nodes, num_ranks)
            except Exception as problem:  # such as no descriptors left to start with
                error = problem
            if self._is_closed.is_set():
                return None
            if not self._was_ready.done():
                return error
            cause = first_line(error)
            if num_ranks < self._num_ranks and _is_too_small(error):
                return self._too_few(num_ranks, cause)
            if num_ranks:  # otherwise nothing was started
                most = self._next_num_ranks(num_ranks)
        return PeerLost(
            f"{cause}, and no restart is left of --restarts {self._restarts}; start the server "
            "again, and allow more if the reason is gone."
        )

    @property
    def _num_ranks(self) -> int:
        """The ranks of all nodes that have ever come."""
        return sum(self._leader.ranks_of_nodes)

    def _next_num_ranks(self, num_ranks: int) -> int:
        """All, unless that number has failed to come up STARTS times in a row; then tp less."""
        is_over = self._failed_starts % STARTS == 0
        return max(num_ranks - self._tp * is_over, self._tp) if self._failed_starts else sys.maxsize

    def _too_few(self, num_ranks: int, cause: str) -> PeerLost:
        return PeerLost(
            f"{self._num_ranks - num_ranks} ranks did not come up again, and {num_ranks} of "
            f"{self._num_ranks} cannot hold the model: {cause} Start the server again once the "
            "reason is gone, or with a smaller --max-length or --max-running."
        )

    def _serve_once(self, nodes: list[int], num_ranks: int) -> Exception:
        """Start ranks and pass messages on until they have ended; why they have."""
        self._failed_starts += 1
        address = f"drumline-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{address}")
            listener.listen()
            arguments = (address, self._leader.ranks_of_nodes, *self._job.args)
            job = replace(self._leader.begin(nodes), args=arguments)
            with (
                launcher.Launch(replace(job, nprocs=min(num_ranks, job.nprocs))) as launch,
                contextlib.closing(RankConnection(listener)) as connection,
            ):
                reader = threading.Thread(target=self._read, args=(connection,))
                reader.start()
                why_kill = watch(launch, lambda: self._is_over(reader))
                if self._is_closed.is_set() and self._scheduler.is_restarting:
                    why_kill = "the server ended while they loaded"
                connection.close()
                if not self._is_closed.is_set():
                    self._leader.stop()
                reader.join()
                return end_of(launch, why_kill)

    def _read(self, connection: RankConnection) -> None:
        try:
            for message in connection.messages():
                if "id" in message:
                    self._scheduler.receive(message)
                else:
                    self._failed_starts = 0
                    self._scheduler.resume(message, connection.send)
                    if not self._was_ready.done():
                        self._was_ready.set_result(None)
        finally:
            self._scheduler.suspend()

    def _is_over(self, reader: threading.Thread) -> bool:
        """True once ranks have to end; after a moment."""
        self._leader.step(0)
        is_lost = not reader.is_alive() or self._leader.has_lost_a_node()
        return is_lost or self._is_closed.wait(timings.TIMINGS.failure_poll_s)


def nodes_within(
    nodes: Sequence[int], ranks_of_nodes: Sequence[int], most: int
) -> tuple[list[int], int]:
    """The nodes with at most `most` ranks together, the first in any case; and how many start."""
    chosen: list[int] = []
    num_ranks = 0
    for node in nodes:
        if not chosen or num_ranks + ranks_of_nodes[node] <= most:
            chosen.append(node)
            num_ranks += ranks_of_nodes[node]
    return chosen, min(num_ranks, most)


def _is_too_small(error: Exception) -> bool:
    """True if the ranks have planned, and the model does not fit."""
    failures = error.failures if isinstance(error, launcher.LaunchError) else ()
    return bool(failures) and failures[0].type == PlanError.__name__


class RankConnection:
    """The front's end of the connection to rank 0, which has yet to connect to the listener."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._connected = listener, Future[socket.socket]()
        self._sender = ThreadPoolExecutor(1)

    def send(self, message: Message) -> None:
        """Send soon, in order; never blocks, whatever rank 0 does."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self._sender.submit(self._send, message)

    def _send(self, message: Message) -> None:
        self._connected.result().sendall(to_line(message))

    def messages(self) -> Iterator[Message]:
        """Yield until rank 0 is gone, or the connection is closed."""
        with contextlib.suppress(OSError), self._accepted() as connection:
            if self._connected.set_running_or_notify_cancel():  # otherwise close() was first
                self._connected.set_result(connection)
                try:
                    yield from messages(connection)
                finally:
                    self.close()

    def close(self) -> None:
        """End messages(), even while something is being sent; from any thread."""
        hang_up(self._listener)
        if not self._connected.cancel():
            hang_up(self._connected.result())
        self._sender.shutdown(cancel_futures=True)

    def _accepted(self) -> socket.socket:
        """Rank 0's connection: the kernel tells whose it is. Raises OSError after close()."""
        while True:
            connection, _ = self._listener.accept()
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size)
            if UCRED.unpack(peer)[1] == os.getuid():
                return connection
            connection.close()
