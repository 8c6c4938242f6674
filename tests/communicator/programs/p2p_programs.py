"""Programs of sends and receives that must not wait for each other, on gloo and then on drumline.

python p2p_programs.py FOLDER     # writes FOLDER/<program>: a traceback, or nothing
"""

import os
import sys
import time
from datetime import timedelta

import process_group_programs as programs
import pytest
import torch
import torch.distributed as dist
from process_group_programs import mine, program

from communicator import CommunicatorError, CommunicatorTimeout, PeerLost

programs.PROGRAMS.clear()
LARGE = 300_000  # elements: more than any buffer on the way holds


def from_rank(src, *shape, seed=0):
    """What mine() is on another rank."""
    generator = torch.Generator().manual_seed(100 * seed + src)
    return torch.randint(-8, 8, shape, generator=generator).float()


@program(2)
def receive_posted_before_a_collective_that_the_sender_enters_first():
    came, total = torch.zeros(LARGE), torch.ones(2)
    if dist.get_rank() == 0:
        work = dist.irecv(came, 1)
        dist.all_reduce(total)
        work.wait()
    else:
        dist.all_reduce(total)
        dist.send(mine(LARGE), 0)
    return [came, total]


@program(2)
def several_tensors_and_expanded_ones_are_refused():
    """The first of several was sent, and all numbers but one of an expanded tensor were lost."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for tensors in ([torch.ones(2)] * 2, []):
        for call in (backend.send, backend.recv):
            with pytest.raises((RuntimeError, ValueError)):
                call(tensors, peer, 0).wait()
    with pytest.raises((RuntimeError, ValueError)):
        dist.recv(torch.zeros(1).expand(3), peer)
    came = torch.zeros(3)
    dist.send(mine(3), peer) if rank == 0 else dist.recv(came, peer)
    return [came]


@program(2)
def receive_posted_before_one_that_is_waited_for_first():
    found = [torch.zeros(LARGE), torch.zeros(3)]
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    if rank == 0:
        last = dist.irecv(found[0], peer)
        dist.isend(mine(LARGE, seed=1), peer).wait()
        dist.send(mine(3, seed=2), peer)
        last.wait()
    else:
        dist.recv(found[0], peer)
        dist.recv(found[1], peer)
        dist.send(found[0] + 1, peer)
    return found


@program(3)
def receives_posted_from_two_peers_end_in_any_order():
    found = [torch.zeros(LARGE), torch.zeros(4)]
    rank = dist.get_rank()
    if rank == 0:
        works = [dist.irecv(tensor, src) for src, tensor in enumerate(found, 1)]
        works[1].wait()
        dist.send(torch.ones(1), 1)
        works[0].wait()
    elif rank == 1:
        dist.recv(torch.zeros(1), 0)
        dist.send(mine(LARGE), 0)
    else:
        dist.send(mine(4), 0)
    return found


@program(2)
def receive_posted_before_collectives_that_are_polled():
    came, total = torch.zeros(5), mine(LARGE)
    posted = dist.irecv(came, 0) if dist.get_rank() else None
    work = dist.all_reduce(total, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    if posted is None:
        dist.send(mine(5), 1)
    else:
        while dist.get_backend() != "gloo" and not posted.is_completed():
            time.sleep(0.001)
        posted.wait()
    return [came, total]


@program(3)
def ring_with_two_buffers_and_overlapped_sums():
    rank, world = dist.get_rank(), dist.get_world_size()
    block, sums = mine(LARGE), torch.zeros(LARGE)
    buffers = [torch.zeros(LARGE), torch.zeros(LARGE)]
    for step in range(2 * world):
        received = dist.irecv(buffers[step % 2], (rank - 1) % world)
        sent = dist.isend(block, (rank + 1) % world)
        sums += block
        dist.all_reduce(torch.ones(1))
        received.wait()
        sent.wait()
        block = buffers[step % 2].clone()
    return [sums, block]


@program(3)
def master_posts_receives_from_all_workers():
    rank, found = dist.get_rank(), [torch.zeros(LARGE) for _ in range(2)]
    if rank == 0:
        for task in range(3):
            works = [dist.irecv(tensor, src) for src, tensor in enumerate(found, 1)]
            for dst in (1, 2):
                dist.send(torch.full((LARGE,), float(task)), dst)
            for work in works:
                work.wait()
        return found
    for _ in range(3):
        task = torch.zeros(LARGE)
        dist.recv(task, 0)
        dist.send(task + rank, 0)
    return []


@program(3)
def master_serves_one_worker_at_a_time():
    rank = dist.get_rank()
    if rank == 0:
        found = [torch.zeros(3), torch.zeros(3)]
        works = [dist.irecv(tensor, src) for src, tensor in enumerate(found, 1)]
        for src in (2, 1):  # not the order in which the receives were posted
            dist.send(torch.ones(3), src)
            works[src - 1].wait()
        return found
    task = torch.zeros(3)
    dist.recv(task, 0)
    dist.send(task * rank, 0)
    return []


def two_groups():
    return dist.new_group([0, 1]), dist.new_group([0, 1])


@program(2)
def send_goes_while_its_rank_works_in_another_group():
    pair, other = two_groups()
    came, total = torch.zeros(LARGE), torch.ones(3)
    if dist.get_rank() == 0:
        work = dist.isend(mine(LARGE), 1, group=pair)
        dist.barrier(group=other)
        dist.all_reduce(total, group=other)
        work.wait()
    else:
        dist.recv(came, 0, group=pair)
        dist.barrier(group=other)
        dist.all_reduce(total, group=other)
    return [came, total]


@program(2)
def batch_goes_while_its_rank_works_in_another_group():
    _, other = two_groups()
    rank, came, total = dist.get_rank(), torch.zeros(LARGE), torch.ones(3)
    ops = [dist.P2POp(dist.isend, mine(LARGE), 1 - rank), dist.P2POp(dist.irecv, came, 1 - rank)]
    if rank == 0:
        works = dist.batch_isend_irecv(ops)
        dist.all_reduce(total, group=other)
    else:
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        works = []
        dist.all_reduce(total, group=other)
    for work in works:
        work.wait()
    return [came, total]


def received_before_the_sender_waits(size):
    """A signal through the store says that it was received."""
    store = dist.PrefixStore(f"signal {size}", dist.distributed_c10d._get_default_store())
    came = torch.zeros(size)
    if dist.get_rank() == 0:
        work = dist.isend(mine(size), 1)
        store.wait(["received"], timedelta(seconds=30))
        work.wait()
    else:
        dist.recv(came, 0)
        store.set("received", "yes")
    dist.barrier()
    store.delete_key("received")
    return [came]


@program(2)
def small_send_is_there_before_its_sender_does_anything_else():
    return received_before_the_sender_waits(7)


@program(2)
def large_send_goes_while_its_sender_does_nothing():
    return received_before_the_sender_waits(LARGE)


@program(2)
def tags_come_in_any_order():
    sizes = {1: LARGE, 2: 3, 3: 0, 4: LARGE, 5: 100}
    found = {tag: torch.zeros(size) for tag, size in sizes.items()}
    if dist.get_rank() == 0:
        works = [dist.isend(mine(size, seed=tag), 1, tag=tag) for tag, size in sizes.items()]
    else:
        works = [dist.irecv(found[tag], 0, tag=tag) for tag in (5, 4, 2)]
        for work in works:
            work.wait()
        works = [dist.irecv(found[tag], 0, tag=tag) for tag in (3, 1)]
    for work in works:
        work.wait()
    return list(found.values())


@program(3)
def messages_of_one_tag_keep_their_order():
    rank, found = dist.get_rank(), [torch.zeros(1 + i * 9000 % 50_000) for i in range(12)]
    if rank == 0:
        works = [
            dist.isend(torch.full_like(tensor, float(i)), dst, tag=i % 2)
            for i, tensor in enumerate(found)
            for dst in (1, 2)
        ]
    else:
        order = sorted(range(12), key=lambda i: i % 2)
        works = [dist.irecv(found[i], 0, tag=i % 2) for i in order]
    for work in reversed(works):
        work.wait()
    return found


@program(3)
def any_source_names_the_sender():
    rank, by_src = dist.get_rank(), {}
    pair = dist.new_group([2, 1])
    if rank == 0:
        for size in (LARGE, 4):
            for _ in range(2):
                tensor = torch.zeros(size)
                by_src[dist.recv(tensor, tag=size), size] = tensor
    else:
        works = [dist.isend(mine(size), 0, tag=size) for size in (4, LARGE)]
        for work in works:
            work.wait()
    if rank == 1:
        tensor = torch.zeros(3)
        src = dist.recv(tensor, group=pair, tag=9)
        assert src == 2
    elif rank == 2:
        dist.send(mine(3), 1, group=pair, tag=9)
    return [by_src[key] for key in sorted(by_src)]


@program(2)
def odd_tensors_travel():
    kinds = [torch.bfloat16, torch.bool, torch.complex64, torch.int64, torch.float8_e4m3fn]
    found = [torch.zeros(6, dtype=kind) for kind in kinds]
    columns, scalar = torch.zeros(4, 6), torch.tensor(0.0)
    strided = dist.get_backend() == "drumline"  # gloo refuses such
    if dist.get_rank() == 0:
        for kind in kinds:
            dist.send(mine(6).to(kind), 1)
        dist.send(torch.tensor(3.0), 1)
        if strided:
            dist.send(mine(6, 4).t()[:, ::2], 1)
    else:
        for tensor in found:
            dist.recv(tensor, 0)
        dist.recv(scalar, 0)
        if strided:
            dist.recv(columns[:, ::2], 0)
            assert torch.equal(columns[:, ::2], from_rank(0, 6, 4).t()[:, ::2])
    return [tensor.float() for tensor in found if not tensor.is_complex()] + [scalar]


def is_gloo():
    """True once all have connected: a rank of gloo that leaves before may end another's."""
    dist.barrier()
    return dist.get_backend() == "gloo"


