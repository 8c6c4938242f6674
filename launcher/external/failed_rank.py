"""A rank that fails before it has joined the others, told to rank 0 on another host.

with reporting_to_rank_0(job) as report:
    supervise(on_failure=report)

The connections of a rank that has joined break as it ends. Of one that has not, nothing breaks, and
the others would wait for it until their deadline. So its launcher joins in its place, and is lost.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

from launcher import ports, timings
from launcher.authentication.credentials import Credentials
from launcher.authentication.framed_connection import FramedConnection
from launcher.authentication.handshake import Hello, NotReady, Rejected, authenticate, purpose_of
from launcher.errors import Failure
from launcher.job import Job

CONTROL = purpose_of("control")  # that of rank 0's server


@contextlib.contextmanager
def reporting_to_rank_0(job: Job) -> Iterator[Callable[[Failure], None]]:
    """A function that reports failures in the background; the block ends when all are reported.

    Where rank 0 listens within node_end_s: until then it may be importing. Where it listens already
    the report comes before the function returns, so before ranks that are ended because of it.
    """
    threads: list[threading.Thread] = []

    def report(failure: Failure) -> None:
        if not failure.blames and not failure.ended_by_launcher:
            threads.append(threading.Thread(target=_join_and_leave, args=(job, failure)))
            threads[-1].start()
            threads[-1].join(timings.TIMINGS.node_connect_s)

    try:
        yield report
    finally:
        for thread in threads:
            thread.join()


def _join_and_leave(job: Job, failure: Failure) -> None:
    assert job.secret is not None
    address = job.master_addr, job.master_port or ports.candidates(job.launch_id)[0]
    process = f"host {failure.host}, pid {failure.pid}"
    credentials = Credentials(job.secret, job.launch_id, job.world_size, job.encrypt)
    deadline = time.monotonic() + timings.TIMINGS.node_end_s
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            limit_s = min(left_s, timings.TIMINGS.node_connect_s)
            with socket.create_connection(address, limit_s) as plain:
                hello = Hello(failure.rank, CONTROL, process=process)
                authenticate(FramedConnection(plain), credentials, hello, deadline)
                return
        except Rejected:  # it has joined by itself, and its own connections break
            return
        except NotReady as error:
            if error.__cause__ is None:  # rank 0 has answered, and is about to end
                return
        except OSError:
            pass
        time.sleep(timings.TIMINGS.node_retry_s)
