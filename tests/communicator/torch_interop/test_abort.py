"""A process group that is aborted while its calls wait."""

import threading

import pytest
import torch
from torch.distributed import HashStore

from communicator.backends.shm import Shm
from communicator.backends.tcp import Tcp
from communicator.calls.async_work import WorkQueue
from communicator.p2p.group_ranks import GroupRanks, meet
from communicator.torch_interop.process_group import DrumlineProcessGroup
from coordinator import DrumlineError


@pytest.mark.parametrize("backend", [Shm, Tcp])
def test_abort_ends_collectives_and_messages_that_wait(ranks, backend):
    """Over shared memory it waited for them, until their deadline. The queue's thread stayed."""

    store, is_over, queue = HashStore(), threading.Event(), WorkQueue()

    def body(info):
        coor, chosen = meet(store, info.rank, 2, 20.0), {"cpu": backend, "cuda": None}
        group = DrumlineProcessGroup(GroupRanks(coor), queue, chosen=chosen)
        if info.rank == 0:
            message = group.recv([torch.ones(1)], 1)
            comm = group._comms.of("cpu")
            call = queue.submit(lambda: comm.allreduce(torch.ones(3)), [])
            aborter = threading.Timer(0.3, group.abort)
            aborter.start()
            for work in (call, message):
                with pytest.raises(DrumlineError, match=r"abort|destroy|on a closed"):
                    work.wait()
            for thread in (aborter, queue._thread):
                thread.join(10)
                assert not thread.is_alive()
            is_over.set()
        else:
            assert is_over.wait(30)
            group.shutdown()

    ranks(body, 2)
