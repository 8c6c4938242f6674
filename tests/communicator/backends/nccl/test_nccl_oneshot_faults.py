"""One-shot sums over NCCL, when ranks, streams and graphs do what they should not.

The kernels run on the CPU (oneshot_on_cpu.h); NCCL and torch.cuda are stand-ins.
"""

import contextlib
import ctypes
import threading
import time
from collections import Counter

import pytest
import torch

from communicator import (
    Communicator,
    CommunicatorError,
    CommunicatorTimeout,
    PeerLost,
    Unsupported,
)
from communicator.backends.nccl import Nccl, oneshot
from communicator.backends.nccl.oneshot import Kernels, Oneshot
from coordinator import Coordinator
from tests.communicator.backends.nccl import cuda_on_cpu, nccl_host, oneshot_build

SOON_S = 30.0
FOR_EVER_S = 3600

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real one")


class NcclOnCpu(Nccl):
    """Its tensors are on the CPU, once it is open."""

    @property
    def device(self):
        return torch.device("cuda", 0) if self.oneshot is None else torch.device("cpu")

    def part_options(self, ranks):
        return {**super().part_options(ranks), "device": torch.device("cuda", 0)}

    def check_tensor(self, call, tensor):
        self.check_open(call)

    def check_out(self, call, out, shape, like):
        return out


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("oneshot")
    return nccl_host.compile_stand_in(folder), oneshot_build.compile_kernels(folder)


@pytest.fixture
def cuda(monkeypatch):
    return cuda_on_cpu.install(monkeypatch)


@pytest.fixture
def kernels(built, cuda, monkeypatch):
    """The library of the kernels, which every Oneshot uses."""
    monkeypatch.setattr(oneshot, "Kernels", lambda: Kernels(str(built[1])))
    monkeypatch.setattr(Oneshot, "_check_sums", lambda self: None)
    library = ctypes.CDLL(str(built[1]))
    for function in ("on_cpu_replay", "on_cpu_end_graph"):
        getattr(library, function).argtypes = [ctypes.c_void_p]
        getattr(library, function).restype = None
    library.on_cpu_capture.restype = ctypes.c_void_p
    return library


@pytest.fixture
def opened(built, kernels):
    """opened(info): the communicator of a rank, closed or aborted at the end."""

    @contextlib.contextmanager
    def open_rank(info, **options):
        with Coordinator(info, timeout_s=60) as coor:
            comm = Communicator._of(
                NcclOnCpu, coor, library=str(built[0]), oneshot=True, checked_calls=0, **options
            )
            try:
                yield comm
            finally:
                comm.abort()
                comm.close()

    return open_rank


def capture(kernels, cuda, call):
    graph = kernels.on_cpu_capture()
    cuda.current.is_capturing = True
    try:
        call()
    finally:
        kernels.on_cpu_end_capture()
        cuda.current.is_capturing = False
    return graph


def wait_for(condition):
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def test_a_communicator_whose_first_sum_fails_on_one_rank_leaves_nothing_open(
    ranks, built, opened, monkeypatch
):
    """NCCL stayed connected, and each arena allocated, until the process ended."""
    backends, calls, connect = [], Counter(), Nccl._connect

    class CountingKernels(Kernels):
        def __getattr__(self, name):
            function = super().__getattr__(name)
            return lambda *values: (function(*values), calls.update([name]))

    def fail_on_one(group):
        if group.rank == 1:
            raise CommunicatorError("a first sum came out wrong")

    monkeypatch.setattr(oneshot, "Kernels", lambda: CountingKernels(str(built[1])))
    monkeypatch.setattr(Oneshot, "_check_sums", fail_on_one)
    monkeypatch.setattr(NcclOnCpu, "_connect", lambda self: (backends.append(self), connect(self)))

    def body(info):
        with pytest.raises(Unsupported, match="a first sum came out wrong"), opened(info):
            pass

    ranks(body, 2)
    assert [backend._comm.handle() for backend in backends] == [0, 0]  # closed
    assert calls["create"] == calls["destroy"] == 2
    assert calls["state_create"] == calls["state_destroy"] == 2


def test_a_sum_that_gave_up_in_a_replayed_graph_is_told_without_a_call(
    ranks, opened, kernels, cuda
):
    """Later replays did nothing, and a loop of replays went on with stale numbers for ever."""

    def body(info):
        with opened(info) as comm:
            tensor = torch.ones(8)
            comm.allreduce(tensor)
            assert tensor.tolist() == [2.0] * 8
            comm.check()
            comm._backend.oneshot._call.timeout_ns = 1000
            graph = capture(kernels, cuda, lambda: comm.allreduce(tensor))
            if info.rank == 0:
                kernels.on_cpu_replay(graph)
                wait_for(lambda: comm._backend._end_reason)  # by the watchdog
                for _ in range(2):
                    with pytest.raises(PeerLost, match="rank 0 timed out waiting for rank 1"):
                        comm.check()
            comm.coor.barrier()
            kernels.on_cpu_end_graph(graph)
            return tensor.tolist()

    assert ranks(body, 2) == [[2.0] * 8] * 2


