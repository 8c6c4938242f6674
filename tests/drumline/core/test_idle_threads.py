"""OpenMP's threads of a thread of Python that computes no longer."""

from __future__ import annotations

import threading

import pytest
import torch

from drumline.core.cpu.idle_threads import release_idle_threads
from tests.drumline.openmp import compute_in_two_threads, has_ended


@pytest.fixture(autouse=True)
def restored_threads():
    num_before = torch.get_num_threads()
    yield
    torch.set_num_threads(num_before)


def test_idle_threads_end_and_the_next_operation_starts_others():
    release_idle_threads()
    (first,) = compute_in_two_threads()
    assert compute_in_two_threads() == set()
    release_idle_threads()
    assert has_ended(first)
    (second,) = compute_in_two_threads()
    release_idle_threads()
    release_idle_threads()
    assert has_ended(second)


def test_those_of_another_thread_go_on():
    release_idle_threads()
    computed, released, started = threading.Event(), threading.Event(), []

    def compute() -> None:
        started.append(compute_in_two_threads())
        computed.set()
        released.wait()
        started.append(compute_in_two_threads())

    thread = threading.Thread(target=compute)
    thread.start()
    computed.wait()
    release_idle_threads()
    released.set()
    thread.join()
    assert [len(names) for names in started] == [1, 0]
