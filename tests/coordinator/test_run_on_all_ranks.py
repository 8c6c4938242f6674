"""Work that every rank does for itself, and one decision on all of them."""

import contextlib
import re
import threading

import pytest

from coordinator import (
    Coordinator,
    CoordinatorError,
    CoordinatorTimeout,
    DrumlineError,
    PeerLost,
    RemoteError,
)
from coordinator.errors import FailureReason, RankFailure


def test_all_ranks_get_every_result(ranks):
    def body(info):
        with Coordinator(info) as coor:
            return coor.run_on_all_ranks(lambda: {"rank": coor.rank})

    assert ranks(body, 3) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def raising(coor, errors):
    def work():
        if coor.rank in errors:
            raise errors[coor.rank]

    return coor.run_on_all_ranks(work)


def errors_of(ranks, errors, nodes=None):
    """The exception of each of four ranks, of which some raise."""

    def body(info):
        with Coordinator(info) as coor:
            with pytest.raises(Exception) as caught:
                raising(coor, errors(coor))
            coor.barrier()
            return [caught.value]

    return [error for (error,) in ranks(body, 4, nodes)]


@pytest.mark.parametrize("nodes", [None, [2, 2]])
def test_a_failure_raises_its_own_type_there_and_names_the_rank_elsewhere(ranks, nodes):
    zero, one, two, three = errors_of(ranks, lambda coor: {2: KeyError("a name")}, nodes)
    assert type(two) is KeyError
    for error in (zero, one, three):
        assert type(error) is RemoteError and isinstance(error, CoordinatorError)
        assert (error.rank, error.peer.rank, error.error_type) == (2, 2, "KeyError")
        assert "a name" in error.error_text and "in raising" not in error.error_text
        assert "in work" in error.traceback and "rank 2 (host" in str(error)
        assert "test_run_on_all_ranks.py" in str(error)


class Mistake(DrumlineError):
    """Of whoever calls run_on_all_ranks, as PlanError is."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Mistake("too small"), (Mistake, r"rank 2 \(host .*\): too small")),
        (Mistake("rank 2: too small"), (Mistake, "rank 2: too small")),
        (KeyError("a name"), (CoordinatorError, r"(?s)rank 0: rank 2 \(host .*KeyError.*")),
    ],
)
def test_the_other_ranks_raise_the_class_of_the_caller(ranks, error, expected):
    """Each layer made its own class of RemoteError, with a table and a text of its own."""

    def body(info):
        def work():
            if info.rank == 2:
                raise error

        with Coordinator(info) as coor:
            with pytest.raises(type(error) if info.rank == 2 else DrumlineError) as caught:
                coor.run_on_all_ranks(work, error_class=(CoordinatorError, Mistake))
            coor.barrier()
            return [caught.value]

    (zero,), _, _ = ranks(body, 3)
    assert type(zero) is expected[0] and re.fullmatch(expected[1], str(zero))
    assert isinstance(zero.__cause__ or zero.__context__, RemoteError)


def test_of_several_failures_the_first_rank_is_named(ranks):
    errors = errors_of(ranks, lambda coor: {1: ValueError("first"), 3: OSError("second")})
    assert [type(error) for error in errors] == [RemoteError, ValueError, RemoteError, OSError]
    assert errors[0].rank == errors[2].rank == 1


def test_a_rank_that_lost_another_is_not_the_cause(ranks):
    errors = errors_of(ranks, lambda coor: {1: PeerLost("lost"), 3: OSError("disk full")})
    assert errors[0].rank == errors[2].rank == 3
    assert "disk full" in str(errors[0])


def test_a_lost_rank_is_lost_on_all(ranks):
    def errors(coor):
        failure = RankFailure(3, coor.peers[3], FailureReason.EXITED, exit_status=-9)
        return {1: PeerLost("lost rank 3", [failure])}

    errors = errors_of(ranks, errors)
    for error in (errors[0], errors[2]):
        assert type(error) is PeerLost and "lost rank 3" in str(error)
        assert (error.rank, error.failures[0].exit_status) == (3, -9)


def test_a_result_that_cannot_be_sent_fails_on_all(ranks):
    def body(info):
        with Coordinator(info) as coor:
            with pytest.raises((ValueError, RemoteError)) as caught:
                coor.run_on_all_ranks(lambda: object() if coor.rank == 1 else 1)
            return [caught.value]

    (zero,), (one,) = ranks(body, 2)
    assert type(zero) is RemoteError and zero.rank == 1 and "object" in str(zero)
    assert type(one) is ValueError


def test_one_rank_raises_its_own_error(ranks):
    def body(info):
        with Coordinator(info) as coor:
            assert coor.run_on_all_ranks(lambda: 7) == [7]
            with pytest.raises(ZeroDivisionError):
                coor.run_on_all_ranks(lambda: 1 / 0)
            return True

    assert ranks(body, 1) == [True]


@pytest.mark.parametrize("fails_in_work", [True, False])
def test_no_error_of_a_deadline_is_its_own_cause(ranks, fails_in_work):
    """A Coordinator with subgroups that was left because of it followed the causes for ever."""
    is_over = threading.Event()

    def body(info):
        with contextlib.suppress(PeerLost), Coordinator(info) as coor:
            coor.split(range(2))
            if coor.rank == 1:
                assert is_over.wait(20)
                return
            work = (lambda: coor.barrier(timeout_s=0.2)) if fails_in_work else (lambda: None)
            with pytest.raises(CoordinatorTimeout) as caught, coor:
                coor.run_on_all_ranks(work, timeout_s=0.2)
            is_over.set()
            cause = caught.value
            while cause := cause.__cause__ or cause.__context__:
                assert cause is not caught.value

    ranks(body, 2)


def test_an_error_that_was_raised_from_itself_ends_the_group(ranks):
    def body(info):
        with pytest.raises(ValueError), Coordinator(info) as coor:
            coor.barrier()
            error = ValueError("mine")
            raise error from error

    ranks(body, 2)