def gives_up(kind, wait):
    """What wait() raises is of that kind: its text."""
    try:
        wait()
    except kind as error:
        return str(error)
    raise AssertionError("nobody noticed")


@program(2)
def wait_ends_at_its_deadline_and_the_message_may_come_later():
    if is_gloo():
        return []
    came = torch.zeros(3)
    if dist.get_rank() == 0:
        work = dist.irecv(came, 1)
        begun = time.monotonic()
        text = gives_up(CommunicatorTimeout, lambda: work.wait(timedelta(seconds=0.3)))
        assert time.monotonic() - begun > 0.2 and "timed out" in text and "rank 1" in text
        dist.barrier()
        work.wait()
        assert torch.equal(came, from_rank(1, 3))
    else:
        dist.barrier()
        dist.send(mine(3), 0)
    return []


@program(2)
def deadline_of_the_group_ends_a_receive_for_good():
    if is_gloo():
        return []
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    came, next_one = torch.zeros(3), torch.zeros(3)
    if dist.get_rank() == 0:
        text = gives_up(CommunicatorTimeout, dist.irecv(came, 1, group=pair).wait)
        assert "init_process_group(timeout=...)" in text
        dist.barrier()
        dist.barrier()  # it has been sent, for the deadline is short
        dist.recv(next_one, 1, group=pair)
        assert torch.equal(next_one, from_rank(1, 3)) and not came.any()
    else:
        dist.barrier()
        dist.send(mine(3), 0, group=pair)
        dist.barrier()
    return []


