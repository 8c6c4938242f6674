"""What our NCCL plugin asks of NCCL, and in which order, written down by a stand-in library.

The stand-in moves nothing and needs no GPU. test_nccl_without_gpu.py has the real library, and
tests/gpu the real device.
"""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.communicator.backends.nccl import nccl_host
from tests.communicator.backends.nccl.nccl_host import STREAM, Host

SUM, PROD, MAX, AVG, FLOAT32, BFLOAT16, BOOL, INT16, UINT8 = 0, 1, 2, 4, 7, 9, 100, 101, 1
FLOAT8, UINT16, COMPLEX64, E8M0 = 10, 102, 103, 107
UNSUPPORTED, INVALID_ARGUMENT, INVALID_USAGE, REMOTE, TIMEOUT = 1000, 4, 5, 6, 8

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="runs without a CUDA driver, which would be asked about streams that do not exist",
)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """stand_in(*defines): the path of a stand-in built so, once for each set of defines."""
    folder, built = tmp_path_factory.mktemp("stand_in"), {}

    def build(*defines):
        if defines not in built:
            name = f"libnccl_stand_in_{len(built)}.so"
            built[defines] = nccl_host.compile_stand_in(folder, *defines, name=name)
        return built[defines]

    return build


@pytest.fixture
def host(stand_in):
    made = Host(stand_in())
    assert made.code == 0, made.error
    made.log()
    return made


def test_every_operation_becomes_one_call_of_nccl_on_the_stream_given(host):
    a, b = 4096, 8192
    calls = [
        host.call("allreduce", a, a, 7, FLOAT32, SUM, STREAM),
        host.call("allreduce", a, b, 7, BFLOAT16, AVG, STREAM),
        host.call("broadcast", a, 7, FLOAT32, 2, STREAM),
        host.call("reduce", a, 0, 7, FLOAT32, MAX, 3, STREAM),
        host.call("allgather", a, b, 7, FLOAT32, STREAM),
        host.call("reduce_scatter", a, b, 7, FLOAT32, SUM, STREAM),
        host.call("alltoall", a, b, 7, FLOAT32, STREAM),
    ]
    assert calls == [0] * 7
    assert host.log() == [
        "AllReduce in_place=1 count=7 dtype=7 op=0 stream=0x5eed",
        "AllReduce in_place=0 count=7 dtype=9 op=4 stream=0x5eed",
        "Broadcast in_place=1 count=7 dtype=7 root=2",
        "Reduce recv=0 count=7 dtype=7 op=2 root=3",
        "AllGather count=7 dtype=7",
        "ReduceScatter count=7 dtype=7 op=0",
        "AlltoAll count=7 dtype=7",
    ]


def test_a_stream_given_at_the_start_takes_the_place_of_the_callers(stand_in):
    made = Host(stand_in(), "stream=48879")
    made.log()
    made.call("allreduce", 64, 64, 7, FLOAT32, SUM, STREAM)
    assert made.log() == ["AllReduce in_place=1 count=7 dtype=7 op=0 stream=0xbeef"]


def test_bool_int16_and_float8_travel_as_bytes(host):
    for dtype in (BOOL, INT16, FLOAT8):
        host.call("broadcast", 64, 7, dtype, 0, STREAM)
    host.call("allreduce", 64, 64, 7, BOOL, PROD, STREAM)
    assert host.log() == [
        "Broadcast in_place=1 count=7 dtype=1 root=0",
        "Broadcast in_place=1 count=14 dtype=1 root=0",
        "Broadcast in_place=1 count=7 dtype=1 root=0",
        "AllReduce in_place=1 count=7 dtype=1 op=3 stream=0x5eed",
    ]


def test_complex_numbers_are_moved_and_added_as_pairs(host):
    host.call("broadcast", 64, 7, COMPLEX64, 0, STREAM)
    host.call("allreduce", 64, 64, 7, COMPLEX64, SUM, STREAM)
    assert host.log() == [
        "Broadcast in_place=1 count=14 dtype=7 root=0",
        "AllReduce in_place=1 count=14 dtype=7 op=0 stream=0x5eed",
    ]


@pytest.mark.parametrize(
    "dtype, op, name",
    [
        (INT16, SUM, " int16"),
        (UINT16, SUM, " uint16"),
        (COMPLEX64, MAX, "complex"),
        (E8M0, SUM, "8-bit floats"),
    ],
)
def test_what_nccl_cannot_reduce_is_refused_before_it_is_asked(host, dtype, op, name):
    assert host.call("allreduce", 64, 64, 7, dtype, op, STREAM) == UNSUPPORTED
    assert name in host.error and host.error.startswith("rank 0: ")
    assert host.log() == []


