"""One message between two ranks over sockets: tcp beside gloo, and beside a bare socket in Python.

python -m benchmarks.hops --save
"""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Callable
from functools import partial

import torch

import launcher
from benchmarks.table import Table, alternate, spread
from communicator import Communicator
from coordinator import Coordinator

SIZES = {1 << 10: 1000, 1 << 13: 1000, 1 << 16: 300, 1 << 22: 20}
"""Bytes, and how often there and back in one measurement."""


def there_and_back(rank: int, send: Callable[[], object], recv: Callable[[], object]) -> None:
    first, second = (send, recv) if rank == 0 else (recv, send)
    first()
    second()


def one_way_us(coor: Coordinator, repeats: int, work: Callable[[], None]) -> float:
    coor.barrier()
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - begun) / repeats / 2 * 1e6


def receive(link: socket.socket, view: memoryview) -> None:
    while view:
        view = view[link.recv_into(view) :]


def rank(repeats: int) -> list[list[object]]:
    """The rows of the table."""
    torch.set_num_threads(1)
    rows: list[list[object]] = []
    with (
        Coordinator() as coor,
        Communicator(coor, "tcp") as tcp,
        Communicator(coor, "gloo") as gloo,
        coor.connections()[1 - coor.rank] as link,
    ):
        link.setblocking(True)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        other = 1 - coor.rank
        for nbytes, times in SIZES.items():
            sent = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
            found = {name: torch.zeros_like(sent) for name in ("tcp", "gloo", "socket")}
            view = memoryview(found["socket"].numpy())
            works = {
                "tcp": (partial(tcp.send, sent, other), partial(tcp.recv, found["tcp"], other)),
                "gloo": (partial(gloo.send, sent, other), partial(gloo.recv, found["gloo"], other)),
                "socket": (partial(link.sendall, sent.numpy()), partial(receive, link, view)),
            }
            cases = {
                name: partial(one_way_us, coor, times, partial(there_and_back, coor.rank, *work))
                for name, work in works.items()
            }
            took = alternate(cases, repeats)
            right = all(torch.equal(each, sent) for each in found.values())
            ratio = sorted(took["tcp"])[repeats // 2] / sorted(took["gloo"])[repeats // 2]
            rows.append([nbytes, *(spread(took[name]) for name in works), right, ratio])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hops")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    columns = ("bytes", "tcp (us)", "gloo (us)", "socket (us)", "right", "tcp/gloo")
    table = Table("hops", columns, "One way between two processes of one machine, over loopback.")
    for row in launcher.launch(rank, nprocs=2, args=(options.repeats,))[0]:
        table.add(*row)
    table.show()
    if options.save:
        table.save()


if __name__ == "__main__":
    main()
