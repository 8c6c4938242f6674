"""The tcp backend: connections of our own. Killed ranks are in test_killed_ranks.py."""

import gc
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch.distributed import HashStore

from communicator import (
    Communicator,
    CommunicatorError,
    CommunicatorTimeout,
    PeerLost,
    conformance,
    timings,
)
from communicator.backends._tcp import Engine
from communicator.backends.byte_streams import SILENT_S
from communicator.backends.tcp import ConnectionLost
from communicator.calls.dtypes import DTYPES, OPS
from coordinator import Coordinator, DrumlineError
from tests.cases import soak

REDUCED = [row.torch for row in DTYPES if row.is_reduced and not row.torch.is_complex]
OPS_OF_BOOL = ("max", "min", "prod")


@pytest.mark.parametrize("world_size", [1, 3, soak(2), soak(5)])
def test_tcp_conforms(ranks, world_size):
    def body(info):
        with Coordinator(info, timeout_s=60) as coor, Communicator(coor, "tcp") as comm:
            report = conformance.check(comm)
            coor.barrier()
            return report.having(conformance.FAILED), report.having(conformance.UNSUPPORTED)

    assert ranks(body, world_size) == [([], [])] * world_size


@pytest.mark.parametrize(
    "numel", [4096, (1 << 20) + 3]
)  # below and above the size that is shared out
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_a_large_allreduce_has_the_bits_of_the_sum_in_order_of_rank(ranks, numel, op):
    rows = torch.randn(3, numel, generator=torch.Generator().manual_seed(0)).bfloat16()

    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, "tcp") as comm:
            kept, out = rows[comm.rank].clone(), torch.empty(numel, dtype=torch.bfloat16)
            comm.allreduce(kept, op, out=out)
            assert torch.equal(kept, rows[comm.rank])
            return out

    wide = rows.float()
    total = wide.amax(0) if op == "max" else wide[0] + wide[1] + wide[2]
    expected = (total / 3 if op == "avg" else total).bfloat16()
    assert all(torch.equal(found, expected) for found in ranks(body, 3))


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_a_reduction_has_the_bits_of_shared_memory(ranks, dtype):
    """Of every op, with few elements and many, the first time and again."""

    def body(info):
        with (
            Coordinator(info, timeout_s=60) as coor,
            Communicator(coor, "tcp", checked_calls=0) as tcp,
            Communicator(coor, "shm") as shm,
        ):
            seed = torch.Generator().manual_seed(coor.rank)
            for numel in (5, 50_021):
                tensor = (torch.randn(numel, generator=seed) * 8).to(dtype)
                for op in OPS_OF_BOOL if dtype == torch.bool else OPS:
                    if op == "avg" and not dtype.is_floating_point:
                        continue
                    expected = shm.allreduce(tensor.clone(), op).view(torch.uint8)
                    for _ in range(2):
                        out = tcp.allreduce(tensor, op, out=torch.empty_like(tensor))
                        assert torch.equal(out.view(torch.uint8), expected), (numel, op)
                    tcp.reduce(tensor, 1, op)
                    if coor.rank == 1:
                        assert torch.equal(tensor.view(torch.uint8), expected), (numel, op)

    ranks(body, 3)


def test_a_mismatch_with_a_call_that_was_made_before_raises_on_all_ranks(ranks):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            comm = Communicator(coor, "tcp", timeout_s=10, checked_calls=0)
            for _ in range(3):
                assert comm.allreduce(torch.ones(3)).tolist() == [3.0] * 3
            with pytest.raises(DrumlineError, match=r"disagree.*allreduce of .*allreduce of"):
                comm.allreduce(torch.ones(3), "max" if comm.rank == 2 else "sum")
            with pytest.raises(DrumlineError, match="disagree"):  # it is of no more use
                comm.allreduce(torch.ones(3))
            coor.barrier()

    ranks(body, 3)


def test_large_allreduces_of_any_kind_after_one_another_do_not_meet(ranks):
    """They share room that is kept from call to call, but for the last, which needs too much."""
    kinds = [
        (torch.float32, 600_011),
        (torch.int8, 4_000_003),
        (torch.float64, 300_007),
        (torch.float32, 5_000_000),
    ]

    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, "tcp") as comm:
            for dtype, numel in kinds:
                ramp = torch.arange(numel) % 7
                found = comm.allreduce((ramp + comm.rank).to(dtype))
                assert torch.equal(found, (3 * ramp + 3).to(dtype)), dtype

    ranks(body, 3)