def test_float8_sums_need_a_library_that_has_them(stand_in):
    old = Host(stand_in("VERSION=22304"))
    old.log()
    assert old.call("allreduce", 64, 64, 7, FLOAT8, SUM, STREAM) == UNSUPPORTED
    assert "needs NCCL 2.24.3" in old.error and "2.23.4" in old.error
    assert old.log() == []


def test_the_average_of_one_rank_is_a_sum_which_nccl_has_for_every_dtype(stand_in):
    """For 8-bit floats of one rank it lacks the kernel, and its refusal stays for ever."""
    alone = Host(stand_in(), nranks=1)
    alone.log()
    for dtype in (FLOAT8, FLOAT32):
        assert alone.call("allreduce", 64, 64, 7, dtype, AVG, STREAM) == 0
    assert [line.split()[4] for line in alone.log()] == ["op=0", "op=0"]


def test_a_scaled_sum_of_float8_on_one_rank_is_refused_before_nccl_is_asked(stand_in):
    alone, op, scale = Host(stand_in(), nranks=1), ctypes.c_int32(), ctypes.c_uint32(0x38)
    alone.call("premul_sum_create", ctypes.byref(scale), FLOAT8, ctypes.byref(op))
    alone.log()
    assert alone.call("allreduce", 64, 64, 7, FLOAT8, op.value, STREAM) == UNSUPPORTED
    assert "needs two ranks" in alone.error and alone.log() == []


def test_alltoall_is_grouped_from_sends_where_the_library_has_none(stand_in):
    old = Host(stand_in("VERSION=22703", "NO_ALLTOALL"), nranks=2)
    old.log()
    assert old.call("alltoall", 1000, 2000, 3, FLOAT32, STREAM) == 0
    assert old.log() == [
        "GroupStart",
        "Send at=1000 count=3 dtype=7 peer=0",
        "Recv at=2000 count=3 dtype=7 peer=0",
        "Send at=1012 count=3 dtype=7 peer=1",
        "Recv at=2012 count=3 dtype=7 peer=1",
        "GroupEnd",
    ]


def test_sends_of_a_group_lie_between_its_start_and_end(host):
    for entry, *values in (
        ("group_start",),
        ("send", 64, 7, FLOAT32, 1, STREAM),
        ("recv", 128, 7, FLOAT32, 3, STREAM),
        ("group_end",),
    ):
        assert host.call(entry, *values) == 0
    assert [line.split()[0] for line in host.log()] == ["GroupStart", "Send", "Recv", "GroupEnd"]


def test_a_scaled_sum_is_made_for_one_dtype_and_refused_for_another(host):
    op = ctypes.c_int32()
    scale = ctypes.c_float(0.5)
    made = host.call("premul_sum_create", ctypes.byref(scale), FLOAT32, ctypes.byref(op))
    assert (made, op.value) == (0, 5)
    assert host.call("allreduce", 64, 64, 7, FLOAT32, op.value, STREAM) == 0
    assert host.log() == [
        "RedOpCreatePreMulSum scale=0.5 dtype=7 residence=1",
        "AllReduce in_place=1 count=7 dtype=7 op=5 stream=0x5eed",
    ]
    assert host.call("allreduce", 64, 64, 7, BFLOAT16, op.value, STREAM) == INVALID_ARGUMENT
    assert host.call("allreduce", 64, 64, 7, FLOAT32, 9, STREAM) == INVALID_ARGUMENT
    assert host.log() == []


def test_memory_is_a_symmetric_window_where_there_are_windows(host):
    pointer = ctypes.c_void_p()
    assert host.call("mem_alloc", 8192, ctypes.byref(pointer)) == 0
    assert host.call("mem_free", pointer) == 0
    assert host.log() == [
        "MemAlloc 8192",
        "CommWindowRegister 8192 flags=1",
        "CommWindowDeregister",
        "MemFree",
    ]


def test_memory_is_registered_where_there_are_no_windows_yet(stand_in):
    old = Host(stand_in("VERSION=22603", "NO_WINDOWS"))
    old.log()
    pointer = ctypes.c_void_p()
    assert old.call("mem_alloc", 8192, ctypes.byref(pointer)) == 0
    assert old.log() == ["MemAlloc 8192", "CommRegister 8192"]


