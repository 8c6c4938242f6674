"""A rank that fails or is stopped before all of several machines have met, told to the others.

with telling_other_nodes(job) as tell:
    supervise(on_failure=tell)

The connections of a rank that has joined break as it ends. Of one that has not, nothing breaks, and
the others would wait for it until their deadline. So its launcher stands in for it: as a rank that
joins rank 0 and is lost, or where rank 0 is gone, too, in its place: whoever comes is told why.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import selectors
import socket
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from launcher import ports, timings
from launcher.authentication.credentials import Credentials
from launcher.authentication.framed_connection import FramedConnection
from launcher.authentication.handshake import (
    NAME_NBYTES,
    Answer,
    AuthenticatedListener,
    Hello,
    NotReady,
    Rejected,
    authenticate,
    purpose_of,
)
from launcher.errors import Failure, LaunchError
from launcher.external.node_leader import listening_addresses
from launcher.external.node_messages import notice
from launcher.job import Job

CONTROL = purpose_of("control")  # that of rank 0's server


@contextlib.contextmanager
def telling_other_nodes(job: Job) -> Iterator[Callable[[Failure], None]]:
    """A function that tells of failures in the background; the block ends when all are told.

    Those who can be reached within node_end_s: until then they may be importing. A rank 0 that
    listens already is told before the function returns, so before ranks are ended because of it.
    Ctrl-C ends that, and leaves the LaunchError of the block as it is.
    """
    threads: list[threading.Thread] = []

    def tell(failure: Failure) -> None:
        is_first = job.node_rank == 0  # which has one port, at which to say one reason
        is_to_be_told = not threads if is_first else not failure.blames
        if not failure.ended_by_launcher and is_to_be_told:
            work = _send_others_away if is_first else _join_and_leave
            place = _MeetingPoint(job)
            threads.append(threading.Thread(target=work, args=(place, failure), daemon=True))
            threads[-1].start()
            threads[-1].join(0 if is_first else timings.TIMINGS.node_connect_s)

    try:
        yield tell
    finally:
        try:
            _join(threads)
        except KeyboardInterrupt as stopped:
            if not isinstance(stopped.__context__, LaunchError):  # which is reported instead
                raise


def _join(threads: Iterable[threading.Thread]) -> None:
    for thread in threads:
        thread.join(timings.TIMINGS.node_connect_s)
        if thread.is_alive():
            limit_s = timings.TIMINGS.node_end_s
            notice(f"telling the other nodes why this one ends: {limit_s:g} s at most")
        thread.join()


class _MeetingPoint:
    """The address at which rank 0 listens, and what all prove there; until a deadline."""

    def __init__(self, job: Job) -> None:
        assert job.secret is not None
        self.job = job
        self.address = job.master_addr, job.master_port
        self.credentials = Credentials(job.secret, job.launch_id, job.world_size, job.encrypt)
        self.deadline = time.monotonic() + timings.TIMINGS.node_end_s

    def attempts(self) -> Iterator[float]:
        """The seconds that are left, before each attempt."""
        while (left_s := self.deadline - time.monotonic()) > 0:
            yield left_s
            time.sleep(timings.TIMINGS.node_retry_s)


def _join_and_leave(place: _MeetingPoint, failure: Failure) -> None:
    hello = Hello(failure.rank, CONTROL, process=f"host {failure.host}, pid {failure.pid}")
    for left_s in place.attempts():
        try:
            limit_s = min(left_s, timings.TIMINGS.node_connect_s)
            with socket.create_connection(place.address, limit_s) as plain:
                authenticate(FramedConnection(plain), place.credentials, hello, place.deadline)
                return
        except Rejected:  # it has joined by itself, and its own connections break; or rank 0 failed
            return
        except NotReady as error:
            if error.__cause__ is None:  # rank 0 has answered, and is about to end
                return
        except OSError:
            pass


def _send_others_away(place: _MeetingPoint, failure: Failure) -> None:
    """Tell a rank of each other node, whose launcher ends the rest, in the place of rank 0.

    A node whose own rank is the cause is not told: its launcher has ended the rest.
    """
    ends = list(itertools.accumulate(place.job.ranks_of_nodes))
    causes = {bisect.bisect_right(ends, rank) for rank in failure.blames if rank >= 0}
    awaited = {*range(1, place.job.nnodes)} - causes
    process = f"host {failure.host}, pid {failure.pid}"
    text = textwrap.shorten(
        f"rank {failure.rank} ({process}) {failure.how()}", NAME_NBYTES, placeholder=" ..."
    )

    def answer(hello: Hello) -> tuple[Answer, str]:
        awaited.discard(bisect.bisect_right(ends, hello.rank))
        return Answer.LAUNCH_FAILED, text

    for _ in place.attempts() if awaited else ():
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            address, *_ = listening_addresses(*place.address)
            listener = ports.listen(place.job.launch_id, address, place.address[1])
            opened.enter_context(listener)
            selector = opened.enter_context(selectors.DefaultSelector())
            authenticator = AuthenticatedListener(
                listener, place.credentials, selector, lambda *_: None, answer
            )
            while awaited and (left_s := place.deadline - time.monotonic()) > 0:
                authenticator.handle(selector.select(left_s))
                authenticator.tick()
            authenticator.close()
            return
