"""The Coordinator beside what torch.distributed offers for the same: objects over gloo, TCPStore.

python -m benchmarks.coordinator [--save] [--ranks 2]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

import launcher
from benchmarks.table import Table, spread
from coordinator import Coordinator

SIZES = {"16 B": 16, "1 KB": 1 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "64 MB": 64 << 20}
NOTE = (
    "Ranks are processes of one node; `over TCP` splits them into nodes of one rank each, on "
    "loopback; `by gloo` is a Coordinator with transport='gloo'. Median and middle half of a call "
    "on rank 0 unless said otherwise, in turns, warm, each call after barriers that find all ranks "
    "awake. Every result is compared with what was sent. put() returns once the value is kept, "
    "TCPStore.set() before: one round trip less."
)
KEYS, ONE_KEY = "put, get 1 KB (TCPStore)", "get 1 KB (TCPStore)"
Case = tuple[Callable[[], Any], Callable[[], Any]]


Measured = tuple[list[float], list[float], bool]  # our times and theirs (us), and whether right


def work(path: str, over_tcp: bool) -> list[Any]:
    """Of every case: its name, and what was measured."""
    info = launcher.current()
    if over_tcp:
        info = replace(info, local_world_size=1, local_rank=0)
    store = dist.FileStore(path, info.world_size)
    dist.init_process_group("gloo", store=store, rank=info.rank, world_size=info.world_size)
    with (
        Coordinator(info, timeout_s=120) as coor,
        Coordinator(info, timeout_s=120, transport="gloo") as over_gloo,
    ):
        tcp = _tcp_store(coor)
        rows = []
        cases = [*(() if over_tcp else _gloo_cases(over_gloo)), *_cases(coor, tcp, over_tcp)]
        for name, (ours, theirs), repeats in cases:
            rows.append([name, *_measure(coor, ours, theirs, repeats)])
        coor.barrier()
    dist.destroy_process_group()
    return rows


def _tcp_store(coor: Coordinator) -> dist.TCPStore:
    port = 0
    if coor.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
    port = coor.broadcast_object(port)
    if coor.rank != 0:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return store


def _cases(coor: Coordinator, tcp: dist.TCPStore, over_tcp: bool) -> Any:
    where = " over TCP" if over_tcp else ""
    yield f"barrier{where}", (coor.barrier, dist.barrier), 300
    if not over_tcp:
        yield "local_barrier", (coor.local_barrier, dist.barrier), 300
    for label, nbytes in SIZES.items():
        repeats = 300 if nbytes <= 1 << 16 else 40 if nbytes <= 1 << 20 else 7
        yield f"broadcast {label}{where}", _broadcast(coor, nbytes), repeats
    for label, nbytes in list(SIZES.items())[:-1]:
        repeats = 200 if nbytes <= 1 << 16 else 30
        yield f"allgather {label}{where}", _allgather(coor, nbytes), repeats
    put_and_get, get = _keys(coor, tcp)
    yield KEYS, put_and_get, 200
    yield ONE_KEY, get, 200


def _gloo_cases(coor: Coordinator) -> Any:
    """Of a Coordinator over gloo, whose groups are those of the peer."""
    yield "barrier by gloo", (coor.barrier, dist.barrier), 300
    for label, nbytes in list(SIZES.items())[:-1]:
        repeats = 200 if nbytes <= 1 << 16 else 30
        yield f"broadcast {label} by gloo", _broadcast(coor, nbytes), repeats
        yield f"allgather {label} by gloo", _allgather(coor, nbytes), repeats


def _broadcast(coor: Coordinator, nbytes: int) -> Case:
    data = bytes(range(256)) * (nbytes // 256) + bytes(nbytes % 256)

    def theirs() -> bool:
        box = [data if coor.rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        return box[0] == data

    return lambda: coor.broadcast(data if coor.rank == 0 else None), theirs


def _allgather(coor: Coordinator, nbytes: int) -> Case:
    def theirs() -> list[bytes]:
        found: list[Any] = [None] * coor.world_size
        dist.all_gather_object(found, bytes([coor.rank]) * nbytes)
        return found

    return lambda: coor.allgather(bytes([coor.rank]) * nbytes), theirs


def _keys(coor: Coordinator, tcp: dist.TCPStore) -> tuple[Case, Case]:
    """Of put and get together, and of get alone."""
    key, data = f"key{coor.rank}", b"x" * 1024

    def ours() -> bool:
        coor.put(key, data)
        return coor.get(key) == data

    def theirs() -> bool:
        tcp.set(key, data)
        return bool(tcp.get(key) == data)

    return (ours, theirs), (lambda: coor.get(key), lambda: tcp.get(key))


def _measure(
    coor: Coordinator, ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int
) -> Measured:
    times: tuple[list[float], list[float]] = ([], [])
    results = []
    for _ in range(repeats + 2):
        for call, found in zip((ours, theirs), times, strict=True):
            for _ in range(3):  # the first may have to wake the other ranks
                coor.barrier()
            start = time.perf_counter()
            results.append(call())
            found.append((time.perf_counter() - start) * 1e6)
        results = results[-2:]
    right = results[0] == results[1] or results[1] is True
    return times[0][2:], times[1][2:], right


def start_up(nprocs: int) -> float:
    """Seconds from the last rank's first line to when all have met."""
    times = launcher.launch(_meet, nprocs=nprocs)
    return max(end for _, end in times) - max(begin for begin, _ in times)


def _meet() -> tuple[float, float]:
    begin = time.time()
    with Coordinator(timeout_s=60) as coor:
        coor.barrier()
        return begin, time.time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    name = f"coordinator-{arguments.ranks}"
    columns = ("operation", "right", "drumline (us)", "torch.distributed (us)", "ratio")
    table = Table(name, columns, NOTE, keep=arguments.save)
    for over_tcp in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/store"
            found = launcher.launch(work, nprocs=arguments.ranks, args=(path, over_tcp))
        for operation, ours, theirs, right in [
            *found[0],
            *((f"{name}, last rank", *rest) for name, *rest in found[-1][-2:]),
        ]:
            ratio = statistics.median(ours) / statistics.median(theirs)
            table.add(operation, "yes" if right else "NO", spread(ours), spread(theirs), ratio)
    for nprocs in (8, 64):
        table.add(f"{nprocs} ranks meet", "yes", start_up(nprocs) * 1e6, "-", "-")
    table.end()


if __name__ == "__main__":
    main()