@program(2)
def message_that_does_not_fit_is_dropped_and_the_next_one_comes():
    if is_gloo():
        return []
    for size in (3, LARGE):
        came, whole = torch.ones(size + 1), torch.zeros(size, dtype=torch.float64)
        if dist.get_rank() == 0:
            dist.send(mine(size), 1)
            dist.send(mine(size).double(), 1)
        else:
            text = gives_up(CommunicatorError, lambda: dist.recv(came, 0))  # noqa: B023
            assert f"({size},) float32" in text and f"({size + 1},) float32" in text
            assert came.eq(1).all()
            dist.recv(whole, 0)
            assert torch.equal(whole, from_rank(0, size).double())
    return []


@program(2)
def sender_waits_once_the_receiver_has_buffered_enough():
    if is_gloo():
        return []
    size, count = 30_000 // 4, 1000  # 30 MB of small messages
    if dist.get_rank() == 0:
        dist.barrier()
        works = [dist.isend(torch.full((size,), float(i)), 1, tag=1) for i in range(count)]
        time.sleep(0.2)
        assert not works[-1].is_completed()
        dist.barrier()
        for work in works:
            work.wait()
    else:
        work = dist.irecv(torch.zeros(1), 0, tag=2)  # a reason to read what comes
        gives_up(CommunicatorTimeout, lambda: work.wait(timedelta(seconds=0.1)))
        dist.irecv(torch.zeros(1), 1, tag=3)  # of which nothing ever comes
        dist.barrier()
        time.sleep(0.2)
        dist.barrier()
        came = torch.zeros(size)
        for i in range(count):
            dist.recv(came, 0, tag=1)
            assert came.eq(i).all()
    return []


