"""The messages of a Communicator over connections of their own, when it is not closed."""

import gc
import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from communicator import Communicator
from communicator.p2p import async_messages
from communicator.p2p.deferred_p2p import DeferredMessages
from coordinator import Coordinator

# Rank 1 sends what rank 0 leaves unread, and receives once rank 0 has ended, or waits to end.
SENT = """
import os, sys, time, torch, torch.distributed as dist
from communicator import Communicator
from communicator.p2p.async_messages import open_messages
from coordinator import Coordinator
from launcher.runtime.rank_process import end_process
sends, sent = os.pipe()
rank = int(os.fork() == 0)
coor = Coordinator.over(dist.FileStore(sys.argv[1], 2), rank, 2, timeout_s=20.0)
comm = Communicator(coor, "tcp")
if rank == 0:
    comm.isend(torch.ones(40_000), 1).wait()
    os.write(sent, b"s")
    time.sleep(0.2)
    end_process(0)
comm._messages = open_messages(comm, comm._backend)
os.read(sends, 1)
comm._messages._group.engine._streams.stream_write(0, b"unread", 0, 0)  # a send would read, too
time.sleep(0.5)
came = torch.zeros(40_000)
comm.irecv(came, 0).wait()
assert came.eq(1).all()
sys.stdout.write("came")
sys.stdout.flush()
os._exit(0)
"""


def test_what_was_sent_comes_although_the_sender_ends_without_close(warm, tmp_path):
    """The system dropped it at the exit of the sender's process."""
    done = warm.run("-c", SENT, tmp_path / "store")
    assert (done.returncode, done.stdout) == (0, "came"), done.stderr


@pytest.mark.parametrize("is_at_exit", [False, True])
def test_close_waits_for_no_peer_that_does_not_read_after_abort(is_at_exit):
    limits = []
    connections = SimpleNamespace(close=limits.append)
    group = SimpleNamespace(is_aborted=False, timeout_s=300.0, close=lambda: None)
    for is_aborted, limit_s in ((False, 300.0), (True, None)):
        group.is_aborted = is_aborted
        async_messages.close_at_exit(group, connections)(is_at_exit=is_at_exit)
        assert limits.pop() == limit_s


def test_a_communicator_that_is_forgotten_leaves_nothing_to_do_at_the_exit(monkeypatch):
    store, forgotten, handlers = HashStore(), [], []
    registry = SimpleNamespace(
        register=lambda handler, **_: handlers.append(handler), unregister=handlers.remove
    )
    monkeypatch.setattr(async_messages, "atexit", registry)

    def rank_of(rank):
        with Coordinator.over(store, rank, 2, timeout_s=20) as coor:
            comm = Communicator(coor, "tcp")
            comm.isend(torch.ones(1), 1 - rank).wait()
            forgotten.append(weakref.ref(comm))
            coor.barrier()
            assert len(handlers) == 2
            coor.barrier()
            del comm
            gc.collect()
            coor.barrier()

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reference() for reference in forgotten] == [None, None]
    assert handlers == []


def test_what_is_sent_from_a_device_is_not_written():
    """A tensor with gaps was, with its own numbers, which autograd took for a change."""
    comm = SimpleNamespace(
        group=nullcontext, send=lambda *_: None, recv=lambda tensor, _: tensor.fill_(7)
    )
    messages, sent, came = DeferredMessages(), torch.ones(3, 2).t(), torch.ones(3, 2).t()
    messages.add(comm, "send", sent, 1, tag=0)
    messages.add(comm, "recv", came, 1, tag=0)
    messages.start()
    assert sent._version == 0 and came.eq(7).all()
