"""The errors of deadlines say where the other ranks are, and which of them wait for each other."""

import re
import time
from pathlib import Path

import pytest
import torch

from communicator import Communicator, CommunicatorTimeout, PeerLost
from coordinator import Coordinator

PROGRAM = Path(__file__).parent / "programs" / "stuck.py"
LINES = PROGRAM.read_text().splitlines()


def line(text):
    (number,) = (i for i, found in enumerate(LINES, 1) if found.endswith(f"# of {text}"))
    return f"(stuck.py:{number})"


@pytest.fixture
def report(warm):
    """Call report(nprocs, *arguments): what the launch of the program says."""
    return lambda nprocs, *arguments: (
        warm.run("-m", "launcher", "run", "-n", nprocs, PROGRAM, *arguments).stderr
    )


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_circle_of_receives_is_a_deadlock_told_with_every_line(report, backend):
    text = report(3, backend, "ring")
    waits = [f"rank {n} waits in recv from rank {(n + 1) % 3} {line('ring')}" for n in range(3)]
    circles = [", and ".join([*waits[n:], *waits[:n]]) for n in range(3)]
    assert any(f"Deadlock: {circle}. Let one of them send first" in text for circle in circles), (
        text
    )
    assert "What `isend` has sent, `irecv` receives" in text


@pytest.mark.parametrize("first", ["0", "1"])
def test_a_collective_against_a_receive_is_a_deadlock(report, first):
    text = report(2, "shm", "collective", first)
    message = f"rank 1 waits in recv from rank 0 {line('message')}"
    collective = f"rank 0 waits in allreduce {line('collective')}"
    ways = [f"Deadlock: {message}, and {collective}", f"Deadlock: {collective}, and {message}"]
    assert any(way in text for way in ways), text


def test_a_late_rank_is_shown_with_its_call_its_line_and_its_stack(report):
    text = report(2, "shm", "late")
    call = r"rank 1 \(host \S+, pid \d+, last seen [\d.]+ s ago in \w+ #\d+, .*\) is here:"
    assert re.search(call, text), text
    number = line("late").strip("()").partition(":")[2]
    assert f"line {number}, in late: time.sleep(8)" in text


def test_a_recv_of_a_socket_is_not_taken_for_one_of_ours(report):
    text = report(2, "shm", "other_recv")
    number = line("other").strip("()").partition(":")[2]
    assert f"line {number}, in other_recv: ends[0].recv(1)" in text, text
    assert "Deadlock" not in text, text


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_rank_that_closes_first_has_made_fewer_calls(report, backend):
    text = report(2, backend, "fewer")
    assert "It made fewer calls" in text and "first error" not in text, text


def test_a_signal_ends_a_wait_before_the_deadline(report):
    text = report(2, "tcp", "interrupted")
    assert "interrupted" in text and "timed out" not in text, text


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("tcp", "in recv from rank 1 (tcp, 2 ranks): rank 1 closed its communicator"),
        ("gloo", "in recv from rank 1 (gloo, 2 ranks)"),
        ("shm", "rank 3, in the group of rank 1, rank 3, numbered from 0 here: rank 1: "),
    ],
)
def test_ranks_of_a_part_of_the_launch_are_named_as_the_launch_numbers_them(ranks, backend, text):
    def receive_from_a_rank_that_closes(info):
        with Coordinator(info, timeout_s=60) as coor:
            part = coor.split([1, 3])
            if part is not None:
                with part, Communicator(part, backend) as comm:
                    part.barrier()  # gloo's has opened on one before the other
                    if coor.rank == 1:
                        comm.close()
                    else:
                        # gloo may notice the loss while it waits, and knows it the second time.
                        for _ in range(2 if backend == "gloo" else 1):
                            with pytest.raises(PeerLost, match=re.escape(text)):
                                comm.recv(torch.ones(1), 0)
                    part.barrier()
            coor.barrier()

    ranks(receive_from_a_rank_that_closes, 4)


def test_errors_of_arguments_in_a_part_of_the_launch_number_ranks_as_the_launch_does(ranks):
    """They counted within the group, beside errors that did not."""
    wrong_calls = {
        "allreduce": lambda comm: comm.allreduce(torch.ones(4)[::2]),
        "broadcast": lambda comm: comm.broadcast(torch.ones(1), 7),
        "reduce": lambda comm: comm.reduce(torch.ones(1), op="median"),
        "send": lambda comm: comm.send(torch.ones(1), comm.rank),
        "alltoall": lambda comm: comm.alltoall(torch.ones(3)),
        "recv": lambda comm: comm.recv([1.0], 0),
    }

    def call_all_wrongly(info):
        with Coordinator(info, timeout_s=60) as coor:
            part = coor.split([3, 1])
            if part is not None:
                for backend in ("shm", "tcp", "gloo"):
                    with Communicator(part, backend) as comm:
                        for call, make in wrong_calls.items():
                            with pytest.raises((ValueError, TypeError)) as raised:
                                make(comm)
                            start = f"rank {info.rank}, {call}: "
                            assert str(raised.value).startswith(start), raised.value
                part.close()
            coor.barrier()

    ranks(call_all_wrongly, 4)


@pytest.mark.parametrize(
    ("backend", "nodes"), [("shm", [2]), ("tcp", [2]), ("gloo", [2]), ("hybrid", [2, 2])]
)
def test_another_deadline_holds_from_the_next_call_on(ranks, backend, nodes):
    def body(info):
        with Coordinator(info, timeout_s=60) as coor:
            comm = Communicator(coor, backend, timeout_s=60)
            comm.barrier()
            comm.set_timeout(0.25)
            if comm.rank == 0:
                begun = time.monotonic()
                with pytest.raises(CommunicatorTimeout):
                    comm.recv(torch.ones(1), 1)
                assert time.monotonic() - begun < 30
            coor.barrier()

    ranks(body, sum(nodes), nodes)