def test_a_sum_waits_as_long_as_its_communicator_and_no_longer(ranks, opened):
    """It waited as long as the Coordinator, whatever set_timeout() said."""

    def body(info):
        with opened(info, timeout_s=600) as comm:
            call = comm._backend.oneshot._call
            assert call.timeout_ns == 600 * 10**9
            comm.set_timeout(0.1)
            assert call.timeout_ns == 10**8
            if info.rank == 0:
                comm.allreduce(torch.ones(8))
                kinds = (CommunicatorTimeout, PeerLost)  # here, or by the watchdog
                with pytest.raises(kinds, match="timed out waiting for rank 1"):
                    comm.check()
            comm.coor.barrier()

    ranks(body, 2)


def test_a_part_of_as_many_ranks_as_have_one_shot_sums_has_them(ranks, opened):
    """Its small sums went by NCCL, unsaid."""

    def body(info):
        with opened(info) as comm:
            parts = [comm.split([1, 0]), comm.split([info.rank])]
            assert [part._backend.oneshot is not None for part in parts] == [True, False]
            parts[0].allreduce(tensor := torch.ones(8))
            for part in parts:
                part.abort()
                part.close()
            return tensor.tolist()

    assert ranks(body, 2) == [[2.0] * 8] * 2


@pytest.mark.parametrize("end", ["abort", "death"])
def test_a_kernel_that_waits_ends_with_the_communicator(ranks, opened, end):
    """It waited until its own deadline, although its peer was known dead."""

    def body(info):
        with opened(info) as comm:
            comm._backend.oneshot._call.timeout_ns = FOR_EVER_S * 10**9
            if info.rank == 0:
                kernel = threading.Thread(target=comm.allreduce, args=[torch.ones(8)])
                kernel.start()
                wait_for(lambda: oneshot_build.is_in_kernel(comm._backend.oneshot._call.arena[0]))
                if end == "abort":
                    comm.abort()
                else:
                    comm._backend.find_failure = lambda: PeerLost("a peer died.")
                kernel.join(SOON_S)
                assert not kernel.is_alive()
                with pytest.raises(PeerLost, match=r"abort\(\)|a peer died"):
                    comm.check()
            comm.coor.barrier()

    ranks(body, 2)


def test_close_is_refused_on_every_rank_while_a_graph_of_one_holds_a_sum(
    ranks, opened, kernels, cuda
):
    """The rank that had captured left at once, and the others waited until their deadline."""

    def body(info):
        with opened(info) as comm:
            tensor = torch.ones(8)
            graph = capture(kernels, cuda, lambda: comm.allreduce(tensor)) if info.rank else None
            with pytest.raises(CommunicatorError, match=r"are alive \(1 on rank 1\)"):
                comm.close()
            if graph is None:
                comm.allreduce(tensor)
            else:
                kernels.on_cpu_replay(graph)  # it is still usable
                kernels.on_cpu_end_graph(graph)
            assert tensor.tolist() == [2.0] * 8
            comm.close()

    ranks(body, 2)