def test_memory_says_which_nccl_it_needs_where_there_is_none(stand_in):
    old = Host(stand_in("VERSION=21805", "NO_MEMORY", "NO_WINDOWS"))
    pointer = ctypes.c_void_p()
    assert old.call("mem_alloc", 8192, ctypes.byref(pointer)) == UNSUPPORTED
    assert "needs NCCL 2.19.1 or newer" in old.error


def test_a_library_without_a_function_that_its_version_has_is_refused(stand_in):
    broken = Host(stand_in("ONLY_VERSION"))
    assert broken.code == UNSUPPORTED
    error = broken.function("last_error")(None).decode()
    assert "says NCCL 2.28.9 but has no nccl" in error


def test_an_unknown_option_is_refused_with_those_that_exist(stand_in):
    wrong = Host(stand_in(), "speed=11")
    assert wrong.code == INVALID_ARGUMENT
    error = wrong.function("last_error")(None).decode()
    assert "speed=11" in error and "max_ctas" in error


def test_start_that_never_ends_is_a_timeout_and_is_aborted(stand_in):
    start = time.monotonic()
    made = Host(stand_in("NEVER"), timeout_ms=300)
    assert made.code == TIMEOUT
    assert time.monotonic() - start >= 0.3
    assert (
        "ncclCommInitRankConfig did not complete within 300 ms"
        in made.function("last_error")(None).decode()
    )
    assert made.log() == ["CommInitRankConfig nranks=4 rank=0", "CommAbort"]
    assert not made.comm


def test_the_orderly_end_finalizes_then_destroys(host):
    assert host.call("finalize") == 0
    assert host.call("destroy") == 0
    assert host.log() == ["CommFinalize", "CommDestroy"]


def test_destroy_alone_asks_nothing_of_nccl(host):
    """A communicator that was forgotten must not wait for other ranks."""
    assert host.call("destroy") == 0
    assert host.log() == []


def test_after_abort_calls_fail_and_the_end_is_quiet(host):
    assert host.call("abort") == 0
    assert host.call("abort") == 0
    assert host.call("allreduce", 64, 64, 7, FLOAT32, SUM, STREAM) == REMOTE
    assert "was aborted" in host.error
    assert host.call("finalize") == 0
    assert host.log() == ["CommAbort"]


def test_abort_that_never_ends_is_left_behind(stand_in):
    made = Host(stand_in("ABORT_SPINS"))
    start = time.monotonic()
    assert made.call("abort") == 0
    assert 4 < time.monotonic() - start < 40


def test_a_network_error_has_nccls_text(host):
    host.stand_in.stand_in_fail_with(6)
    try:
        assert host.call("async_error") == REMOTE
        assert "remote error. the stand-in was told to fail" in host.error
    finally:
        host.stand_in.stand_in_fail_with(0)


def test_split_gives_a_child_to_those_with_a_color_and_none_to_the_others(host):
    child = ctypes.c_void_p()
    assert host.call("split", 0, 0, ctypes.byref(child)) == 0
    assert child.value
    assert host.call("split", ctypes.c_int32(-1), 0, ctypes.byref(child)) == 0
    assert child.value is None
    assert host.log() == ["CommSplit color=0 key=0", "CommSplit color=-1 key=0"]


CAPTURES = """
import ctypes
import sys
from ctypes import RTLD_GLOBAL
from tests.communicator.backends.nccl.nccl_host import STREAM, Host
DEVICE_ERROR = 1
host = Host(sys.argv[1], mode=RTLD_GLOBAL)
assert host.code == 0, host.error
reduce = lambda count: host.call("allreduce", 64, 64, count, 7, 0, STREAM)
"""