@program(2)
def message_is_received_though_more_than_is_buffered_comes_before():
    """Neither a receive nor the answer to an offer was read behind them: both ranks waited."""
    size, count, large = 30_000 // 4, 800, torch.ones(3 << 20)
    for other_comes_back in (False, True):
        came = torch.zeros(size)
        if dist.get_rank() == 0:
            works = [dist.isend(torch.full((size,), float(i)), 1, tag=1) for i in range(count)]
            dist.recv(large, 1) if other_comes_back else dist.send(large[:1], 1, tag=2)
            for work in works:
                work.wait()
            continue
        dist.isend(large, 0).wait() if other_comes_back else dist.recv(came[:1], 0, tag=2)
        for i in range(count):
            dist.recv(came, 0, tag=1)
            assert came.eq(i).all()
    return []


@program(2)
def more_than_is_buffered_is_received_after_its_sender_has_left():
    if is_gloo():
        return []
    size, count = 30_000 // 4, 580  # 17.4 MB: the buffers, and most of what is on the way
    if dist.get_rank() == 0:
        for work in [dist.isend(torch.full((size,), float(i)), 1, tag=1) for i in range(count)]:
            work.wait()
        return []
    gives_up(PeerLost, dist.irecv(torch.zeros(1), 0, tag=2).wait)
    came = torch.zeros(size)
    for i in range(count):
        dist.recv(came, 0, tag=1)
        assert came.eq(i).all(), (i, came)
    gives_up(PeerLost, lambda: dist.recv(came, 0, tag=1))
    return []


@program(3)
def messages_end_when_their_peer_ends():
    if is_gloo():
        return []
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    begun = time.monotonic()
    works = [dist.irecv(torch.zeros(3), 1), dist.isend(torch.zeros(LARGE), 1)]
    works.append(dist.distributed_c10d._get_default_group().recv_anysource([torch.zeros(1)], 5))
    for work in works:
        text = gives_up(PeerLost, work.wait)
        assert "rank 1" in text and "pid" in text and ("recv" in text or "send" in text)
    assert time.monotonic() - begun < 15
    other = 2 - dist.get_rank()
    came = torch.zeros(LARGE)
    work = dist.isend(mine(LARGE), other)
    dist.recv(came, other)
    work.wait()
    assert torch.equal(came, from_rank(other, LARGE))
    os._exit(0)


@program(2)
def what_was_sent_before_the_end_still_comes():
    if is_gloo():
        return []
    pair = dist.new_group([0, 1])
    store = dist.PrefixStore("end", dist.distributed_c10d._get_default_store())
    if dist.get_rank() == 0:
        dist.send(mine(3), 1, group=pair)
        dist.destroy_process_group(pair)
        store.set("over", "yes")
    else:
        store.wait(["over"])
        came = torch.zeros(3)
        dist.recv(came, 0, group=pair)
        assert torch.equal(came, from_rank(0, 3))
        text = gives_up(PeerLost, lambda: dist.recv(came, 0, group=pair))
        assert "rank 0" in text
        dist.destroy_process_group(pair)
    dist.barrier()
    store.delete_key("over")
    return []


@program(2)
def future_of_a_receive_runs_what_follows():
    if is_gloo():
        return []
    came, reply = torch.zeros(2), torch.zeros(2)
    if dist.get_rank() == 0:
        future = dist.irecv(came, 1).get_future().then(lambda _: dist.send(came + 1, 1))
        future.wait()
    else:
        work = dist.irecv(reply, 0)
        dist.send(mine(2), 0)
        work.wait()
        assert torch.equal(reply, mine(2) + 1)
    return []


if __name__ == "__main__":
    for each in programs.PROGRAMS:
        if not sys.argv[2:] or each in sys.argv[2:]:
            begun = time.monotonic()
            programs.run(each, sys.argv[1])
            if sys.argv[2:] or os.environ.get("VERBOSE"):
                print(f"{time.monotonic() - begun:.2f} s {each}", flush=True)
