"""The launcher while its ranks run: pass on what they print, and end them all when one fails."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from launcher import errors, timings
from launcher.errors import Failure, signal_name
from launcher.job import Job
from launcher.launch_info import LaunchInfo
from launcher.local.launch_watch import LaunchWatch
from launcher.records import pipe_records
from launcher.runtime import outcome
from launcher.runtime.outcome import EndReason
from launcher.runtime.output import Output
from launcher.runtime.rank_process import DUMP_SIGNAL, RankPipes
from launcher.runtime.rank_state import LaunchedRank
from launcher.system import linux, stop_signals
from launcher.system.oom_kills import OomKills


@dataclass(frozen=True)
class LauncherPipes:
    """The launcher's ends: to and from the fork server, and of the pipes of ranks.

    port_holder: the socket that keeps the port of torch.distributed, for the whole launch.
    """

    commands: int
    reports: int
    ranks: list[RankPipes]
    port_holder: socket.socket

    def close(self) -> None:
        self.port_holder.close()
        for fd in (self.commands, self.reports, *(fd for pipes in self.ranks for fd in pipes)):
            os.close(fd)


class Supervisor:
    """The event loop of one launch, from the moment its fork server runs."""

    def __init__(
        self,
        job: Job,
        infos: list[LaunchInfo],
        pipes: LauncherPipes,
        output: Output,
        server_pid: int,
        watch: LaunchWatch | None = None,
        on_failure: Callable[[Failure], object] = lambda _: None,
    ) -> None:
        self.job, self.on_failure = job, on_failure
        self.ranks = [LaunchedRank(info) for info in infos]
        self.watch = watch
        self.pipes = pipes
        self.output = output
        self.selector = selectors.DefaultSelector()
        self.readers: dict[int, Callable[[bytes], None]] = {}
        self.prints = {fd for out, err, _ in pipes.ranks for fd in (out, err)}
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.server_pid = server_pid
        self.server_lives = True
        self.server_stopped_s: float | None = None
        self.is_ending = False
        self.stop_requests = 0
        self.reason: EndReason | None = None
        self.oom_kills = OomKills()
        self.began_s = time.monotonic()

    def run(self, reap: Callable[[], int]) -> list[Any]:
        """Each rank's result, or LaunchError.

        reap: ends all that the fork server may leave, and returns how it has ended itself.
        """
        self._register_pipes()
        self._admit_watch()
        if self.job.timeout_s is not None:
            self._after(self.job.timeout_s, self._on_timeout)
        self._watch_server()
        with self.selector, stop_signals.dispatched_to(self.selector, self._on_signal):
            while self.server_lives:
                self._poll_once()
            # Only then has nobody else an end of the ranks' pipes, and they can be drained.
            server_status = reap()
            self._drain_pipes()
            while self.output.is_waiting and self.stop_requests < 2:
                self._poll_once()
        reason = self.reason
        if reason is None and any(rank.is_running for rank in self.ranks):
            reason = outcome.server_ended(server_status)
        if reason is not None:
            self._tell_other_nodes(str(reason(())))
        return outcome.results_or_raise(self.job, self.ranks, self.began_s, reason, self.oom_kills)

    def _tell_other_nodes(self, why: str) -> None:
        """Say why this one ends, unless they know it, will see it by their connections, or have
        given up waiting for ranks that never make a Coordinator."""
        has_waited = time.monotonic() - self.began_s > timings.TIMINGS.node_wait_s
        if not (self.is_ending or self.ranks[0].has_met or has_waited):
            self.on_failure(replace(self.ranks[0].failure(self.began_s), message=why))

    def _poll_once(self) -> None:
        """Wait for an event or a timer, and handle it."""
        is_full = self.output.is_full  # then what ranks print stays in their pipes, and they wait
        for key, _ in self.selector.select(self._next_timeout_s()):
            if not (is_full and key.fd in self.prints):
                key.data()
        self._run_timers()
        with self._ending_if_unwritable():
            self.output.pump(timings.TIMINGS.output_poll_s if is_full else 0)

    def _next_timeout_s(self) -> float | None:
        """Seconds until the next timer; None for never."""
        if self.output.is_full:
            return 0
        now, longest_s = time.monotonic(), timings.TIMINGS.longest_poll_s
        timeouts_s = [min(max(0.0, due_s - now), longest_s) for due_s, _ in self.timers]
        if (output_s := self.output.next_pump_s()) is not None:
            timeouts_s.append(output_s)
        return min(timeouts_s, default=None)

    def _register_pipes(self) -> None:
        self._register(self.pipes.reports, _by_line(self._on_server_report))
        for rank, (out, err, report) in zip(self.ranks, self.pipes.ranks, strict=True):
            self._register(out, self._printer(rank, "out"))
            self._register(err, self._printer(rank, "err"))
            self._register(report, _by_line(functools.partial(self._on_rank_report, rank)))

    def _admit_watch(self) -> None:
        """Let another thread of the program see the ranks, and stop them as a signal does."""
        if self.watch is not None:
            self.watch.follow(self.ranks)
            requests = self.watch.requests
            self.selector.register(
                requests, selectors.EVENT_READ, lambda: self._on_stop_signal(requests.recv(1)[0])
            )

    def _on_failure(self, rank: LaunchedRank) -> None:
        """End the other ranks, the first one's failure being known, unless one outlives it."""
        if not self.is_ending:
            if not rank.has_met:
                self.on_failure(rank.failure(self.began_s))
            if self.watch is not None:
                self.watch.report(rank.failure(self.began_s))
        if not self._is_outlived(rank):
            self._end_ranks(timings.TIMINGS.failure_grace_s)
        elif not rank.was_outlived:
            rank.was_outlived = True
            summary = rank.failure(self.began_s).summary()
            self.output.notice(f"{summary}, and the other ranks go on without it")

    def _read_earlier_deaths(self) -> None:
        """Wait for the fork server's report of each rank that is dead, or not told of, already.

        A rank that waited for a dead one fails because of it, and must not count as the first.
        """
        until_s = time.monotonic() + timings.TIMINGS.reap_lag_s
        reports = select.poll()  # select() takes no descriptor above 1023
        reports.register(self.pipes.reports, select.POLLIN)
        while not self.is_ending and self.server_lives and self._has_unread_death():
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not reports.poll(left_s * 1000):
                break
            self._read(self.pipes.reports)

    def _has_unread_death(self) -> bool:
        running = [rank.pid for rank in self.ranks if rank.is_running]
        stats = [linux.process_stat(pid) for pid in running if pid]
        return len(stats) < len(running) or not all(stat and stat.is_alive for stat in stats)

    def _is_outlived(self, rank: LaunchedRank) -> bool:
        """True if another rank goes on. It may have said so just before, so that is read first."""
        if not self.is_ending:
            for other, (_, _, report) in zip(self.ranks, self.pipes.ranks, strict=True):
                if other is not rank and report in self.readers:
                    self._read(report)
        return not self.is_ending and any(
            other.outlives_failures and not other.has_failed for other in self.ranks
        )

    def _register(self, fd: int, reader: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self.readers[fd] = reader
        self.selector.register(fd, selectors.EVENT_READ, lambda: self._read(fd))

    def _read(self, fd: int) -> bool:
        """True if there was something to read; an empty read is the end of the pipe."""
        if fd not in self.readers:  # it was read to its end since it became readable
            return False
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return False
        self.readers[fd](data)
        if not data:
            self.selector.unregister(fd)
            del self.readers[fd]
            self.server_lives = self.server_lives and fd != self.pipes.reports
        return bool(data)

    def _printer(self, rank: LaunchedRank, stream: str) -> Callable[[bytes], None]:
        def print_data(data: bytes) -> None:
            with self._ending_if_unwritable():
                self.output.take(rank.info.rank, stream, data)

        return print_data

    @contextlib.contextmanager
    def _ending_if_unwritable(self) -> Iterator[None]:
        """End the launch if what the ranks print cannot be written."""
        try:
            yield
        except OSError as error:
            self.output.give_up()
            reason = outcome.unwritable_output(error)
            self._tell_other_nodes(str(reason(())))
            self._set_end_reason(reason)
            self._end_ranks(timings.TIMINGS.stop_grace_s)

    def _on_rank_report(self, rank: LaunchedRank, line: bytes) -> None:
        """Handle a record of how the rank's target ended, or a line of a crash's stack dump."""
        record = pipe_records.parse(line)
        if record is None:
            rank.dump.append(line.decode(errors="replace"))
            return
        if not record.keys() - {"outlives_failures", "has_met"}:
            rank.outlives_failures |= "outlives_failures" in record
            rank.has_met |= "has_met" in record
            return
        rank.record = record
        if "failure" in record:
            try:
                self.output.log(rank.info.rank, record["failure"]["traceback"])
            except OSError as error:  # the failure is told all the same
                self.output.notice(f"{error.filename} cannot be written: {error.strerror}")
            self._read_earlier_deaths()
            self._on_failure(rank)

    def _on_server_report(self, line: bytes) -> None:
        record = pipe_records.parse(line) or {}
        if "error" in record:
            self._set_end_reason(outcome.failed_start(record["error"]))
            return
        rank = self.ranks[record["rank"] - self.ranks[0].info.rank]
        if "pid" in record:
            rank.pid = record["pid"]
        elif "continued" in record:
            rank.is_suspended = False
        elif "suspended" in record:
            rank.is_suspended = True
            self.output.notice(
                f"rank {rank.info.rank} (pid {rank.pid}) was suspended by "
                f"{signal_name(record['suspended'])}, and the others will wait for it: "
                f"`kill -CONT {rank.pid}` resumes it."
            )
        elif "exit_code" in record:
            rank.exit_code, rank.signal = record["exit_code"], record["signal"]
            rank.ended_s = record["time_s"]
            if rank.has_failed and "failure" not in rank.record:  # which has told of it
                self._on_failure(rank)

    def _on_signal(self, number: int) -> None:
        """Stop; a second SIGTERM kills nobody: timeout(1) sends two at once."""
        if number != signal.SIGTERM or not self.stop_requests or not self.server_lives:
            self._tell_other_nodes(f"was stopped by {signal_name(number)}")
            self._on_stop_signal(number)

    def _on_stop_signal(self, number: int) -> None:
        """Ask the ranks to end; at the second signal, kill them."""
        self.stop_requests += 1
        self.is_ending = True
        if self.stop_requests > 1:
            self._kill()
            return
        self._set_end_reason(functools.partial(errors.interrupted, number))
        second = "SIGINT" if number == signal.SIGTERM else "another"
        text = f"{signal_name(number)}: the ranks are asked to end; {second} kills them"
        self.output.notice(text)
        # Ctrl-C reaches every process of a terminal's job, and so the children of ranks.
        is_ctrl_c = number == signal.SIGINT
        self._signal(signal.SIGINT if is_ctrl_c else signal.SIGTERM, self._running(), is_ctrl_c)
        self._after(timings.TIMINGS.stop_grace_s, self._kill)

    def _on_timeout(self) -> None:
        """Collect every rank's stack, then end the ranks, unless they have ended or are ending."""
        if self.is_ending or not (self.server_lives and self._running()):
            return
        self._set_end_reason(outcome.timed_out(self.job, self.ranks))
        self._signal(DUMP_SIGNAL, self._running())
        times = timings.TIMINGS
        self._after(times.stack_dump_s, lambda: self._end_ranks(times.failure_grace_s))

    def _watch_server(self) -> None:
        """End the launch if the fork server is dead, or stopped: then it passes no signal on.

        Its pipe may have no end: a child that the program forked meanwhile holds it open.
        """
        limit_s = timings.borne_s(timings.TIMINGS.stopped_server_s)
        self._after(timings.TIMINGS.backend_poll_s, self._watch_server)
        stat, now = linux.process_stat(self.server_pid), time.monotonic()
        # Without a descriptor to spare, /proc cannot be read.
        is_dead = not stat.is_alive if stat else not linux.exists(self.server_pid)
        if is_dead:
            while self._read(self.pipes.reports):
                pass
            self.server_lives = False
        elif stat is None or stat.state != "T":
            self.server_stopped_s = None
        elif self.server_stopped_s is None and not self.is_ending:
            self.server_stopped_s = now
            self.output.notice(
                f"the fork server (pid {self.server_pid}) was suspended, and ends no rank now: "
                f"`kill -CONT {self.server_pid}` resumes it; otherwise the launch ends soon."
            )
        elif self.is_ending or now - (self.server_stopped_s or now) > limit_s:
            self._set_end_reason(outcome.server_ended(-signal.SIGSTOP))
            linux.send_signal(self.server_pid, signal.SIGKILL)

    def _set_end_reason(self, reason: EndReason) -> None:
        """Keep the first reason only: the later ones follow from it."""
        self.reason = self.reason or reason

    def _end_ranks(self, grace_s: float) -> None:
        """Send SIGTERM once to ranks that have not failed themselves; kill all after grace_s."""
        if not self.is_ending:
            self.is_ending = True
            self._signal(signal.SIGTERM, [r for r in self._running() if not r.has_failed])
            self._after(grace_s, self._kill)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL, self._running(), whole_group=True)

    def _running(self) -> list[LaunchedRank]:
        return [rank for rank in self.ranks if rank.is_running]

    def _signal(self, number: int, ranks: list[LaunchedRank], whole_group: bool = False) -> None:
        """Let the fork server send the signal: the pids are its children, and cannot be reused.

        Without a rank it may be importing, and reads no command: then it is ended itself.
        """
        if not any(rank.pid for rank in self.ranks):
            linux.send_signal(self.server_pid, signal.SIGKILL)
            return
        if number != DUMP_SIGNAL:
            for rank in ranks:
                rank.signalled_s = rank.signalled_s or time.monotonic()
        numbers = [rank.info.rank for rank in ranks]
        record = {"signal": int(number), "ranks": numbers, "whole_group": whole_group}
        with contextlib.suppress(BrokenPipeError):
            pipe_records.send(self.pipes.commands, record)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self.timers.append((time.monotonic() + seconds, action))

    def _run_timers(self) -> None:
        now = time.monotonic()
        due = [timer for timer in self.timers if timer[0] <= now]
        self.timers = [timer for timer in self.timers if timer[0] > now]
        for _, action in sorted(due, key=lambda timer: timer[0]):
            action()

    def _drain_pipes(self) -> None:
        """Read the rest of every pipe; nothing writes to them any longer."""
        for fd in list(self.readers):
            while self._read(fd):
                pass
            if fd in self.prints and fd in self.readers:
                self.readers[fd](b"")


def _by_line(action: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """A reader of bytes that calls action with each line of them."""
    buffer = pipe_records.LineBuffer()

    def feed(data: bytes) -> None:
        for line in buffer.feed(data):
            action(line)

    return feed
