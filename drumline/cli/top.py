"""A live table of every rank of a launch.

drumline top
drumline top 282a1cd058f8613d
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

import launcher
from coordinator import DrumlineError, hosts_view, rank_view
from drumline.core.device_map import format_nbytes

LOOK_S = 1.0  # between two looks
TRACE_S = 5.0
NUM_PLAIN_LOOKS = 2  # from which rates come, before the one that is printed
NUM_LOOKS = 20  # over which the slowest rank is found
MIN_DIFFERENCE = 0.25  # of the share of looks in which a rank waits
HOSTS_WAIT_S = 10.0  # for the ranks of other hosts, where the output is not a terminal
PLAIN_WIDTH = 160  # where the output is not a terminal
MAX_KEYS = 64  # that are typed between two looks
MAX_OPERATIONS = 3  # of a rank that are shown
MAX_PID_DIGITS = 10  # proc_sys_kernel(5): a pid is below 2^22
KEYS = "s stacks   d dump to a file   t trace the next 5 s   q quit"
COLUMNS = (
    *("rank", "host", "state", "pid", "call", "line", "for"),
    *("calls/s and bytes/s", "resident", "device", "cpu", "tokens/s"),
)


class _RankHistory:
    """A rank over several looks at it."""

    def __init__(self, look: rank_view.RankLook) -> None:
        self.look = self._before = look
        self._since = time.monotonic()
        self.cpu_share = 0.0
        self._waits = deque([look.waits], NUM_LOOKS)

    def add(self, look: rank_view.RankLook) -> None:
        elapsed_s = look.looked_at - self.look.looked_at
        if elapsed_s <= 0:  # nothing new of a rank of another host, but perhaps its silence
            self.look = look
            return
        self._before, self.look = self.look, look
        self.cpu_share = max(look.cpu_s - self._before.cpu_s, 0.0) / elapsed_s
        self._waits.append(look.waits)
        if self._place(look) != self._place(self._before) or self.rates():
            self._since = time.monotonic()

    @staticmethod
    def _place(look: rank_view.RankLook) -> tuple[object, ...]:
        return look.state, look.stuck and (look.stuck.where, look.stuck.call)

    @property
    def for_s(self) -> float:
        """The seconds since it came to where it is, as far as that was seen."""
        return max(time.monotonic() - self._since, self.look.pending_s)

    @property
    def wait_share(self) -> float:
        """Of the last looks; 0 for a rank that does not run, for which others wait."""
        return sum(self._waits) / max(len(self._waits), 1) if self.look.is_running else 0.0

    def rates(self) -> dict[str, tuple[float, float, float]]:
        """Calls, bytes and tokens a second of each operation, the most frequent first."""
        elapsed_s = self.look.counted_at - self._before.counted_at
        if not self._before.counted_at or elapsed_s <= 0:
            return {}
        rates = {}
        for name, counts in self.look.counts.items():
            before = self._before.counts.get(name, (0, 0, 0))
            if counts[0] > before[0]:
                values = [(n - m) / elapsed_s for n, m in zip(counts, before, strict=True)]
                rates[name] = (values[0], values[1], values[2])
        return dict(sorted(rates.items(), key=lambda item: -item[1][0]))


class LaunchView:
    """The ranks of a launch over several looks. ranks: those on this host."""

    def __init__(self, ranks: Sequence[rank_view.ViewedRank]) -> None:
        self.ranks, self._others = ranks, hosts_view.OtherHosts(ranks)
        self.info = ranks[0].info
        self._pool = ThreadPoolExecutor(self.info.local_world_size)
        self._by_rank: dict[int, _RankHistory] = {}
        self._add_looks()

    def update(self, folder: str = "") -> None:
        """Look again. folder: for recordings, if ranks are to record."""
        if len(self.ranks) < self.info.local_world_size:  # others have come meanwhile, perhaps
            self.ranks = rank_view.launches().get(self.info.launch_id, self.ranks)
            self._others.ranks = self.ranks
        for rank in self.ranks:
            rank.watch(folder, rank is self._others.guide)
        self._add_looks()

    def _add_looks(self) -> None:
        own = rank_view.look_at(self.ranks, self._pool.map)
        self.is_over = all(look.state == rank_view.ENDED for look in own)
        for look in (*own, *self._others.looks()):
            rank = look.peer.rank
            if rank in self._by_rank:
                self._by_rank[rank].add(look)
            else:
                self._by_rank[rank] = _RankHistory(look)

    @property
    def is_complete(self) -> bool:
        """True unless ranks of other hosts are still to be seen."""
        seen = [look for look in self.looks if look.looked_at or look.state == rank_view.ENDED]
        return self.info.world_size in (self.info.local_world_size, len(seen))

    @property
    def _histories(self) -> list[_RankHistory]:
        return [self._by_rank[rank] for rank in sorted(self._by_rank)]

    @property
    def looks(self) -> list[rank_view.RankLook]:
        return [history.look for history in self._histories]

    def slowest(self) -> set[int]:
        """The ranks that wait clearly less than others do."""
        shares = {history.look.peer.rank: history.wait_share for history in self._histories}
        least, most = min(shares.values()), max(shares.values())
        limit = least + (most - least) / 4 if most - least >= MIN_DIFFERENCE else -1.0
        return {rank for rank, share in shares.items() if share <= limit}

    def table(self) -> Table:
        """A row for each rank: waits in yellow, work in green, what does not run in red."""
        slowest, hosts = self.slowest(), {look.peer.host for look in self.looks}
        rows = [[*_cells(history, slowest, len(hosts) > 1)] for history in self._histories]
        title = f"launch {self.info.launch_id} on {', '.join(sorted(hosts))}"
        table = Table(title=title, title_justify="left", box=None)
        is_used = [any(cells) for cells in zip(*rows, strict=True)]
        for name in itertools.compress(COLUMNS, is_used):
            table.add_column(name, no_wrap=True)
        for history, row in zip(self._histories, rows, strict=True):
            table.add_row(*itertools.compress(row, is_used), style=_style(history.look))
        return table

    def report(self) -> str:
        """Every rank with its state, its call and its stack, and the deadlock if there is one."""
        return "".join(map(str, self.looks)) + self.cause()

    def cause(self) -> str:
        """The deadlock, or the ranks that have not come, in a sentence; "" without either."""
        deadlock = rank_view.describe_deadlock(self.looks)
        return deadlock or rank_view.describe_unseen(self.looks, self.info.world_size)


def _style(look: rank_view.RankLook) -> str:
    if not look.is_running:
        return "red"
    return "yellow" if look.waits else "green"


def _cells(history: _RankHistory, slowest: set[int], has_hosts: bool) -> Iterator[str]:
    look = history.look
    peer, stuck, rates = look.peer, look.stuck, history.rates()
    yield f"{peer.rank}" + " slowest" * (peer.rank in slowest)
    yield from (peer.host * has_hosts, look.state, f"{peer.pid}" * (peer.pid > 0))
    yield _call(look)
    yield stuck.where if stuck is not None else ""
    yield f"{history.for_s:.0f} s"
    yield "\n".join(
        f"{name} {calls:.0f}/s" + f" {format_nbytes(int(nbytes))}/s" * (nbytes > 0)
        for name, (calls, nbytes, _) in [*rates.items()][:MAX_OPERATIONS]
    )
    yield format_nbytes(look.resident_nbytes)
    yield format_nbytes(look.device_nbytes) if look.device_nbytes else ""
    yield f"{100 * history.cpu_share:.0f}%"
    tokens = sum(num_tokens for _, _, num_tokens in rates.values())
    yield f"{tokens:.1f}" if tokens else ""


def _call(look: rank_view.RankLook) -> str:
    if look.stuck is not None and look.stuck.call:
        end = f" with rank {look.stuck.other}" if look.stuck.other >= 0 else ""
        return look.stuck.call + end
    if look.pending is not None and look.waits:
        return f"{look.pending.name} #{look.pending.number}"
    return "waits" if look.waits else ""


def top(launch: str | None) -> None:
    """Show a launch until the user quits or it has ended; once if the output is not a terminal."""
    view = LaunchView(_chosen(launch))
    is_live = all(stream and stream.isatty() for stream in (sys.stdin, sys.stdout))
    console = Console(width=None if is_live else PLAIN_WIDTH, markup=False)
    if not is_live:
        until = time.monotonic() + HOSTS_WAIT_S
        for number in itertools.count():
            view.update()
            if number >= NUM_PLAIN_LOOKS and (view.is_complete or time.monotonic() > until):
                break
            time.sleep(LOOK_S)
        console.print(view.table(), view.cause())
        return
    with _keys_unbuffered(), Live(console=console, screen=True, auto_refresh=False) as screen:
        _run(view, screen)


def _run(view: LaunchView, screen: Live) -> None:
    shows_stacks, message = False, ""
    while not view.is_over:
        view.update()
        lines = [KEYS, message, view.report() if shows_stacks else ""]
        lines.append("" if shows_stacks else view.cause())
        screen.update(Group(view.table(), *(Text(line) for line in lines if line)), refresh=True)
        is_typed = select.select([sys.stdin], [], [], LOOK_S)[0]  # it sees no buffer of sys.stdin
        for key in os.read(sys.stdin.fileno(), MAX_KEYS).decode("latin-1") if is_typed else "":
            if key == "q":
                return
            if key == "s":
                shows_stacks = not shows_stacks
            elif key in WRITERS:
                message = _written(WRITERS[key], view)


def _written(write: Callable[[LaunchView], str], view: LaunchView) -> str:
    try:
        return write(view)
    except OSError as error:  # of a folder that is not ours, or a launch id with a slash
        return f"nothing was written: {error}"


def _dump(view: LaunchView) -> str:
    path = Path(f"drumline-{view.info.launch_id}.txt")
    path.write_text(view.report() + "\n")
    return f"wrote {path}"


def _trace(view: LaunchView) -> str:
    """Record the calls of the next seconds; ranks that hang in one call record none."""
    path = Path(f"drumline-{view.info.launch_id}.json")
    with launcher.temporary_folder("drumline-top-") as (folder, _):
        until = time.monotonic() + TRACE_S
        while time.monotonic() < until:
            view.update(str(folder))
            time.sleep(LOOK_S)
        view.update()
        time.sleep(LOOK_S)  # for the ranks to close their files
        num_events = launcher.merge_traces.merge(folder, path)
    return f"wrote {path} with {num_events} events: drumline trace {path}"


WRITERS = {"d": _dump, "t": _trace}


def _chosen(launch: str | None) -> list[rank_view.ViewedRank]:
    """The ranks of a launch by its id or a pid; of the only one if none is named."""
    launches = rank_view.launches()
    named = {key: ranks for key, ranks in launches.items() if _is_named(launch, key, ranks)}
    if len(named) == 1:
        return next(iter(named.values()))
    if not launches:
        raise DrumlineError(
            "No launch of this user runs on this host, or its ranks have no Coordinator yet. Start "
            "one, or look at it as the user who started it."
        )
    lines = [f"\n  {key}: {len(ranks)} ranks, rank {ranks[0].peer.rank} is pid {ranks[0].peer.pid}"
             for key, ranks in launches.items()]  # fmt: skip
    missing = "Several launches run"
    if launch:
        missing = f"no launch {launch!r} with a Coordinator runs on this host"
    raise DrumlineError(f"{missing}. Name one of these:{''.join(lines)}")


def _is_named(launch: str | None, launch_id: str, ranks: Sequence[rank_view.ViewedRank]) -> bool:
    if launch is None or launch_id == launch:
        return True
    pids = {rank.peer.pid for rank in ranks}
    is_pid = launch.isdecimal() and len(launch) < MAX_PID_DIGITS
    return is_pid and bool(pids & {int(launch), *launcher.linux.descendants(int(launch))})


@contextlib.contextmanager
def _keys_unbuffered() -> Iterator[None]:
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