def test_every_kernel_may_run_in_a_capture_first(ranks, opened, kernels, cuda):
    """A kernel is loaded when it first runs, which a capture might not survive."""
    kernels.on_cpu_unload()

    def body(info):
        with opened(info) as comm:
            tensors = [
                torch.ones(nbytes // dtype.itemsize, dtype=dtype)
                for dtype in oneshot.DTYPES
                for nbytes in (1024, 320 * 1024)
            ]

            def sum_all():
                for tensor in tensors:
                    comm.allreduce(tensor)

            graph = capture(kernels, cuda, sum_all)
            kernels.on_cpu_replay(graph)
            kernels.on_cpu_end_graph(graph)
            return all(bool((tensor == 4).all()) for tensor in tensors)

    assert ranks(body, 4) == [True] * 4


def test_a_sum_on_another_stream_waits_for_the_last_one(ranks, opened, cuda):
    """Both use one arena. A stream that is captured must not wait for one outside."""

    def body(info):
        with opened(info) as comm:
            first, second = cuda.current, cuda_on_cpu.Stream()
            comm.allreduce(torch.ones(8))
            comm.allreduce(torch.ones(8))
            assert first.followed == []
            with cuda.stream(second):
                comm.allreduce(torch.ones(8))
                assert second.followed == [first]
                comm.allreduce(torch.ones(8))
            assert second.followed == [first] and first.followed == []
            second.is_capturing = True
            comm.allreduce(torch.ones(8))
            assert first.followed == []

    ranks(body, 2)


def test_a_call_that_is_started_is_enqueued_on_the_stream_of_its_caller(ranks, opened, cuda):
    """It was enqueued on that of another thread, which did not wait for what fills the tensor."""

    def body(info):
        side, tensor = cuda_on_cpu.Stream(), torch.ones(8)
        with opened(info) as comm, cuda.stream(side):
            assert comm.start("allreduce", tensor).wait(SOON_S) is tensor
            assert comm._backend.oneshot._last_stream is side
        return tensor.tolist()

    assert ranks(body, 2) == [[2.0] * 8] * 2


def test_a_given_stream_follows_the_current_one_and_keeps_the_tensors(ranks, opened, cuda):
    """Memory was freed and used again while the given stream still wrote to it."""

    def body(info):
        side = cuda_on_cpu.Stream()
        with opened(info, stream=side) as comm:
            tensor, out = torch.ones(8), torch.zeros(8)
            current = cuda.current
            comm.allreduce(tensor, out=out)
            assert out.tolist() == [2.0] * 8
            assert side.followed == [current] and current.followed == []
            assert [id(kept) for kept in side.kept] == [id(tensor), id(out)]
            comm._backend._comm = FakeNative(comm._backend._comm)
            gathered = comm.allgather(tensor)
            assert side.followed == [current] * 2
            assert {id(kept) for kept in side.kept[2:]} == {id(tensor), id(gathered)}
            with comm.group():
                comm.send(tensor, 1 - info.rank)
                posted = len(side.followed)
            assert len(side.followed) == posted + 1  # when it was sent
            assert id(side.kept[-1]) == id(tensor)

    ranks(body, 2)


class FakeNative:
    """The binding, without the calls that need memory of a device."""

    def __init__(self, native):
        self._native = native

    def __getattr__(self, name):
        return getattr(self._native, name)

    def allgather(self, tensor, out):
        return out

    def send(self, tensor, dst):
        pass


class LateStream(cuda_on_cpu.Stream):
    """Does what is on it when another waits for it."""

    def __init__(self):
        super().__init__()
        self.enqueued = []

    def wait_stream(self, other):
        super().wait_stream(other)
        while getattr(other, "enqueued", None):
            other.enqueued.pop(0)()


class LateNative(FakeNative):
    """The binding, whose calls write when their stream gets there."""

    def __init__(self, native, stream):
        super().__init__(native)
        self.stream, self.sent, self.came = stream, [], []

    def reduce(self, tensor, dst, op):
        self.stream.enqueued.append(lambda: tensor.add_(1))

    def allgather(self, tensor, out):
        self.stream.enqueued.append(lambda: out.copy_(tensor))

    def broadcast(self, tensor, src):
        self.stream.enqueued.append(lambda: tensor.fill_(src))

    def send(self, tensor, dst):
        self.sent.append(tensor.clone())

    def recv(self, tensor, src):
        self.stream.enqueued.append(lambda: tensor.copy_(self.came.pop(0)))


def test_what_is_made_of_calls_on_a_given_stream_reads_their_results_once_they_are_there(
    ranks, opened, cuda
):
    """The current stream copied memory that the given one had yet to write."""

    def body(info):
        side = LateStream()
        with opened(info, stream=side) as comm, cuda.stream(LateStream()):
            native = comm._backend._comm = LateNative(comm._backend._comm, side)
            part = comm.reduce_scatter(torch.arange(8.0), sizes=[3, 5])
            assert part.tolist() == [[1, 2, 3], [4, 5, 6, 7, 8]][info.rank]
            assert comm.allgather(torch.tensor([[5], [6]]), dim=1).tolist() == [[5, 5], [6, 6]]
            own = torch.full((2, 1 + info.rank), info.rank)
            assert comm.allgather(own, dim=1, sizes=[1, 2]).tolist() == [[0, 1, 1]] * 2
            native.came.append(torch.full((2, 1), 9))
            row = [info.rank, 9] if info.rank == 0 else [9, info.rank]
            gathered = comm.gather(torch.full((2, 1), info.rank), info.rank, dim=1)
            assert gathered.tolist() == [row] * 2
            comm.send_tensors({"a": torch.ones(2), "b": "text"}, 1 - info.rank)
            native.came = native.sent
            values = comm.recv_tensors(1 - info.rank)
            assert (list(values), values["b"]) == (["a", "b"], "text")

    ranks(body, 2)


@pytest.mark.parametrize("captured", ["current", "given"])
def test_a_call_on_a_given_stream_that_a_graph_would_miss_is_refused(ranks, opened, cuda, captured):
    def body(info):
        side = cuda_on_cpu.Stream()
        with opened(info, stream=side) as comm:
            for call in (comm.allreduce, comm.broadcast):
                {"current": cuda.current, "given": side}[captured].is_capturing = True
                with pytest.raises(CommunicatorError, match="the graph would not hold the call"):
                    call(torch.ones(8))
                assert side.followed == []
            cuda.current.is_capturing = side.is_capturing = False

    ranks(body, 2)