def test_a_message_at_any_time_that_does_not_fit_is_dropped_and_named(ranks):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, "tcp") as comm:
            if comm.rank == 0:
                for numel in (*[1] * 50, 100_000, 3):
                    comm.send(torch.ones(numel), 1)
                return None
            for _ in range(50):
                comm.recv(torch.zeros(1), 0)
            tensor = torch.zeros(5)
            with pytest.raises(CommunicatorError, match=r"\(100000,\) float32.*\(5,\) float32"):
                comm.recv(tensor, 0)
            return tensor.sum().item(), comm.recv(torch.zeros(3), 0).tolist()

    assert ranks(body, 2) == [None, (0.0, [1.0] * 3)]


def test_after_a_message_that_does_not_fit_none_is_read_from_the_middle_of_another(ranks):
    """The rest of the group waited until the deadline, and then the next message went into it."""
    large = 8_000_000  # more than the system keeps on its way

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            comm = Communicator(coor, "tcp")
            comm.set_timeout(0.5)  # of the calls: to open takes as long as it takes
            if comm.rank == 0:
                coor.barrier()
                with (
                    pytest.raises(CommunicatorError, match=r"\(3,\) float32.*of no use"),
                    comm.group(),
                ):
                    comm.send(torch.zeros(large), 1)
                    comm.recv(torch.zeros(5), 1)
                coor.barrier()
                with pytest.raises(CommunicatorError, match="of no use"):
                    comm.send(torch.ones(3), 1)
            else:
                comm.send(torch.ones(3), 0)
                coor.barrier()
                coor.barrier()
                tensor = torch.zeros(large)
                with pytest.raises(PeerLost):
                    comm.recv(tensor, 0)
                return tensor.any().item()

    assert ranks(body, 2) == [None, False]


@pytest.mark.parametrize("numel", [3, 1 << 20])  # a large one is shared out
@pytest.mark.parametrize(
    "theirs", [("max", torch.float32, 0), ("sum", torch.int32, 0), ("sum", torch.float32, 1)]
)
def test_mismatched_calls_raise_after_the_first_calls_too(ranks, numel, theirs):
    """After the first calls they had rank 0's op, or waited for each other."""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            comm = Communicator(coor, "tcp", timeout_s=5, checked_calls=0)
            op, dtype, less = theirs if comm.rank == 2 else ("sum", torch.float32, 0)
            with pytest.raises(DrumlineError, match=r"disagree.*allreduce of .*allreduce of"):
                comm.allreduce(torch.ones(numel - less, dtype=dtype), op)
            coor.barrier()

    ranks(body, 3)


@pytest.mark.parametrize("num_parts", [500, 8000])
def test_a_call_of_many_unequal_parts_is_named_in_messages(ranks, num_parts):
    """Receivers refuse a text of more than 4096 bytes, and so the call of a few hundred ranks."""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, "tcp") as comm:
            comm._backend.name_call(f"allgather of float32 in parts of {[12345678] * num_parts}")
            comm._backend.barrier()
            return comm.allreduce(torch.ones(1)).item()

    assert ranks(body, 2) == [2.0, 2.0]


def test_a_mismatch_raises_on_a_rank_with_an_empty_tensor_too(ranks):
    """It returned at once, and the others lost it."""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            comm = Communicator(coor, "tcp", timeout_s=5, checked_calls=0)
            with pytest.raises(DrumlineError, match=r"disagree.*\(0,\) float32 sum"):
                comm.allreduce(torch.ones(3 if comm.rank == 1 else 0))
            coor.barrier()

    ranks(body, 3)


def test_both_directions_go_on_while_a_group_waits_for_somebody_else(ranks):
    """Each rank sends far more than the system keeps on its way, and to one that sends to it."""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, "tcp") as comm:
            found = {src: torch.zeros(3_000_000) for src in range(3) if src != comm.rank}
            with comm.group():
                for dst in found:
                    comm.send(torch.full((3_000_000,), float(comm.rank)), dst)
                for src, tensor in found.items():
                    comm.recv(tensor, src)
            return all((tensor == src).all() for src, tensor in found.items())

    assert ranks(body, 3) == [True] * 3


def test_two_threads_send_and_receive_at_the_same_time(ranks):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, "tcp") as comm:
            other, data = 1 - comm.rank, torch.full((5_000_000,), float(comm.rank))
            sender = threading.Thread(target=comm.send, args=(data, other))
            sender.start()
            found = comm.recv(torch.zeros(5_000_000), other)
            sender.join()
            return bool((found == other).all())

    assert ranks(body, 2) == [True] * 2


