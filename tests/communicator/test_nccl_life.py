"""How a communicator over NCCL begins and ends, with a stand-in library that moves nothing."""

import ctypes
import gc
import time

import pytest
import torch

from communicator import CommunicatorError, PeerLost
from communicator.nccl import Nccl
from coordinator import Coordinator
from tests.communicator import nccl_host

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a real device would not do for the stand-in"
)
SOON_S = 10.0


@pytest.fixture
def path(tmp_path):
    return str(nccl_host.compile_stand_in(tmp_path))


def log_of(path):
    """What the stand-in was asked since the last time."""
    library = ctypes.CDLL(path)
    library.stand_in_log.restype = ctypes.c_char_p
    lines = library.stand_in_log().decode().splitlines()
    library.stand_in_forget()
    return lines


def test_close_finalizes_and_destroys_once(path):
    with Coordinator() as coor:
        comm = Nccl(coor, library=path)
        comm.close()
        comm.close()
    assert log_of(path) == ["CommInitRankConfig nranks=1 rank=0", "CommFinalize", "CommDestroy"]


def test_a_forgotten_communicator_warns_and_asks_nothing_of_nccl(path):
    with Coordinator() as coor:
        comm = Nccl(coor, library=path)
        log_of(path)
        with pytest.warns(ResourceWarning, match="rank 0: .* was forgotten without close"):
            del comm
            gc.collect()
    assert log_of(path) == []


def test_leaving_because_of_an_error_aborts_and_waits_for_nobody(path):
    with Coordinator() as coor, pytest.raises(ZeroDivisionError), Nccl(coor, library=path):
        log_of(path)
        raise ZeroDivisionError
    assert log_of(path) == ["CommAbort"]


class Hasty(Nccl):
    """Says, once all have started, that it could not."""

    def _all_or_none(self, error):
        super()._all_or_none(CommunicatorError("no more room") if self.rank == 1 else error)


def test_if_one_rank_cannot_start_the_others_take_theirs_back(path, ranks):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            with pytest.raises(CommunicatorError, match="no more room"):
                Hasty(coor, library=path)
            return "told"

    assert ranks(body, 3) == ["told"] * 3
    assert log_of(path).count("CommAbort") == 2


def test_after_abort_every_call_says_why_and_close_is_quiet(path):
    with Coordinator() as coor:
        comm = Nccl(coor, library=path)
        comm.abort()
        with pytest.raises(PeerLost, match=r"rank 0: this communicator has ended: abort\(\) was"):
            comm.allreduce(torch.ones(3))
        comm.close()
    assert log_of(path)[1:] == ["CommAbort"]


def test_a_peer_that_is_seen_dead_ends_the_communicator_and_is_named(path, ranks):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Nccl(coor, library=path) as comm:
            gone = f" Gone: rank {1 - info.rank} (host here, pid 7)."
            comm._lost_peers = lambda: gone
            deadline = time.monotonic() + SOON_S
            while not comm._lost and time.monotonic() < deadline:
                time.sleep(0.02)
            with pytest.raises(PeerLost, match=rf"a peer died\.{gone[:13]}"):
                comm.allreduce(torch.ones(3))
            return True

    assert ranks(body, 2) == [True, True]


def test_an_error_that_nccl_meets_by_itself_ends_the_communicator(path, ranks):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Nccl(coor, library=path) as comm:
            coor.barrier()
            ctypes.CDLL(path).stand_in_fail_with(6)
            deadline = time.monotonic() + SOON_S
            while not comm._lost and time.monotonic() < deadline:
                time.sleep(0.02)
            coor.barrier()
            return "remote error" in comm._lost

    assert ranks(body, 2) == [True, True]


def test_split_makes_a_child_with_ranks_of_its_own(path):
    with Coordinator() as coor, Nccl(coor, library=path) as comm:
        child = comm.split([0])
        assert (child.rank, child.world_size) == (0, 1)
        child.close()
        with pytest.raises(CommunicatorError, match="split on a closed Communicator"):
            child.split([0])
        assert log_of(path)[1:] == ["CommSplit color=0 key=0", "CommFinalize", "CommDestroy"]


def test_a_scaled_sum_is_made_in_the_dtype_it_is_for(path):
    with Coordinator() as coor, Nccl(coor, library=path) as comm:
        log_of(path)
        assert comm.scaled_sum(0.5, torch.float32) == 5
        assert log_of(path) == ["RedOpCreatePreMulSum scale=0.5 dtype=7 residence=1"]


def test_a_tensor_on_the_cpu_is_refused(path):
    with Coordinator() as coor, Nccl(coor, library=path) as comm:
        log_of(path)
        with pytest.raises(ValueError, match=r"rank 0, allreduce: the tensor is on cpu, .*cuda:0"):
            comm.allreduce(torch.ones(3))
        assert log_of(path) == []
