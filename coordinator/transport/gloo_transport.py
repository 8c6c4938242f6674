"""Calls between ranks over a gloo group of their own, as torch.distributed makes one."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions, BroadcastOptions

from coordinator import torch_private
from coordinator.control.framing import pack, unpack
from coordinator.timings import DEFAULT
from coordinator.transport.tree import ALL_NODES, Entry, TreeLinkBroken, distinct, listed
from launcher import noop

SLICE = timedelta(seconds=DEFAULT.idle_s)
BLOCK_NBYTES = 4096  # of each rank, in the first exchange of every call
LENGTH_NBYTES = 8
INLINE_NBYTES = 1024  # of an entry that goes within the first exchange
UNNAMED = -1  # gloo does not say whose connection broke


class GlooTransport:
    """Exchanges among the ranks of a group, each a node of its own, as a Tree has them.

    store: empty, and shared by the ranks. address: where this rank listens. Collective to make;
    raises RuntimeError.
    """

    def __init__(self, store: Store, rank: int, size: int, address: str, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._rank, self._size = rank, size
        self._idle: Callable[[], None] = noop
        self._store = store  # torch keeps only the C++ half of it alive
        self._pid = os.getpid()
        self._gloo: Any = torch_private.gloo_group(store, rank, size, address, self._timeout)

    def exchange(
        self,
        header: Any,
        entries: list[Entry],
        dst_node_of: Callable[[Entry], int],
        deadline: float,
        idle: Callable[[], None],
    ) -> tuple[list[Any], list[Entry]]:
        """As Tree.exchange. Large data goes once all ranks know who gives how much to whom."""
        self._timeout = timedelta(seconds=max(deadline - time.monotonic(), DEFAULT.idle_s))
        self._idle = idle
        own_call = pack((header, listed(entries, INLINE_NBYTES)))
        messages = [unpack(data) for data in self._allgather(own_call)]
        headers = distinct([(index, header) for index, (header, _) in enumerate(messages)])
        if len(headers) > 1:
            return headers, []
        announced = [(Entry(*fields), fields[-1]) for _, part in messages for fields in part]
        small = [entry for entry, data in announced if isinstance(data, bytes)]
        large = [(entry, data) for entry, data in announced if isinstance(data, int)]
        own = {entry.dst: entry.data for entry in entries}
        common = [item for item in large if dst_node_of(item[0]) == ALL_NODES]
        directed = [item for item in large if dst_node_of(item[0]) != ALL_NODES]
        received = small + self._share(common, own)
        if directed:
            received += self._alltoall(directed, own, dst_node_of)
        return headers, [e for e in received if dst_node_of(e) in (ALL_NODES, self._rank)]

    def _allgather(self, data: bytes) -> list[bytes]:
        """The data of every rank, in one exchange if all are small."""
        room = BLOCK_NBYTES - LENGTH_NBYTES
        length = len(data).to_bytes(LENGTH_NBYTES, "little")
        blocks = self._allgather_equal((length + data[:room]).ljust(BLOCK_NBYTES, b"\0"))
        sizes = [int.from_bytes(block[:LENGTH_NBYTES], "little") for block in blocks]
        rest = max(sizes) - room
        whole = [block[LENGTH_NBYTES:] for block in blocks]
        if rest > 0:
            rests = self._allgather_equal(data[room:].ljust(rest, b"\0"))
            whole = [begin + end for begin, end in zip(whole, rests, strict=True)]
        return [data[:size] for data, size in zip(whole, sizes, strict=True)]

    def _allgather_equal(self, data: bytes) -> list[bytes]:
        options = AllgatherOptions()
        options.timeout = self._timeout
        out = torch.empty(self._size * len(data), dtype=torch.uint8)
        self._finish(torch_private.gloo_allgather(self._gloo, out, _tensor(data), options))
        return [_bytes(row) for row in out.view(self._size, -1)]

    def _share(self, large: Sequence[tuple[Entry, int]], own: dict[int, bytes]) -> list[Entry]:
        """The entries that all ranks need: at once if all give as much, otherwise rank by rank."""
        sources = [entry.src_node for entry, _ in large]
        sizes = {nbytes for _, nbytes in large}
        if sources == [*range(self._size)] and len(sizes) == 1:
            rows = self._allgather_equal(own[large[self._rank][0].dst])
        else:
            rows = [self._broadcast(entry, nbytes, own) for entry, nbytes in large]
        return [entry._replace(data=row) for (entry, _), row in zip(large, rows, strict=True)]

    def _broadcast(self, entry: Entry, nbytes: int, own: dict[int, bytes]) -> bytes:
        options = BroadcastOptions()
        options.rootRank, options.timeout = entry.src_node, self._timeout
        is_own = entry.src_node == self._rank
        data = _tensor(own[entry.dst]) if is_own else torch.empty(nbytes, dtype=torch.uint8)
        self._finish(self._gloo.broadcast([data], options))
        return own[entry.dst] if is_own else _bytes(data)

    def _alltoall(
        self,
        large: Sequence[tuple[Entry, int]],
        own: dict[int, bytes],
        dst_node_of: Callable[[Entry], int],
    ) -> list[Entry]:
        """The entries that one rank needs each, which is at most one from every other."""
        sent, received = [0] * self._size, [0] * self._size
        outgoing, incoming = [b""] * self._size, []
        for entry, nbytes in large:
            dst = dst_node_of(entry)
            if entry.src_node == self._rank:
                sent[dst], outgoing[dst] = nbytes, own[entry.dst]
            if dst == self._rank:
                received[entry.src_node] = nbytes
                incoming.append(entry)
        options = AllToAllOptions()
        options.timeout = self._timeout
        out = torch.empty(sum(received), dtype=torch.uint8)
        data = _tensor(b"".join(outgoing))
        self._finish(self._gloo.alltoall_base(out, data, received, sent, options))
        parts = torch.split(out, received)
        return [entry._replace(data=_bytes(parts[entry.src_node])) for entry in incoming]

    def _finish(self, work: Any) -> None:
        """Wait for gloo, and call idle now and then. Raises TreeLinkBroken."""
        try:
            while not work.is_completed():
                try:
                    work.wait(SLICE)
                except RuntimeError:  # not yet, or it has failed: then the next one says how
                    self._idle()
            work.wait(SLICE)
        except RuntimeError as error:
            raise TreeLinkBroken(UNNAMED, f"gloo: {error}") from error
        finally:
            del work  # the traceback of an error would keep gloo's threads beyond close()

    def close(self) -> None:
        if self._gloo is not None:
            self._gloo.shutdown()
            self._gloo = None

    def __del__(self) -> None:
        """Leave it alone in a forked child: to free it would wait for threads that are not here."""
        if self._pid != os.getpid():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))


def _tensor(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()
