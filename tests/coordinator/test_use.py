"""Uses of a Coordinator that are refused by name, or that share a process with it."""

import contextlib
import gc
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator import (
    Coordinator,
    CoordinatorError,
    CoordinatorTimeout,
    CoordinatorTimings,
    PeerLost,
)
from coordinator.control.server import ControlServer
from coordinator.control.session import this_process
from coordinator.store.lock import Locks
from coordinator.transport import gloo_transport  # noqa: F401 - so that no rank has to import torch
from launcher import LaunchInfo
from launcher.system import linux

nodes = pytest.mark.parametrize("nodes", [[2], [1, 1]], ids=str)


def in_a_child(body):
    """What body returns in a forked child, as text."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, str(body()).encode())
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    text = os.read(reading, 10_000).decode()
    os.close(reading)
    return text


@nodes
def test_a_forked_child_can_harm_its_parent_in_no_way(coordinated, nodes):
    """It uses, closes, collects and leaves the Coordinator that it has inherited."""

    def body(coor):
        group = coor.split([1, 0])
        texts = [in_a_child(use) for use in (coor.barrier, lambda: coor.put("x", b""))]
        texts.append(in_a_child(lambda: (coor.close(), group.close(), "closed")[-1]))
        texts.append(
            in_a_child(lambda: (group.__del__(), coor.__del__(), gc.collect(), "gone")[-1])
        )
        coor.barrier()
        group.barrier()
        coor.put(f"{coor.rank}", b"x")
        return [*texts, coor.wait("0") == coor.wait("1")]

    for each in coordinated(body, 2, nodes):
        assert each.error == "", each
        *used, closed, gone, works = each.value
        assert all("forked from the rank" in text for text in used), each
        assert (closed, gone, works) == ("closed", "gone", True), each


def test_a_broken_coordinator_may_be_freed_by_the_thread_of_its_server(ranks):
    """That waited for itself, as it holds the lock of what it serves, and all ranks with it."""

    def body(info):
        coor = Coordinator(info)
        coor.barrier()
        if coor.is_master():
            coor.report_failure(1, "late")
            freeing = threading.Thread(target=coor.__del__)
            with coor._server._state:
                freeing.start()
                freeing.join(10)
                assert not freeing.is_alive()
        coor.close()

    ranks(body, 2)


@nodes
def test_a_forked_child_keeps_no_connection_open(coordinated, nodes):
    def connections():
        results = []
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                results.append(os.readlink(f"/proc/self/fd/{fd}").partition(":")[0])
            except OSError:
                continue  # the folder itself
        return results.count("socket") + results.count("anon_inode")

    before = connections()

    def body(coor):
        coor.barrier()
        return in_a_child(connections)

    outcomes = coordinated(body, 2, nodes)
    # the launch's own listener
    assert all(int(outcome.value) <= before + 1 for outcome in outcomes), outcomes


def test_a_forked_child_may_leave_the_block_of_a_subscription(coordinated):
    """It raised OSError, as the thread of its parent was to be woken."""

    def body(coor):
        with coor.on_failure(print) as subscription:
            return in_a_child(lambda: subscription.close() or "left")

    assert [each.value for each in coordinated(body, 2)] == ["left", "left"]


def test_a_forked_child_leaves_gloo_to_its_parent(fork):
    def body(info):
        with Coordinator(info, timeout_s=20, transport="gloo") as coor:
            coor.barrier()
            used = in_a_child(coor.barrier)
            gone = in_a_child(lambda: (coor.close(), coor.__del__(), gc.collect(), "gone")[-1])
            coor.barrier()
            return ["forked from the rank" in used, gone]

    outcomes = fork(body, 2).outcomes()
    assert [(each.error, each.value) for each in outcomes] == [("", [True, "gone"])] * 2, outcomes


def test_an_error_over_gloo_keeps_none_of_its_threads(fork):
    """A child forked later, which freed it, waited for them in vain, or was aborted."""

    def body(info):
        before, raised = linux.count_threads(), None
        with Coordinator(info, timeout_s=20, transport="gloo") as coor:
            if coor.rank == 0:
                with pytest.raises(CoordinatorError) as raised:
                    coor.barrier()  # rank 1 has left
        deadline = time.monotonic() + 20
        while linux.count_threads() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        return [linux.count_threads() - before, str(raised)]

    assert [each.value[0] for each in fork(body, 2).outcomes()] == [0, 0]


@nodes
def test_ranks_that_choose_different_transports_all_refuse(ranks_or_errors, nodes):
    def body(info):
        Coordinator(info, timeout_s=20, transport="gloo" if info.rank else None)

    for error in ranks_or_errors(body, 2, nodes):
        assert type(error) is CoordinatorError, error
        assert "do not agree on the transport" in str(error) and "rank 1 (host" in str(error)


def test_two_processes_that_claim_one_rank_are_both_named(fork):
    """The second hears of it; the first goes on."""

    def body(info):
        with Coordinator(info, timeout_s=10) as coor:
            text = in_a_child(lambda: Coordinator(info, timeout_s=5)) if info.rank else ""
            coor.barrier()
            return [text, os.getpid()]

    _, one = fork(body, 2).outcomes()
    text, pid = one.value
    assert text.startswith("CoordinatorError: rank 1 came to"), text
    assert f"host {socket.gethostname()}, pid {pid} is rank 1 already" in text, text
    assert text.count("pid") == 2, text


def test_two_threads_in_one_coordinator_are_told_so(ranks):
    is_told = threading.Event()

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            if coor.rank == 1:
                assert is_told.wait(20)
                coor.barrier()
                return None
            thread = threading.Thread(target=coor.barrier)
            thread.start()
            while "barrier #1" not in coor.diagnose(stacks_too=False).splitlines()[0]:
                time.sleep(0.01)
            with pytest.raises(
                CoordinatorError, match=r"all_true \(.*another thread is in barrier #1"
            ):
                coor.all_true(True)
            is_told.set()
            thread.join()

    ranks(body, 2)


@nodes
def test_a_value_that_cannot_be_sent_is_heard_of_by_all_and_breaks_nothing(ranks, nodes):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            value = {object()} if coor.rank == 1 else 1
            error = ValueError if coor.rank == 1 else CoordinatorError
            text = "rank 1 gave a set that cannot be sent"
            with pytest.raises(error, match=text):
                coor.broadcast_object(value, 1)
            with pytest.raises(error, match=text):
                coor.allgather_object(value)
            with pytest.raises(error, match=text):
                coor.agree(value)
            with pytest.raises(error, match=text):
                coor.scatter_object([value, value] if coor.rank == 1 else None, 1)
            if coor.rank == 1:
                with pytest.raises(error, match=text):
                    coor.gather_object(value, 1)
            else:
                coor.gather_object(value, 1)
            coor.barrier()

    ranks(body, 2, nodes)


def test_names_of_keys_do_not_meet(ranks):
    """Each of these once shared a value with another."""

    def body(info):
        with Coordinator(info) as coor:
            if coor.is_master():
                coor.put("a/who", b"user")
                coor.store("a").set("0/x", "first")
            first = coor.store("a") if not coor.is_master() else None
            coor.barrier()
            second = coor.store("a/0")
            assert not second.check(["x"])
            assert coor.once("a/who", lambda: b"once") == b"once"
            assert coor.once("a", lambda: b"other") == b"other"
            assert first is None or (first.num_keys() == 1 and first.get("0/x") == b"first")
            assert coor.get("a") is None and coor.get("a/who") == b"user"
            coor.barrier()

    ranks(body, 2)


def test_a_store_raises_what_torchs_users_expect(ranks):
    def body(info):
        from torch.distributed import DistStoreError

        with Coordinator(info) as coor:
            store = coor.store("x", timeout_s=0.2)
            with pytest.raises(DistStoreError) as caught:
                store.get("nobody")
            assert isinstance(caught.value, CoordinatorTimeout)
            assert "store.get #1 (test_use.py:" in str(caught.value)
            assert "rank 1 (host" in str(caught.value)
            store.set("text", "no number")
            with pytest.raises(DistStoreError, match="cannot"):
                store.add("text", 1)
            coor.barrier()
        with pytest.raises(DistStoreError, match="closed"):
            store.get("nobody")

    ranks(body, 2)


def test_who_waits_in_a_store_hears_of_a_death(fork):
    def body(info):
        from torch.distributed import DistNetworkError

        with Coordinator(info, timeout_s=20) as coor:
            store = coor.store("x")
            coor.barrier()
            if coor.rank == 1:
                os.kill(os.getpid(), 9)
            with pytest.raises(DistNetworkError, match=r"rank 1 \(host .* SIGKILL"):
                store.get("nobody")

    assert [each.error for each in fork(body, 3).outcomes()] == ["", "", ""]


@pytest.mark.parametrize("name", ["local_barrier", "split", "once", "wait", "lock"])
def test_every_call_has_a_deadline_of_its_own(ranks_or_errors, name):
    """The first local_barrier on several nodes once had the deadline of the whole Coordinator."""
    calls = {
        "local_barrier": lambda coor: coor.local_barrier(timeout_s=0.4),
        "split": lambda coor: coor.split([1, 0], timeout_s=0.4),
        "once": lambda coor: coor.once("x", lambda: b"", timeout_s=0.4),
        "wait": lambda coor: coor.wait("x", timeout_s=0.4),
        "lock": lambda coor: coor.lock("x", timeout_s=0.4).__enter__(),
    }
    is_kept, has_given_up = threading.Event(), threading.Event()

    def keep():
        is_kept.set()
        assert has_given_up.wait(20)
        return b""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            if coor.rank == 1:
                with coor.lock("x") if name == "lock" else contextlib.nullcontext():
                    return coor.once("x", keep) if name == "once" else keep()
            assert is_kept.wait(20)
            since = time.monotonic()
            try:
                calls[name](coor)
            except CoordinatorTimeout as error:
                return str(error), time.monotonic() - since
            finally:
                if coor.rank == 0:
                    has_given_up.set()

    text, took_s = ranks_or_errors(body, 3, [2, 1])[0]
    assert took_s < 10, text
    assert f"rank 0 (host {socket.gethostname()}" in text or text.startswith("rank 0 waited"), text
    assert f"in {name} #1 (test_use.py:" in text, text
    assert "rank 1 (host" in text, text


def test_errors_of_a_group_name_the_ranks_of_the_launch(ranks_or_errors):
    gave_up = threading.Event()

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            group = coor.split([3, 1])
            if group is None or coor.rank == 1:
                assert gave_up.wait(20)
                return None
            try:
                group.barrier(timeout_s=0.3)
            finally:
                gave_up.set()

    error = ranks_or_errors(body, 4)[3]
    waited = re.match(r"rank 3 waited (\d+\.\d) s in barrier #1", str(error))
    assert waited and float(waited[1]) >= 0.3, error
    assert "for rank 1 (host" in str(error), error


def test_locks_leave_no_file_whoever_dies_holding_one(fork, tmp_path, monkeypatch):
    def body(info):
        tempfile.tempdir = str(tmp_path)
        with Coordinator(info, timeout_s=10) as coor:
            if coor.rank == 2:
                coor.lock("a").__enter__()
            coor.barrier()
            if coor.rank == 2:
                os.kill(os.getpid(), 9)
            with coor.lock("a"):
                # Of one name: who left before this rank came may be removing its folder still.
                return len({path.name for path in tmp_path.rglob("*.lock")})

    outcomes = fork(body, 3).outcomes()
    assert [each.value for each in outcomes] == [1, 1, None], outcomes
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    locks = Locks("the next launch")  # removes what others still saw in use as rank 2 ended
    locks.path("a")
    locks.close()
    assert list(tmp_path.iterdir()) == []


@nodes
@pytest.mark.parametrize("call", ["barrier", "wait"])
def test_close_ends_the_call_that_another_thread_is_in(ranks, nodes, call):
    """It once took the memory from under a barrier, and left wait() to its deadline."""
    calls = {"barrier": lambda coor: coor.barrier(), "wait": lambda coor: coor.wait("nothing")}

    has_ended = threading.Event()

    def body(info):
        coor, texts = Coordinator(info, timeout_s=20), []
        if info.rank == 1:
            with coor, contextlib.suppress(CoordinatorError):
                assert has_ended.wait(20)
                coor.barrier()
            return None

        def use():
            with pytest.raises(CoordinatorError) as caught:
                calls[call](coor)
            texts.append(str(caught.value))
            has_ended.set()

        thread = threading.Thread(target=use)
        thread.start()
        time.sleep(0.1)
        coor.close()
        thread.join(20)
        return texts

    (text,) = ranks(body, 2, nodes)[0]
    assert text.startswith("rank 0") and "close" in text, text


@nodes
def test_a_model_whose_close_raises_is_told_and_the_rest_is_closed(ranks, nodes):
    """The Coordinator stayed open, and the other ranks waited for this one."""

    class Model:
        def close(self):
            raise OSError("no space left")

    def body(info):
        coor = Coordinator(info, timeout_s=20)
        group = coor.node
        if info.rank == 1:
            with pytest.raises(CoordinatorError, match=r"rank 0.* no space left"), coor:
                coor.barrier()
            return None
        model = coor.close_first(Model())
        with pytest.raises(OSError, match="no space left"):
            coor.close()
        coor.close()
        with pytest.raises(CoordinatorError, match="closed"):
            group.barrier()
        return type(model)

    assert ranks(body, 2, nodes)[1] is None


def test_once_is_once_among_the_threads_of_a_rank_too():
    runs = []

    def work():
        runs.append(1)
        time.sleep(0.05)
        return b"found"

    with Coordinator(LaunchInfo("alone")) as coor, ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: coor.once("x", work), range(4)))
        assert results == [b"found"] * 4 and len(runs) == 1
        with pytest.raises(CoordinatorTimeout, match=r"once #\d+ .* another thread"):
            coor.once("y", lambda: coor.once("y", work, timeout_s=0.1))


@nodes
def test_who_comes_to_a_group_that_was_given_up_hears_so(ranks, nodes):
    gave_up = threading.Event()

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            with pytest.raises(CoordinatorTimeout) as caught:
                assert coor.is_master() or gave_up.wait(20)
                coor.split([0, 1], timeout_s=0.4 if coor.is_master() else 20)
            gave_up.set()
            coor.barrier()
            return str(caught.value)

    early, late = ranks(body, 2, nodes)
    assert re.match(r"rank 0 waited \d+\.\d s in split #1 \(test_use\.py:", early), early
    assert "rank 1 entered split #1" in late and "rank 0 had already given up" in late, late


def test_a_rank_that_leaves_behind_a_split_breaks_it_for_none_that_still_awaits_its_answer(
    ranks, monkeypatch
):
    answer_all, is_slow = ControlServer._answer_all, threading.Event()

    def answer_slowly(server, requesters, value):
        for requester in requesters:
            answer_all(server, [requester], value)
            time.sleep(0.4 * is_slow.is_set())

    def body(info):
        coor = Coordinator(info, timeout_s=20)
        coor.barrier()
        is_slow.set()
        part = None if coor.is_master() else coor.split([2, 1])
        if info.rank == 1:
            assert coor.split([0, 1]).allgather(b"") == [b"", b""]  # nor is anything after it
        if coor.is_master():
            coor.split([0, 1]).allgather(b"")
        if part is not None:
            part.close()
        coor.close()

    monkeypatch.setattr(ControlServer, "_answer_all", answer_slowly)
    ranks(body, 3)


def test_a_rank_that_dies_while_others_join_is_named_with_its_process(fork):
    """By its number, too: a launcher could not tell whose failure the errors of the others were."""

    def body(info):
        if info.rank == 2:
            this_process.of(info).join(info, 5, CoordinatorTimings())
            os.kill(os.getpid(), 9)
        try:
            Coordinator(info, timeout_s=20)
        except PeerLost as error:
            assert (error.rank, error.peer.rank) == (2, 2)
            raise

    begun, ranks = time.time(), fork(body, 3)
    pid = ranks.pids[2]
    for each in ranks.outcomes()[:2]:
        assert each.error == "PeerLost" and f"rank 2 (host {socket.gethostname()}, pid {pid})" in (
            each.text
        ), each
        assert "in Coordinator #1 (test_use.py:" in each.text and each.at - begun < 15, each


def test_a_child_forked_while_a_thread_waits_hides_no_death(fork):
    """Between nodes a death is a connection that ends: the child once kept it open."""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            coor.barrier()
            if coor.rank == 1:
                threading.Thread(target=lambda: coor.wait("nothing"), daemon=True).start()
                time.sleep(0.1)
                if os.fork() == 0:
                    time.sleep(30)
                    os._exit(0)
                os.kill(os.getpid(), 9)
            begun = time.monotonic()
            with pytest.raises(PeerLost, match=r"for rank 1 \(host"):
                coor.wait("nothing else")
            return time.monotonic() - begun

    outcomes = fork(body, 2, [1, 1]).outcomes(stragglers=[1])
    assert outcomes[0].error == "" and outcomes[0].value < 15, outcomes


def test_who_died_is_known_in_groups_of_groups_whose_parents_were_let_go(coordinated):
    """Rank 0 once left before the other node had heard it, which then took rank 0 for the dead."""

    def body(coor):
        group = coor
        for _ in range(3):
            group = group.split(range(group.world_size))
        if coor.rank == 1:
            os.kill(os.getpid(), 9)
        group.barrier()

    for each in coordinated(body, 4, [2, 2], stragglers=[1]):
        assert each.status or "for rank 1 (host" in each.text, each


def test_a_call_from_a_file_whose_name_is_no_unicode(coordinated):
    """The line that made the call goes to the other ranks; its file may have any bytes."""

    def body(coor):
        script = compile("coor.put('k', b'v'); coor.barrier()", os.fsdecode(b"b\xffsic.py"), "exec")
        exec(script, {"coor": coor})
        return coor.diagnose(stacks_too=False)

    for outcome in coordinated(body, 2):
        assert "barrier #1, b\N{REPLACEMENT CHARACTER}sic.py:1" in str(outcome.value), outcome


def test_import_leaves_out_what_few_launches_need():
    slow = "{'filelock', 'importlib.metadata', 'torch', 'asyncio'}"
    program = f"import sys, coordinator; print({slow} & {{*sys.modules}})"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.stdout == "set()\n", shown.stderr


def test_a_call_in_a_file_with_a_long_name_is_shown(coordinated):
    """The name was cut in the middle of a letter, and could not be read any longer."""

    def body(coor):
        call = compile("coor.barrier()", f"/{'ä' * 60}.py", "exec")
        exec(call, {"coor": coor})
        return coor.diagnose(stacks_too=False)

    tables = [outcome.value for outcome in coordinated(body, 2)]
    assert all(f"in barrier #1, {47 * 'ä'}" in table for table in tables), tables


def test_rank_0_does_not_wait_to_the_deadline_for_ranks_that_were_given_up(ranks):
    """Those of a host whose link was cut stay connected."""
    closed = threading.Event()

    def body(info):
        coor = Coordinator(info, timeout_s=10)
        coor.barrier()
        if info.rank == 1:
            closed.wait(20)
        if info.rank == 2:
            coor.report_failure(1, "cut off")
        if info.rank == 0:
            while not coor.failures():
                time.sleep(0.01)
        coor.close()
        closed.set() if info.rank == 0 else None

    ranks(body, 3)
