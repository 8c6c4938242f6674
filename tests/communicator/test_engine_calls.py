"""What an engine asks of a communicator beside the collectives that every backend has."""

import math
import threading

import numpy
import pytest
import torch
from torch.distributed import HashStore, ProcessGroup

from communicator import Communicator, CommunicatorError, CommunicatorTimeout, PeerLost
from communicator.backends.shm import Shm
from communicator.p2p import async_messages
from coordinator import Coordinator, CoordinatorError, DrumlineError
from launcher import LaunchInfo

BACKENDS = ("shm", "tcp")


@pytest.fixture(params=BACKENDS)
def on_ranks(ranks, request):
    """on_ranks(body, n): body(comm) on n ranks, over either kind of backend."""

    def run(body, world_size=3):
        def rank(info):
            with (
                Coordinator(info, timeout_s=30) as coor,
                Communicator(coor, request.param, timeout_s=30) as comm,
            ):
                result = body(comm)
                coor.barrier()
                return result

        return ranks(rank, world_size)

    return run


def test_ranks_that_share_a_store_make_communicators_without_a_coordinator(ranks):
    store = HashStore()

    def body(info):
        totals = []
        for _ in range(2):  # the second finds the keys of the first
            with Communicator.over(store, info.rank, 3, timeout_s=30) as comm:
                totals.append(comm.allreduce(torch.full((3,), float(comm.rank))).tolist())
        return totals

    assert ranks(body, 3) == [[[3.0] * 3] * 2] * 3


def test_over_says_what_it_needs():
    with pytest.raises(TypeError, match="a torch ProcessGroup or a torch Store"):
        Communicator.over("localhost:29500")
    with pytest.raises(ValueError, match="the rank of this process"):
        Communicator.over(HashStore(), rank=2, world_size=2)
    with pytest.raises(ValueError, match=r"rank='0', world_size='1'\): pass the rank"):
        Communicator.over(HashStore(), "0", "1")  # as the environment has them
    with pytest.raises(TypeError, match=r"Communicator\(ProcessGroup\): needs a Coordinator"):
        Communicator(ProcessGroup(HashStore(), 0, 1))
    with pytest.raises(ValueError, match="the backend as backend="):
        Communicator.over(ProcessGroup(HashStore(), 0, 1), "tcp")


def test_messages_posted_in_any_order_meet(on_ranks):
    """Every rank posts its receives first, and works in collectives before it waits."""

    def body(comm):
        others = [rank for rank in range(comm.world_size) if rank != comm.rank]
        received = [comm.irecv(torch.zeros(5), src) for src in others]
        sent = [comm.isend(torch.full((5,), float(comm.rank)), dst) for dst in others]
        comm.barrier()
        values = [int(handle.wait(timeout_s=30)[4]) for handle in received]
        for handle in sent:
            handle.wait(timeout_s=30)
        return values == others and all(handle.is_completed() for handle in sent)

    assert on_ranks(body) == [True] * 3


