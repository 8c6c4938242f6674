"""Arguments that are not deadlines, and tracebacks without our frames."""

import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

import coordinator.coordinator
from coordinator import Coordinator, CoordinatorError, CoordinatorTimeout, call_site
from coordinator.call_site import caller, traceback_of
from coordinator.store import store_meeting
from coordinator.timings import DEFAULT
from launcher import LaunchInfo


def test_a_traceback_for_others_shows_the_users_frames_alone():
    def body():
        with Coordinator(LaunchInfo("alone")) as coor, coor.master_first():
            coor.once("x", lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError) as caught:
        body()
    text = traceback_of(caught.value)
    assert "in body" in text and "1 / 0" in text and "ZeroDivisionError" in text
    assert "sequencer.py" not in text and "coordinator.py" not in text.replace(
        "test_coordinator", ""
    )


@pytest.mark.parametrize("name", ["/coordinator_tools/mine.py", "/tools/my_contextlib.py"])
def test_a_file_whose_name_is_like_one_of_ours_is_the_users(name):
    names = {"caller": caller}
    exec(
        compile("where = caller(1)", f"{Path(call_site.__file__).parents[1]}{name}", "exec"), names
    )
    assert names["where"] == f"{Path(name).name}:1"


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), float("inf"), "1"])
def test_what_is_no_deadline_is_refused_everywhere(timeout_s):
    with pytest.raises(ValueError, match="not a deadline"):
        Coordinator(LaunchInfo("alone"), timeout_s=timeout_s)
    with Coordinator(LaunchInfo("alone")) as coor:
        for use in (
            lambda: coor.barrier(timeout_s=timeout_s),
            lambda: coor.wait("x", timeout_s=timeout_s),
            lambda: coor.lock("x", timeout_s=timeout_s),
            lambda: coor.put("x", b"", timeout_s=timeout_s),
            lambda: coor.get("x", timeout_s=timeout_s),
            lambda: coor.split([0], timeout_s=timeout_s),
            lambda: coor.once("x", lambda: b"", timeout_s=timeout_s),
            lambda: coor.local_barrier(timeout_s=timeout_s),
            lambda: coor.close(timeout_s=timeout_s),
        ):
            with pytest.raises(ValueError, match="not a deadline"):
                use()


def test_a_deadline_beyond_that_of_every_lock_is_as_good_as_another(ranks):
    """Rank 0 alone, which keeps the keys, raised an OverflowError."""

    def body(info):
        with Coordinator(info, timeout_s=1e10) as coor:
            coor.put(str(coor.rank), b"value")
            coor.barrier()
            return coor.get(str(1 - coor.rank), timeout_s=1e300)

    assert ranks(body, 2) == [b"value", b"value"]


def test_an_error_of_one_rank_in_joining_ends_the_others_before_their_deadline(
    ranks_or_errors, monkeypatch
):
    """They waited for it to the end, and were told to look for a rank that was not started."""
    join, began = coordinator.coordinator.join_group, time.monotonic()

    def join_but_rank_1(rendezvous, me):
        if me.rank == 1:
            raise OSError("planned")
        return join(rendezvous, me)

    def meet(info):
        Coordinator(info, timeout_s=30).close()

    monkeypatch.setattr(coordinator.coordinator, "join_group", join_but_rank_1)
    first, second = ranks_or_errors(meet, 2)
    assert isinstance(second, OSError) and isinstance(first, CoordinatorError)
    assert "OSError: planned" in str(first) and time.monotonic() - began < 15


@pytest.mark.parametrize("is_over_store", [False, True])
def test_a_rank_that_waits_first_for_rank_0_and_then_for_others_waits_no_longer_in_all(
    ranks_or_errors, is_over_store
):
    """The deadline was counted anew once it had connected: it waited up to twice as long."""
    store = HashStore()

    def make(info):
        if is_over_store:
            return Coordinator.over(store, info.rank, 3, timeout_s=3)
        return Coordinator(info, timeout_s=3)

    def body(info):
        began = time.monotonic()
        if info.rank == 2:
            return store_meeting.meet(store, 2, range(3), 10, DEFAULT) if is_over_store else None
        time.sleep(0 if info.rank else 2)
        with pytest.raises(CoordinatorTimeout):
            make(info)
        return time.monotonic() - began

    assert ranks_or_errors(body, 3)[1] < 4