def test_nobody_comes_before_the_deadline_and_then_it_is_over(ranks):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            comm = Communicator(coor, "tcp")
            comm.set_timeout(0.5)  # of the calls: to open takes as long as it takes
            if comm.rank == 0:
                with pytest.raises(CommunicatorTimeout, match=r"0\.5 s in recv from rank 1"):
                    comm.recv(torch.ones(1), 1)
                with pytest.raises(CommunicatorTimeout):  # what comes now could be anything
                    comm.recv(torch.ones(1), 1)
            coor.barrier()
            if comm.rank == 1:
                first_cause = r"rank 0 timed out after 0\.5 s in recv.*\? Start all"
                with pytest.raises(PeerLost, match=first_cause):
                    comm.recv(torch.ones(1), 0)

    ranks(body, 2)


def test_deadline_passes_although_a_signal_comes_often():
    """It began anew after each signal, as a profiler's timer sends them; then each was a look."""
    store, limit_s, looks = HashStore(), time.monotonic() + 8, []

    def rank_of(rank):
        with Coordinator.over(store, rank, 2, timeout_s=20) as coor:
            comm = Communicator(coor, "tcp")
            comm.set_timeout(0.5)  # of the calls: to open takes as long as it takes
            if rank == 0:
                check = comm._backend._check_wait
                comm._backend._check_wait = lambda *args: looks.append(args[1]) or check(*args)
                signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
                with pytest.raises(CommunicatorTimeout, match="waited for rank 1"):
                    comm.recv(torch.ones(1), 1)
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert 1 <= len(looks) <= looks[-1] / timings.TIMINGS.liveness_poll_s
            coor.barrier()

    def handler(*_):
        assert time.monotonic() < limit_s

    before = signal.signal(signal.SIGALRM, handler)
    peer = threading.Thread(target=rank_of, args=(1,))
    peer.start()
    try:
        rank_of(0)  # in the main thread, which handles signals
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        peer.join()


def test_a_peer_whose_bytes_come_is_not_idle_although_a_signal_comes_often():
    """Only a message that was whole counted, so that a long one ended at its deadline."""
    nbytes, idle = 60, []
    here, there = socket.socketpair()
    engine = Engine(0, [-1, here.detach()], [b"", b""], 0.5)
    text = f"({nbytes},) uint8".encode()
    there.sendall(struct.pack("<QI", nbytes, len(text)) + text)
    before = signal.signal(signal.SIGALRM, lambda *_: there.send(b"\7"))
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    signal.setitimer(signal.ITIMER_REAL, 0.03, 0.03)
    try:
        engine.recv(tensor, 1, lambda peers, _: idle.append(peers))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        engine.close()
        there.close()
    assert idle == [] and tensor.eq(7).all()


@pytest.mark.soak
def test_a_peer_that_is_late_to_receive_is_no_network_failure(ranks):
    """The kernel ended the connection, with five seconds of what no buffer had room for."""

    def body(info):
        with Coordinator(info, timeout_s=60) as coor, Communicator(coor, "tcp") as comm:
            if comm.rank == 0:
                return comm.send(torch.ones(10_000_000), 1)
            time.sleep(2 * SILENT_S)
            return comm.recv(torch.zeros(10_000_000), 0).sum().item()

    assert ranks(body, 2) == [None, 1e7]


def test_late_rank_is_named_and_hears_of_it_although_it_only_sends(ranks):
    """Its message was taken by the system, where nobody read it."""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            comm = Communicator(coor, "tcp", checked_calls=0)
            comm.set_timeout(0.5)
            if comm.rank != 1:
                with pytest.raises(CommunicatorTimeout, match=r"0\.5 s in broadcast.*for rank 1 "):
                    comm.broadcast(torch.ones(1), 1)
            coor.barrier()
            if comm.rank == 1:
                with pytest.raises(PeerLost, match=r"rank 0 timed out .* waited for rank 1 "):
                    comm.broadcast(torch.ones(1), 1)

    ranks(body, 2)


def test_a_communicator_that_could_not_connect_is_closed_in_silence(ranks, monkeypatch):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    def refuse(*_, **__):
        raise ConnectionRefusedError

    monkeypatch.setattr(Coordinator, "connections", refuse)

    def body(info):
        with Coordinator(info, timeout_s=20) as coor, pytest.raises(ConnectionRefusedError):
            Communicator(coor, "tcp")

    ranks(body, 2)
    gc.collect()
    assert unraisable == []