def test_threads_that_send_first_open_one_set_of_streams(on_ranks):
    """Each opened its own over the same memory, and they took parts of each other's messages."""

    def body(comm):
        handles = []
        everyone = threading.Barrier(3)

        def move():
            everyone.wait(30)
            if comm.rank == 0:
                handles.extend([comm.isend(torch.ones(9), 1) for _ in range(20)])
            else:
                handles.extend([comm.irecv(torch.zeros(9), 0) for _ in range(20)])

        threads = [threading.Thread(target=move) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [handle.wait(timeout_s=30).tolist() for handle in handles]

    assert on_ranks(body, 2) == [[[1.0] * 9] * 60] * 2


def test_a_dict_is_not_received_inside_a_group(on_ranks):
    def body(comm):
        with pytest.raises(CommunicatorError, match=r"inside a group"), comm.group():
            comm.recv_tensors(0)

    on_ranks(body, 1)


def test_a_bounded_wait_for_a_message_leaves_it_to_come(on_ranks):
    asked = threading.Event()

    def body(comm):
        if comm.rank == 0:
            handle = comm.irecv(torch.zeros(2), 1)
            with pytest.raises(CommunicatorTimeout, match=r"rank 0 timed out after 0.05 s"):
                handle.wait(timeout_s=0.05)
            asked.set()
            return handle.wait().tolist()
        comm.irecv(torch.zeros(2), 0)  # opens the connections, where there are none
        assert asked.wait(30)
        comm.isend(torch.ones(2), 0).wait()
        return [1.0, 1.0]

    assert on_ranks(body, 2) == [[1.0, 1.0]] * 2


def test_collectives_that_were_started_run_in_order_and_before_those_that_are_called(on_ranks):
    def body(comm):
        tensor = torch.ones(3)
        handles = [comm.start("allreduce", tensor) for _ in range(3)]
        comm.allreduce(tensor)  # the fourth
        gathered = comm.start("allgather", torch.tensor([float(comm.rank)]), dim=0)
        gathered.wait(timeout_s=30).add_(1)  # no tensor of inference mode
        assert handles[2].wait(timeout_s=30) is tensor
        return tensor.tolist() + gathered.wait().tolist()

    assert on_ranks(body) == [[81.0] * 3 + [1.0, 2.0, 3.0]] * 3


def test_a_call_that_is_started_under_no_grad_takes_what_the_call_itself_takes(on_ranks):
    """Its thread had gradients on, so a weight was refused."""

    def body(comm):
        weight = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            handle = comm.start("allreduce", weight)
        assert handle.wait(timeout_s=30) is weight
        with pytest.raises(ValueError, match="autograd does not see"):
            comm.start("allreduce", weight).wait(timeout_s=30)
        return weight.tolist()

    assert on_ranks(body, 2) == [[2.0, 2.0]] * 2


def test_a_bounded_wait_for_a_collective_leaves_it_to_end(on_ranks):
    asked = threading.Event()

    def body(comm):
        if comm.rank == 1:
            assert asked.wait(30)
            return comm.start("gather", torch.ones(2), 0).wait()
        handle = comm.start("gather", torch.ones(2), 0)
        with pytest.raises(CommunicatorTimeout, match="still runs"):
            handle.wait(timeout_s=0.05)
        asked.set()
        return handle.wait().tolist()

    assert on_ranks(body, 2) == [[[1.0, 1.0]] * 2, None]


def test_a_call_is_declined_after_those_that_were_started(on_ranks):
    """It stood in for one of them, or went over the same connections at the same time."""
    has_declined = threading.Event()

    def body(comm):
        if comm.rank == 1:
            handle = comm.start("allreduce", torch.ones(2))
            threading.Timer(0.3, has_declined.set).start()
            comm.decline("of a mistake")
            assert handle.is_completed()
            return handle.wait().tolist()
        assert has_declined.wait(20)
        total = comm.start("allreduce", torch.ones(2)).wait().tolist()
        with pytest.raises(CommunicatorError, match="of a mistake"):
            comm.barrier()
        return total

    assert on_ranks(body, 2) == [[2.0, 2.0]] * 2


def test_abort_ends_messages_that_are_waited_for_and_later_ones(on_ranks):
    """Over connections of their own they were waited for until the deadline."""

    def body(comm):
        sent = comm.isend(torch.ones(1), 1 - comm.rank)
        comm.irecv(torch.zeros(1), 1 - comm.rank).wait()
        sent.wait()
        comm.coor.barrier()
        if comm.rank == 0:
            waiting = comm.irecv(torch.zeros(2), 1)
            threading.Timer(0.2, comm.abort).start()
            with pytest.raises(DrumlineError, match="aborted"):
                waiting.wait(timeout_s=5)
            with pytest.raises(DrumlineError, match="aborted"):
                comm.irecv(torch.zeros(2), 1).wait(timeout_s=5)

    on_ranks(body, 2)


def test_the_first_message_after_abort_raises_and_opens_nothing(on_ranks):
    """Over tcp it waited for ranks that never come, and broke their Coordinator."""

    def body(comm):
        if comm.rank == 0:
            comm.abort()
            with pytest.raises(DrumlineError, match="aborted"):
                comm.irecv(torch.zeros(2), 1)
            assert comm._messages is None

    on_ranks(body, 2)


def test_abort_ends_a_message_whose_connections_open_meanwhile(on_ranks, monkeypatch):
    opened = async_messages.open_messages

    def open_late(comm, backend):
        messages = opened(comm, backend)
        comm.abort()
        return messages

    def body(comm):
        with pytest.raises(DrumlineError, match="aborted"):
            comm.irecv(torch.zeros(2), 1 - comm.rank)

    monkeypatch.setattr(async_messages, "open_messages", open_late)
    on_ranks(body, 2)


@pytest.mark.parametrize("backend", ["shm", "tcp", "gloo"])
@pytest.mark.parametrize("limit_s", [math.inf, math.nan, -1, "5"])
def test_what_is_no_deadline_is_refused(backend, limit_s):
    """Over TCP calls had none from then on."""
    with Coordinator(LaunchInfo("alone")) as coor:
        with pytest.raises(ValueError, match="is not a deadline"):
            Communicator(coor, backend, timeout_s=limit_s)
        with Communicator(coor, backend) as comm:
            with pytest.raises(ValueError, match="is not a deadline"):
                comm.set_timeout(limit_s)
            assert comm.timeout_s == coor.timeout_s


@pytest.mark.parametrize("limit_s", [numpy.int64(60), numpy.float32(5)])
def test_a_deadline_may_be_a_number_of_numpy(limit_s):
    with (
        Coordinator(LaunchInfo("alone"), timeout_s=limit_s) as coor,
        Communicator(coor, "tcp", timeout_s=limit_s) as comm,
    ):
        comm.set_timeout(limit_s)
        assert type(comm.timeout_s) is float and comm.timeout_s == coor.timeout_s == limit_s


def test_only_collectives_can_be_started(on_ranks):
    def body(comm):
        with pytest.raises(ValueError, match="only allreduce, broadcast"):
            comm.start("send", torch.ones(1), 0)

    on_ranks(body, 1)


def test_some_ranks_in_another_order_are_a_communicator_of_the_same_backend(on_ranks):
    def body(comm):
        part = comm.split([2, 0])
        if part is None:
            return comm.rank
        with part:
            rows = part.gather(torch.tensor([comm.rank]), 0)
            return [
                part.backend == comm.backend,
                part.rank,
                None if rows is None else rows.tolist(),
            ]

    assert on_ranks(body) == [[True, 1, None], 1, [True, 0, [[2], [0]]]]


def test_a_part_has_the_deadline_of_the_whole_now_and_compares_as_many_calls():
    """It had that of the start, and compared the first 32."""
    with (
        Coordinator(LaunchInfo("alone")) as coor,
        Communicator(coor, "gloo", timeout_s=9, checked_calls=3) as comm,
    ):
        comm.set_timeout(5)
        with comm.split([0]) as part:
            assert (part.timeout_s, part.capabilities.checked_calls) == (5, 3)


def test_messages_heed_a_deadline_that_is_set_after_the_first_of_them(on_ranks):
    def body(comm):
        sent = comm.isend(torch.ones(1), 1 - comm.rank)
        comm.irecv(torch.zeros(1), 1 - comm.rank).wait()
        sent.wait()
        comm.set_timeout(0.25)
        if comm.rank == 0:
            with pytest.raises(CommunicatorTimeout, match=r"after 0.25 s"):
                comm.irecv(torch.zeros(1), 1).wait()

    on_ranks(body, 2)


SPARSE = (torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(), torch.eye(2).to_sparse_csc())


def test_a_dict_with_a_tensor_that_cannot_be_moved_is_an_error_on_both_sides(on_ranks):
    """Its receivers waited for their deadline, and took its sender for dead. Later they were told
    to give None, bool, int and so on; and of sparse tensors all were told torch's own words."""

    def body(comm):
        wrong = {"tensor": torch.ones(2, requires_grad=True)}
        if comm.rank == 0:
            with pytest.raises(ValueError, match="autograd"):
                comm.send_tensors(wrong, 1)
            with pytest.raises(ValueError, match="autograd"):
                comm.broadcast_tensors(wrong)
            for tensor in SPARSE:
                with pytest.raises(ValueError, match=r"rank 0.*layout torch.sparse.*to_dense\(\)"):
                    comm.send_tensors({"tensor": tensor}, 1)
        else:
            with pytest.raises(CoordinatorError, match=r"rank 0, send_tensors: .*no_grad\(\)\.$"):
                comm.recv_tensors(0)
            with pytest.raises(CoordinatorError, match=r"rank 0, broadcast_tensors: .*autograd"):
                comm.broadcast_tensors()
            for _ in SPARSE:
                with pytest.raises(CoordinatorError, match=r"layout torch.sparse.*to_dense\(\)\.$"):
                    comm.recv_tensors(0)
        return comm.allreduce(torch.ones(1)).item()

    assert on_ranks(body, 2) == [2.0, 2.0]


def test_a_wrong_dict_is_told_of_where_nobody_receives_it(on_ranks):
    def body(comm):
        if comm.rank == 0:
            comm.set_timeout(0.2)
            with pytest.raises(ValueError, match="autograd"):
                comm.send_tensors({"tensor": torch.ones(1 << 20, requires_grad=True)}, 1)
        comm.coor.barrier()

    on_ranks(body, 2)


def test_a_dict_that_cannot_be_sent_is_an_error_on_both_sides(on_ranks):
    def body(comm):
        if comm.rank == 0:
            with pytest.raises(ValueError, match="rank 0 gave a dict that cannot be sent"):
                comm.send_tensors({"tensor": torch.ones(2), "value": object()}, 1)
            comm.send(torch.ones(1), 1)  # nothing is left of the dict
        else:
            with pytest.raises(CoordinatorError, match=r"rank 0 gave a dict.*Beside tensors only"):
                comm.recv_tensors(0)
            comm.recv(torch.zeros(1), 0)

    on_ranks(body, 2)


UNREADABLE = (
    {("layer", 0): torch.ones(2)},
    {"lengths": {(1, 2): 3}, "tensor": torch.ones(2)},
    [torch.ones(2)],
)


def test_what_is_no_dict_is_an_error_on_both_sides(on_ranks):
    """Of a tensor torch raised that it is neither true nor false, and the others waited."""

    def body(comm):
        for wrong in (torch.ones(2), [], [torch.ones(2)], torch.tensor(0.0)):
            what = f"needs a dict of tensors, not {type(wrong).__name__}"
            if comm.rank == 0:
                with pytest.raises(TypeError, match=f"rank 0, broadcast_tensors: {what}"):
                    comm.broadcast_tensors(wrong)
                with pytest.raises(TypeError, match=f"rank 0, send_tensors: {what}"):
                    comm.send_tensors(wrong, 1)
            else:
                with pytest.raises(CoordinatorError, match=what):
                    comm.broadcast_tensors()
                with pytest.raises(CoordinatorError, match=what):
                    comm.recv_tensors(0)

    on_ranks(body, 2)


def test_a_dict_that_only_its_receivers_cannot_read_is_an_error_on_both_sides(on_ranks):
    """Its sender went on, and what it sent next was taken for one of its tensors."""

    def body(comm):
        for values in UNREADABLE:
            if comm.rank == 0:
                with pytest.raises((CoordinatorError, TypeError)):
                    comm.send_tensors(values, 1)
                with pytest.raises((CoordinatorError, TypeError)):
                    comm.broadcast_tensors(values)
                comm.send(torch.ones(1), 1)  # nothing is left of the dict
            else:
                with pytest.raises(CoordinatorError):
                    comm.recv_tensors(0)
                with pytest.raises(CoordinatorError):
                    comm.broadcast_tensors()
                comm.recv(torch.zeros(1), 0)

    on_ranks(body, 2)


def test_sizes_and_dims_that_do_not_fit_are_refused_before_anything_moves(on_ranks):
    def body(comm):
        tensor = torch.ones(4, 2)
        with pytest.raises(ValueError, match=r"sizes=\[4\] must be 2 counts"):
            comm.allgather(tensor, sizes=[4])
        for no_list in (4, torch.tensor([4, 4]), (4 for _ in range(2))):
            with pytest.raises(ValueError, match=r"rank \d, allgather: sizes=.* must be 2 counts"):
                comm.allgather(tensor, sizes=no_list)
            with pytest.raises(ValueError, match=r"rank \d, reduce_scatter: sizes=.* be 2 counts"):
                comm.reduce_scatter(tensor, sizes=no_list)
        with pytest.raises(ValueError, match=r"and 4 in sum"):
            comm.reduce_scatter(tensor, sizes=[1, 2])
        with pytest.raises(ValueError, match="cannot be cut evenly"):
            comm.reduce_scatter(torch.ones(3), dim=0)
        with pytest.raises(ValueError, match="dim=2 is none of"):
            comm.allgather(tensor, dim=2)
        with pytest.raises(ValueError, match="out= goes with neither"):
            comm.allgather(tensor, dim=0, out=torch.ones(8, 2))
        with pytest.raises(ValueError, match="rows of the rank that sends are None"):
            comm.scatter(tensor, None, comm.rank)
        with pytest.raises(
            ValueError, match=r"scatter: the rows are \(\(2, 4\), .* \(\(2, 4, 2\), "
        ):
            comm.scatter(tensor, torch.ones(2, 4), comm.rank)
        comm.barrier()

    on_ranks(body, 2)


def test_a_communicator_of_which_only_a_method_is_kept_says_why_it_is_closed(on_ranks):
    def body(comm):
        allreduce = Communicator(comm.coor, comm.backend).allreduce
        with pytest.raises(CommunicatorError, match="only methods are kept is closed"):
            allreduce(torch.ones(1))

    on_ranks(body, 2)


def test_closing_ends_what_was_started_and_later_calls_are_refused(on_ranks):
    """Over TCP all but the first were dropped; a call after that waited without end."""

    def body(comm):
        handles = [comm.start("allreduce", torch.ones(3)) for _ in range(20)]
        comm.close()
        assert [handle.wait(timeout_s=30).tolist() for handle in handles] == [[3.0] * 3] * 20
        with pytest.raises(CommunicatorError, match="closed"):
            comm.barrier()

    on_ranks(body)


class Unfinished(Shm):
    """As NCCL while a CUDA graph that captured its calls is alive; nor can a part of it open."""

    has_graph = True

    def finish(self):
        if self.has_graph:
            raise CommunicatorError("a graph is alive")
        return None

    def part_options(self, ranks):
        raise CommunicatorError("no part")

    def is_capturing(self):
        return getattr(self, "in_capture", False)


def test_calls_can_be_started_after_a_close_that_left_the_communicator_open():
    """Their thread had been ended before, so they waited without end."""
    with Coordinator(LaunchInfo("alone")) as coor:
        comm = Communicator(coor, Unfinished)
        comm.start("barrier").wait()
        with pytest.raises(CommunicatorError, match="a graph is alive"):
            comm.close()
        assert comm.start("allreduce", torch.ones(2)).wait(timeout_s=10).tolist() == [1, 1]
        comm._backend.has_graph = False
        comm.close()
        with pytest.raises(CommunicatorError, match="closed"):
            comm.start("barrier")


def test_a_split_that_fails_keeps_no_coordinator_and_one_in_a_capture_makes_none(monkeypatch):
    """The Coordinator of the part stayed open, and with it what it had connected."""
    parts = []
    split = Coordinator.split
    monkeypatch.setattr(Coordinator, "split", lambda *args: parts.append(split(*args)) or parts[-1])
    with Coordinator(LaunchInfo("alone")) as coor:
        comm = Communicator(coor, Unfinished)
        comm._backend.has_graph = False
        with pytest.raises(CommunicatorError, match="no part"):
            comm.split([0])
        assert [part._closed for part in parts] == [True]
        comm._backend.in_capture = True
        with pytest.raises(CommunicatorError, match="split inside the capture"):
            comm.split([0])
        assert len(parts) == 1
        comm.close()


def test_an_error_is_not_held_up_by_a_call_that_was_started(ranks):
    """Leaving the `with` waited for the other ranks, which may have waited for this one."""
    has_left = threading.Event()

    def rank(info):
        with Coordinator(info, timeout_s=30) as coor:
            try:
                with Communicator(coor, "shm", timeout_s=30) as comm:
                    if comm.rank == 1:
                        assert has_left.wait(20)
                        return comm.start("allreduce", torch.ones(2)).wait().tolist()
                    handle = comm.start("allreduce", torch.ones(2))
                    raise KeyError
            except KeyError:
                has_left.set()
                return handle.wait().tolist()

    assert ranks(rank, 2) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_an_error_the_others_hear_of_the_end_once_what_was_started_has_ended(ranks, backend):
    """Nothing was closed then, and they waited for their deadline."""
    has_left, has_heard = threading.Event(), threading.Event()

    def rank(info):
        with Coordinator(info, timeout_s=30) as coor:
            try:
                with Communicator(coor, backend, timeout_s=5) as comm:
                    if comm.rank == 0:
                        comm.start("allreduce", torch.ones(2))
                        raise KeyError
                    assert has_left.wait(20)
                    comm.allreduce(torch.ones(2))
                    with pytest.raises(PeerLost):
                        comm.barrier()
                    has_heard.set()
            except KeyError:
                has_left.set()
                assert has_heard.wait(20)

    ranks(rank, 2)


def test_handles_of_a_closed_communicator_are_refused(on_ranks):
    def body(comm):
        comm.close()
        for call in (
            lambda: comm.start("barrier"),
            lambda: comm.isend(torch.ones(1), 1 - comm.rank),
        ):
            with pytest.raises(CommunicatorError, match="closed"):
                call()

    on_ranks(body, 2)
