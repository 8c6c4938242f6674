"""The future of a call: it has the result, or it fails as one of C++ does."""

import pytest
import torch

from communicator import PeerLost
from communicator.calls.async_work import AsyncWork, WorkQueue


def fail():
    raise PeerLost("rank 0: rank 1 has died")


@pytest.mark.parametrize("asked_first", [True, False])
def test_future_has_the_result_whether_asked_for_before_the_end_or_after(asked_first):
    handle = AsyncWork([torch.ones(2)])
    early = handle.get_future() if asked_first else None
    handle.run(lambda: None)
    future = handle.get_future()
    assert future.wait()[0].tolist() == [1, 1]
    assert early in (None, future)


@pytest.mark.parametrize("asked_first", [True, False])
def test_failed_call_raises_its_error_in_wait_and_the_text_of_it_in_the_future(asked_first):
    handle = AsyncWork([])
    if asked_first:
        handle.get_future()
    handle.run(fail)
    with pytest.raises(PeerLost, match=r"^rank 0: rank 1 has died$"):
        handle.wait()
    with pytest.raises(RuntimeError, match="PeerLost: rank 0: rank 1 has died"):
        torch.futures.wait_all([handle.get_future()])


class LockBeforeAnother:
    """A lock; once it is free for the first time, another thread is quicker than its holder."""

    def __init__(self, act):
        self._act = act

    def __enter__(self):
        pass

    def __exit__(self, *_):
        act, self._act = self._act, lambda: None
        act()


def test_a_future_that_is_asked_for_as_the_call_ends_is_completed_once():
    """The second time raised in the thread of the calls, which ended: close() waited for ever."""
    handle, asked = AsyncWork([torch.ones(2)]), []
    handle._lock = LockBeforeAnother(lambda: asked.append(handle.get_future()))
    handle.run(lambda: None)
    assert asked[0].wait()[0].tolist() == [1, 1]


def test_calls_that_are_submitted_to_a_closed_queue_run():
    queue, results = WorkQueue(), []
    queue.submit(lambda: results.append(1), [])
    for number in (2, 3):
        queue.close()
        handle = queue.submit(lambda number=number: results.append(number), [])
        assert handle.is_completed() and queue.is_idle()
    assert results == [1, 2, 3]


def test_a_queue_may_be_closed_by_a_call_of_its_own():
    """Its thread waited for itself, which raises."""
    queue = WorkQueue()
    queue.submit(queue.close, []).wait()
    assert queue.submit(lambda: None, []).is_completed()