def run_in_child(stand_in, code, *defines):
    """Runs code where the stand-in's CUDA functions are the process's own."""
    path = str(stand_in("CUDA", *defines))
    done = subprocess.run(
        [sys.executable, "-c", CAPTURES + code, path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_first_call_inside_a_capture_is_refused_and_a_known_one_is_captured(stand_in):
    run_in_child(
        stand_in,
        """
assert reduce(1000) == 0
host.stand_in.stand_in_capture(77)
host.log()
assert reduce(1000) == 0
assert len(host.log()) == 1
assert reduce(100_000) == 5, host.error
assert "400000 bytes would run for the first time inside the capture" in host.error
assert host.log() == []
""",
    )


def test_a_call_in_a_capture_that_has_failed_is_an_error_before_nccl_is_asked(stand_in):
    run_in_child(
        stand_in,
        """
assert reduce(1000) == 0
host.log()
host.stand_in.stand_in_capture(666)
assert reduce(1000) == DEVICE_ERROR and "CUDA's error 901" in host.error, host.error
assert host.log() == []
host.stand_in.stand_in_capture(0)
assert reduce(1000) == 0
""",
    )


@pytest.mark.parametrize("defines", [(), ("CAPTURE_V3",)], ids=["v2", "v3"])
def test_the_end_is_refused_while_a_graph_lives_and_the_communicator_stays_usable(
    stand_in, defines
):
    run_in_child(
        stand_in,
        """
assert reduce(10) == 0
for capture in (1, 2):
    host.stand_in.stand_in_capture(capture)
    assert reduce(10) == 0 and reduce(10) == 0
host.stand_in.stand_in_capture(0)
assert host.call("finalize") == 5
assert "2 CUDA graph(s)" in host.error and "reset()" in host.error, host.error
assert reduce(10) == 0
assert host.stand_in.stand_in_end_graphs(0) == 2
host.log()
assert host.call("finalize") == 0
assert host.log() == ["CommFinalize", "CommDestroy"]
""",
        *defines,
    )


@pytest.mark.parametrize(
    "function", ["cuStreamGetCaptureInfo_v2", "cuUserObjectCreate", "cuGraphRetainUserObject"]
)
def test_a_graph_that_cannot_be_counted_is_not_captured(stand_in, function):
    """Such a graph made close() wait for ever, or not at all."""
    run_in_child(
        stand_in,
        f"""
assert reduce(10) == 0
host.stand_in.stand_in_capture(1)
host.stand_in.stand_in_refuse(b"{function}")
host.log()
assert reduce(10) == DEVICE_ERROR
assert "failed on device 0 with CUDA's error 999" in host.error, host.error
assert host.log() == []
host.stand_in.stand_in_capture(0)
host.stand_in.stand_in_refuse(b"")
assert host.call("finalize") == 0, host.error
""",
    )


def test_a_device_that_cannot_be_set_is_an_error_before_nccl_is_asked(stand_in):
    run_in_child(
        stand_in,
        """
host.log()
host.stand_in.stand_in_refuse(b"cudaSetDevice")
there = Host(sys.argv[1], device=2)
assert there.code == DEVICE_ERROR and host.log() == []
""",
    )


def test_no_context_is_made_on_a_device_that_the_process_does_not_use(stand_in):
    """A rank that never chose its device had hundreds of MiB on GPU 0 besides."""
    run_in_child(
        stand_in,
        """
host.stand_in.stand_in_contexts(0)
there = Host(sys.argv[1], device=2)
assert there.code == 0
assert there.call("allreduce", 64, 64, 10, 7, 0, STREAM) == 0
assert host.stand_in.stand_in_has_contexts() == 0b100
host.stand_in.cudaSetDevice(1)
assert there.call("allreduce", 64, 64, 10, 7, 0, STREAM) == 0
ordinal = ctypes.c_int()
host.stand_in.cudaGetDevice(ctypes.byref(ordinal))
assert ordinal.value == 1  # it has a context, so it is restored
""",
    )


def test_a_graph_may_end_after_the_communicator(stand_in):
    run_in_child(
        stand_in,
        """
assert reduce(10) == 0
host.stand_in.stand_in_capture(1)
assert reduce(10) == 0
assert host.call("abort") == 0
assert host.call("destroy") == 0
assert host.stand_in.stand_in_end_graphs(0) == 1
""",
    )


def test_calls_captures_splits_failures_and_ends_come_in_any_order(stand_in):
    """Thousands of steps against a model: tests/communicator/programs/nccl_orders.py."""
    program = Path(nccl_host.HERE.parents[1], "programs", "nccl_orders.py")
    done = subprocess.run(
        [sys.executable, program, stand_in("CUDA", "POLLS=0")],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=nccl_host.HERE.parents[3],
        env=os.environ | {"PYTHONPATH": str(nccl_host.HERE.parents[3])},
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_float8_sums_need_a_chip_that_has_them(stand_in):
    run_in_child(
        stand_in,
        """
assert host.call("allreduce", 64, 64, 7, 10, 0, STREAM) == 0
host.stand_in.stand_in_chip(8)
old = Host(sys.argv[1])
assert old.call("allreduce", 64, 64, 7, 10, 0, STREAM) == 1000
assert "sm_90" in old.error, old.error
""",
    )


def test_the_barrier_is_an_allreduce_of_a_word_of_its_own(stand_in):
    run_in_child(
        stand_in,
        """
host.log()
assert host.call("barrier", STREAM) == 0
assert host.log() == ["AllReduce in_place=1 count=1 dtype=2 op=2 stream=0x5eed"]
""",
    )