def test_a_rank_that_leaves_is_named_by_all(ranks_or_errors):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, "tcp") as comm:
            comm.barrier()
            if comm.rank != 1:
                comm.allreduce(torch.ones(4))

    begun = time.monotonic()
    found = ranks_or_errors(body, 3)
    assert time.monotonic() - begun < 15 and found[1] is None
    assert all(isinstance(each, PeerLost) for each in (found[0], found[2]))
    assert all("rank 1 closed its communicator" in str(each) for each in (found[0], found[2]))


@pytest.mark.parametrize("how", ["close", "abort"])
def test_who_ends_the_wait_of_another_thread_blames_nobody_else(ranks, how):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            comm = Communicator(coor, "tcp")
            coor.barrier()
            if comm.rank == 0:
                threading.Timer(0.2, getattr(comm, how)).start()
            cause = "rank 1 lost rank 0 .*: rank 0" if comm.rank else "rank 0"
            too_late = "|^rank 0: recv on a closed"  # to wait, where the timer came first
            with pytest.raises(
                DrumlineError, match=rf"^{cause} {how}e?d its communicator{too_late}"
            ):
                comm.recv(torch.ones(1), 1 - comm.rank)
            coor.barrier()
            comm.close()

    ranks(body, 2)


def test_what_a_peer_sends_just_before_it_ends_is_received(ranks):
    """It counted as lost, where it did so after the last look at its connection."""
    process = subprocess.Popen(["true"])
    process.wait()
    has_looked, has_sent = threading.Event(), threading.Event()

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            comm = Communicator(coor, "tcp")
            if comm.rank == 1:
                assert has_looked.wait(20)
                comm.send(torch.ones(3), 0)
                return has_sent.set()
            check = comm._backend._check_wait

            def end_and_check(*arguments):
                has_looked.set()
                assert has_sent.wait(20)
                coor.peers = (coor.peers[0], replace(coor.peers[1], pid=process.pid, start_ticks=1))
                check(*arguments)

            comm._backend._check_wait = end_and_check
            assert comm.recv(torch.zeros(3), 1).tolist() == [1.0] * 3
            with pytest.raises(PeerLost):
                comm.recv(torch.zeros(3), 1)

    ranks(body, 2)


def test_each_peer_that_is_lost_is_waited_for_once_more(ranks):
    """After the first one that was lost, what others had sent just before their end was lost."""
    process = subprocess.Popen(["true"])
    process.wait()

    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, "tcp") as comm:
            coor.barrier()
            if comm.rank == 0:
                ended = (replace(peer, pid=process.pid, start_ticks=1) for peer in coor.peers[1:])
                coor.peers = (coor.peers[0], *ended)
                comm._backend._check_wait([1], 0.1)
                comm._backend._check_wait([2], 0.1)
                for peer in (1, 2):
                    with pytest.raises(ConnectionLost, match="it died"):
                        comm._backend._check_wait([peer], 0.1)

    ranks(body, 3)


def test_who_closes_while_another_thread_sends_is_named_by_its_error(ranks):
    """It was EBADF, of asking the connection that was closed meanwhile why it had ended."""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            comm = Communicator(coor, "tcp")
            if comm.rank == 0:
                threading.Timer(0.3, comm.close).start()
                too_late = "|^rank 0: send on a closed"  # where the timer came first
                with pytest.raises(CommunicatorError, match=f"^rank 0 closed its{too_late}"):
                    comm.send(torch.ones(5_000_000), 1)
            coor.barrier()
            comm.close()

    ranks(body, 2)


@pytest.mark.parametrize("how", ["close", "abort"])
def test_a_sender_that_waits_for_room_hears_that_the_receiver_has_ended(ranks, how):
    """It waited for its deadline, or for the system's, as the receiver's had no room for more."""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            comm = Communicator(coor, "tcp")
            comm.set_timeout(5.0)  # of the calls: to open takes as long as it takes
            if comm.rank == 0:
                with pytest.raises(PeerLost, match=f"rank 1 {how}e?d its communicator"):
                    comm.send(torch.ones(5_000_000), 1)
            else:
                time.sleep(0.3)
                getattr(comm, how)()
            coor.barrier()
            comm.close()

    ranks(body, 2)


def test_a_long_reason_for_the_end_is_cut_and_told_in_any_letters(ranks):
    """It was cut amid a letter, and the peer raised UnicodeDecodeError; or it was not sent."""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            comm = Communicator(coor, "tcp")
            if comm.rank == 0:
                comm._backend._end("x" + "é" * 3000 + "\udcff")
            else:
                with pytest.raises(PeerLost, match=r"xé{2000}"):
                    comm.recv(torch.ones(1), 0)
            coor.barrier()
            comm.close()

    ranks(body, 2)
