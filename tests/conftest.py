"""Ranks for tests: threads of this process, each with a LaunchInfo of its own."""

import socket
import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from launcher import LaunchInfo


def run_threads(fn: Callable[..., Any], nprocs: int, nodes: list[int] | None = None) -> list[Any]:
    """fn(info) on each rank; results or exceptions, by rank. nodes: the ranks on each."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    sizes = nodes or [nprocs]
    places = [(local, size) for size in sizes for local in range(size)]
    launch_id = uuid.uuid4().hex
    found: list[Any] = [None] * nprocs

    def run(rank: int) -> None:
        extras = {"master_fd": str(listener.fileno())} if rank == 0 else {}
        local, size = places[rank]
        port = listener.getsockname()[1]
        info = LaunchInfo(launch_id, nprocs, size, rank, local, "127.0.0.1", port, extras)
        try:
            found[rank] = fn(info)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(nprocs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    listener.close()
    return found


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """Call ranks(fn, n): fn(info) on n threads; raises the first exception any of them raised."""

    def run(fn: Callable[..., Any], nprocs: int, nodes: list[int] | None = None) -> list[Any]:
        found = run_threads(fn, nprocs, nodes)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return found

    return run


@pytest.fixture
def ranks_or_errors() -> Callable[..., list[Any]]:
    """Like ranks, but an exception is a result like any other."""
    return run_threads


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The launcher's tests first: some fork, and a process with threads (torch's, say) must not."""
    items.sort(key=lambda item: "launcher" not in item.path.parts[-2:])
