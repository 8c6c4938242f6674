"""NCCL through cupy: what it asks of cupy, written down by a stand-in for cupy.cuda.nccl.

The stand-in moves nothing; tests/gpu/test_nccl.py runs the real one.
"""

import sys
import threading
import types

import pytest
import torch

from communicator import Communicator, CommunicatorError, Unsupported
from communicator.backends.nccl.cupy import Cupy
from coordinator import Coordinator


class StandIn:
    """cupy.cuda.nccl as far as it is used, taking notes."""

    available = True

    def __init__(self):
        self.notes = []
        self.start_takes_s = 0.0

    def get_unique_id(self):
        return tuple(range(-64, 64))

    def groupStart(self):
        self.notes.append(("groupStart",))

    def groupEnd(self):
        self.notes.append(("groupEnd",))

    def NcclCommunicator(self, world_size, unique_id, rank):
        return StandInComm(self, world_size, unique_id, rank)


class StandInComm:
    def __init__(self, nccl, world_size, unique_id, rank):
        if nccl.start_takes_s:
            nccl.wait.wait(nccl.start_takes_s)
        nccl.notes.append(("start", world_size, rank, unique_id == tuple(range(-64, 64))))
        self.nccl = nccl

    def destroy(self):
        self.nccl.notes.append(("destroy",))

    def __getattr__(self, name):
        return lambda *values: self.nccl.notes.append((name, *values))


@pytest.fixture
def stand_in(monkeypatch):
    """A cupy whose NCCL is a stand-in, and a torch.cuda that has one stream."""
    nccl = StandIn()
    modules = {name: types.ModuleType(name) for name in ("cupy", "cupy.cuda")}
    modules["cupy.cuda"].nccl = nccl
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    stream = types.SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Cupy, "device_type", "cpu")
    return nccl


def resize(comm, world_size):
    for part in (comm, comm._calls, comm._backend):
        part.world_size = world_size


def test_every_operation_becomes_one_call_on_torchs_current_stream(stand_in):
    with Coordinator() as coor, Communicator._of(Cupy, coor) as comm:
        resize(comm, 2)
        coor.ranks = (0, 1)  # the stand-in would not mind
        a, rows = torch.ones(3), torch.ones(2, 3, dtype=torch.bfloat16)
        comm.allreduce(a, "max")
        comm.broadcast(a, 1)
        comm.reduce(a, 1)
        out = comm.allgather(a)
        scattered = comm.reduce_scatter(rows, "avg")
        comm.send(a, 1)
        assert stand_in.notes[0] == ("start", 1, 0, True)
        at = a.data_ptr()
        assert stand_in.notes[1:] == [
            ("allReduce", at, at, 3, 7, 2, 77),
            ("broadcast", at, at, 12, 1, 1, 77),
            ("reduce", at, 0, 3, 7, 0, 1, 77),
            ("allGather", at, out.data_ptr(), 12, 1, 77),
            ("reduceScatter", rows.data_ptr(), scattered.data_ptr(), 3, 9, 4, 77),
            ("send", at, 12, 1, 1, 77),
        ]
        resize(comm, 1)
    assert stand_in.notes[-1] == ("destroy",)


def test_sends_of_a_group_lie_between_its_start_and_end(stand_in):
    with Coordinator() as coor, Communicator._of(Cupy, coor) as comm:
        resize(comm, 2)
        with comm.group():
            comm.send(torch.ones(3), 1)
            comm.recv(torch.ones(3), 1)
        names = [note[0] for note in stand_in.notes[1:]]
        assert names == ["groupStart", "send", "recv", "groupEnd"]


def test_what_cupy_cannot_reduce_is_refused(stand_in):
    with Coordinator() as coor, Communicator._of(Cupy, coor) as comm:
        resize(comm, 2)
        with pytest.raises(Unsupported, match=r"does not reduce torch\.int16"):
            comm.allreduce(torch.ones(3, dtype=torch.int16))


def test_a_failure_of_nccl_is_a_communicator_error(stand_in):
    """cupy has no text for newer codes and raises KeyError."""
    with Coordinator() as coor, Communicator._of(Cupy, coor) as comm:
        resize(comm, 2)

        def fail(*_):
            raise KeyError(6)

        comm._backend._comm.allReduce = fail
        with pytest.raises(
            CommunicatorError, match="rank 0: allReduce failed in NCCL: KeyError: 6"
        ):
            comm.allreduce(torch.ones(3))


def test_what_nccl_finds_at_the_end_of_a_group_is_a_communicator_error(stand_in):
    """It was an error of cupy, which names no rank."""

    def fail():
        raise KeyError(6)

    with Coordinator() as coor, Communicator._of(Cupy, coor) as comm:
        resize(comm, 2)
        stand_in.groupEnd = fail
        refused = pytest.raises(
            CommunicatorError, match="rank 0: groupEnd failed in NCCL: KeyError"
        )
        with refused, comm.group():
            comm.send(torch.ones(3), 1)


def test_an_id_that_nccl_refuses_is_an_error_on_every_rank(stand_in, ranks):
    """The others waited for it until their deadline."""

    def fail():
        raise KeyError(9)

    stand_in.get_unique_id = fail

    def body(info):
        refused = pytest.raises(
            CommunicatorError, match="rank 0: NCCL did not make an id: KeyError: 9"
        )
        with Coordinator(info, timeout_s=20) as coor, refused:
            Communicator._of(Cupy, coor)
        return True

    assert ranks(body, 2) == [True, True]


def test_a_start_that_gets_stuck_is_a_timeout(stand_in):
    stand_in.start_takes_s, stand_in.wait = 30, threading.Event()
    late = pytest.raises(CommunicatorError, match=r"NCCL did not start within 0\.2 s")
    with Coordinator(timeout_s=0.2) as coor, late:
        Communicator._of(Cupy, coor)
    stand_in.wait.set()


def test_any_exception_of_the_start_is_reported_and_is_no_timeout(stand_in, monkeypatch):
    def fail(*_):
        raise OverflowError("too many ranks")

    monkeypatch.setattr(Cupy, "_join", fail)
    told = pytest.raises(CommunicatorError, match="did not start: OverflowError: too many ranks")
    with Coordinator() as coor, told:
        Communicator._of(Cupy, coor)


def test_a_captured_communicator_is_not_destroyed(stand_in, monkeypatch):
    """NCCL would wait for the graph for ever."""
    with Coordinator() as coor, Communicator._of(Cupy, coor) as comm:
        resize(comm, 2)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        comm.allreduce(torch.ones(3))
    assert ("destroy",) not in stand_in.notes


def test_a_forgotten_communicator_is_not_destroyed(stand_in):
    with Coordinator() as coor:
        comm = Communicator._of(Cupy, coor)
        del comm
    assert [note[0] for note in stand_in.notes] == ["start"]


def test_without_a_gpu_or_cupy_the_backend_says_so():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU; tests/gpu/test_nccl.py covers it")
    with Coordinator() as coor, pytest.raises(Unsupported, match="torch sees no CUDA device"):
        Communicator(coor, backend="cupy")
