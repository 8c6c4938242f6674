"""What stands before the calls of a communicator: in one order, and gone once it is removed."""

import gc
import os
import threading
import weakref

import pytest
import torch

from communicator import Communicator, CommunicatorError
from communicator.backends.gloo import Gloo
from communicator.backends.hierarchical import Hierarchical
from communicator.backends.shm import Shm
from communicator.backends.tcp import Tcp
from communicator.interceptors import forks
from communicator.interceptors.interceptor import CALLS, Interceptor, Order
from coordinator import Coordinator
from launcher import LaunchInfo


class Note(Interceptor):
    """Notes in a list of all when a call comes by."""

    def __init__(self, order, passed):
        self.order, self._passed = order, passed

    def around(self, name, call):
        def noted(*args, **kwargs):
            self._passed.append((self.order, name))
            return call(*args, **kwargs)

        return noted


@pytest.fixture(params=["shm", "tcp"])
def comm(request):
    with Coordinator(LaunchInfo("alone")) as coor, Communicator(coor, request.param) as comm:
        yield comm


def test_interceptors_are_done_in_their_order_whichever_was_added_first(comm):
    for orders in (list(Order), list(reversed(Order))):
        passed, notes = [], []
        for order in orders:
            notes.append(Note(order, passed))
            notes[-1].install(comm)
        assert comm.allreduce(torch.ones(2), "max").tolist() == [1, 1]
        comm.barrier()
        assert passed == [(order, call) for call in ("allreduce", "barrier") for order in Order]
        for note in notes:
            note.remove()
            note.remove()


def test_a_call_is_as_it_was_once_what_stood_before_it_is_removed_in_any_order(comm):
    """A checker that left after a viewer had come put the wrong method back."""
    before = {name: getattr(comm, name) for name in CALLS}
    notes = [Note(order, []) for order in (Order.COMPARE, Order.COUNT, Order.JOIN)]
    for note in notes:
        note.install(comm)
    assert all(getattr(comm, name) != call for name, call in before.items())
    for note in notes:
        note.remove()
    assert {name: getattr(comm, name) for name in CALLS} == before
    assert (
        comm.name != "shm" or comm.allreduce == comm._backend._comm.allreduce
    )  # no Python between


def test_an_interceptor_keeps_no_communicator_alive(comm):
    note = Note(Order.TRACE, [])
    other = Communicator(comm.coor, comm.backend)
    note.install(other)
    gone = weakref.ref(other)
    other.close()
    del other
    gc.collect()
    assert gone() is None
    note.remove()


@pytest.mark.parametrize("kind", [Tcp, Hierarchical])
def test_a_backend_that_is_not_open_yet_is_refused_in_a_forked_child(kind):
    """Its AttributeError kept the child from refusing the other communicators."""
    with Coordinator(LaunchInfo("alone")) as coor:
        backend = kind(coor)
        backend.disown(CommunicatorError("forked"))
        with pytest.raises(CommunicatorError, match="forked"):
            backend.check_open("barrier")


@pytest.mark.parametrize("kind", [Gloo, Hierarchical, Shm, Tcp])
def test_a_backend_whose_options_were_wrong_is_closed_in_silence(kind):
    """Its AttributeError was printed as one that nobody could catch."""
    with Coordinator(LaunchInfo("alone")) as coor:
        kind(coor).close()


class Leaving(Shm):
    def leave(self):
        os._exit(9)


def test_an_exception_in_a_forked_child_does_not_end_the_communicator_of_its_parent():
    with Coordinator(LaunchInfo("alone")) as coor, Communicator(coor, Leaving) as comm:
        child = os.fork()
        if child == 0:
            comm.__exit__(SystemExit, SystemExit(), None)
            os._exit(7)
        status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 7


def test_a_call_that_is_made_of_another_of_its_name_is_counted_once(comm):
    calls = comm.coor.live_calls
    calls.watch(comm.coor.info)
    try:
        comm.allgather(torch.ones(2), dim=0)
        comm.reduce_scatter(torch.ones(2), sizes=[2])
        comm.allgather(torch.ones(2))
        assert calls.counts() == {"allgather": [2, 16, 0], "reduce_scatter": [1, 8, 0]}
    finally:
        calls.unwatch()


class FailsToClose(Shm):
    def close(self):
        super().close()
        raise OSError("cannot close")


def test_an_error_in_closing_after_started_calls_is_a_warning_and_the_rest_is_closed():
    with Coordinator(LaunchInfo("alone")) as coor:
        comm, may_end = Communicator(coor, FailsToClose), threading.Event()
        comm.start("barrier").wait()
        queue = comm._background._queue
        queue.submit(may_end.wait, [])
        with pytest.warns(RuntimeWarning, match="cannot close"):
            comm.__exit__(ValueError, ValueError(), None)
            may_end.set()
            queue.join()
        assert queue._is_closed


def test_a_communicator_that_cannot_be_given_up_does_not_keep_a_child_from_the_others(monkeypatch):
    refused = []

    class Inherited:
        def __init__(self, error):
            self._error = error

        def rank_name(self):
            return "rank 0"

        def _disown(self, error):
            if self._error is not None:
                raise self._error
            refused.append(error)

    broken, sound = Inherited(KeyError("of a vendor")), Inherited(None)
    monkeypatch.setattr(forks, "_live", [broken, sound, broken])
    monkeypatch.setattr(forks, "_inherited", [])
    with pytest.raises(ExceptionGroup, match="could not give up") as caught:
        forks._keep_inherited()
    assert len(refused) == 1 and len(caught.value.exceptions) == 2


def test_a_forked_child_is_refused_even_while_a_call_was_started(comm):
    """It waited for the thread of the started calls, which is not in the child."""
    comm.start("barrier").wait()
    child = os.fork()
    if child == 0:
        try:
            comm.allreduce(torch.ones(1))
        except CommunicatorError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert comm.allreduce(torch.ones(1)).item() == 1
