"""Libraries of another age, another mind, or none: what the binding makes of them."""

import ctypes
import re
import signal
import subprocess
import threading
import timeit
from pathlib import Path

import psutil
import pytest
import torch

from communicator import Communicator, CommunicatorError, Unsupported, _native
from communicator.backends.plugin import load
from coordinator import Coordinator
from launcher import LaunchInfo

ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).with_name("abi_plugin.c")


@pytest.fixture
def build(tmp_path):
    """build("MAJOR=2", ...): the path of a library compiled so."""

    def compile_library(*definitions):
        path = tmp_path / f"lib{len(list(tmp_path.iterdir()))}.so"
        flags = [f"-D{definition}" for definition in definitions]
        command = ["cc", "-std=c11", "-shared", "-fPIC", f"-I{ROOT / 'csrc' / 'abi'}", *flags]
        subprocess.run([*command, SOURCE, "-o", path], check=True)
        return str(path)

    return compile_library


@pytest.fixture
def alone():
    with Coordinator(LaunchInfo("alone")) as coor:
        yield coor


class Pair:
    """Stands in for the Coordinator of two ranks, as far as such a library can tell."""

    def allgather(self, data):
        return [data, data]

    def barrier(self):
        pass


@pytest.mark.parametrize("compiler", [("gcc", "-std=c11", "c"), ("g++", "-std=c++17", "c++")])
def test_the_header_compiles_alone(compiler):
    command, standard, language = compiler
    flags = [standard, "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only", "-x", language]
    subprocess.run([command, *flags, ROOT / "csrc/abi/communicator.h"], check=True)


def test_an_older_smaller_table_is_read_no_further_than_it_says(build, alone):
    path = build("SIZE=offsetof(comm_plugin,get_unique_id)", "GARBAGE_BEYOND_ITS_END")
    with Communicator(alone, backend=path) as comm:
        comm.allreduce(torch.ones(3))
        comm.barrier()
        assert comm.broadcast(torch.ones(3)).tolist() == [1, 1, 1]


def test_a_newer_minor_version_with_a_longer_table_works(build, alone):
    path = build("MINOR=8", "SIZE=sizeof(table)")
    with Communicator(alone, backend=path) as comm:
        comm.allreduce(torch.ones(3))


REFUSED = {
    "version 2": ["MAJOR=2"],
    "'allreduce'": ["LACKS_ALLREDUCE"],
    "'probe'": ["LACKS_PROBE"],
    "'init'": ["LACKS_INIT"],
    "'destroy'": ["LACKS_DESTROY"],
    "'last_error'": ["LACKS_LAST_ERROR"],
    "no 'probe'": ["SIZE=offsetof(comm_plugin,probe)"],
    "unique id of 4097": ["ID_BYTES=4097"],
    "refuses": ["REFUSES"],
    "died of signal 11": ["CRASHES"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_refused_in_words(build, alone, words):
    path = build(*REFUSED[words])
    with pytest.raises(Unsupported, match=words):
        Communicator(alone, backend=path)


def test_a_file_that_is_no_library_is_refused(tmp_path, alone):
    (tmp_path / "libtext.so").write_text("not a library")
    with pytest.raises(Unsupported, match=r"does not load.*Check the path"):
        Communicator(alone, backend=str(tmp_path / "libtext.so"))


def test_a_library_of_another_kind_is_refused(alone):
    with pytest.raises(Unsupported, match="comm_plugin_entry_v1"):
        load("libc.so.6")


def test_what_is_missing_is_refused_where_it_cannot_be_built(build):
    comm = _native.open(build()).init(0, 2, Pair())
    for call in (comm.barrier, comm.group_start, comm.abort, lambda: comm.mem_alloc(8)):
        with pytest.raises(Unsupported, match=r"does not offer.*Choose another"):
            call()


def test_a_unique_id_of_4096_bytes_reaches_every_rank(ranks, build):
    path = build("ID_BYTES=4096")

    def body(info):
        with Coordinator(info) as coor, Communicator(coor, backend=path) as comm:
            return comm.world_size

    assert ranks(body, 3) == [3, 3, 3]


def test_two_libraries_at_once_keep_apart(build, alone):
    first, second = build('NAME="first"'), build('NAME="second"', "RESULT=COMM_DEVICE_ERROR")
    with Communicator(alone, backend=first) as one, Communicator(alone, backend=second) as two:
        one.allreduce(torch.ones(1))
        with pytest.raises(CommunicatorError, match="second, result 1: device error"):
            two.allreduce(torch.ones(1))


def test_an_unknown_result_is_an_error_with_its_number_and_text(build, alone):
    with (
        Communicator(alone, backend=build("RESULT=77")) as comm,
        pytest.raises(CommunicatorError, match=r"that went wrong \[nothing, result 77: a result"),
    ):
        comm.allreduce(torch.ones(1))


def test_a_library_that_one_rank_cannot_use_is_refused_on_all(ranks_or_errors, build):
    path = build("REFUSES_SOMETIMES")

    def body(info):
        with Coordinator(info) as coor:
            Communicator(coor, backend=path)

    for error in ranks_or_errors(body, 3):
        assert isinstance(error, Unsupported) and "no such device" in str(error)


@pytest.mark.parametrize(
    ("caps", "nodes", "words"),
    [("0", [2], "two ranks in one process"), ("COMM_CAP_ONE_NODE", [1, 1], "within one node")],
)
def test_ranks_where_the_library_cannot_reach_them_are_refused(
    ranks_or_errors, build, caps, nodes, words
):
    path = build(f"CAPS={caps}")

    def body(info):
        with Coordinator(info) as coor:
            coor.local_world_size = nodes[0]
            Communicator(coor, backend=path)

    for error in ranks_or_errors(body, 2):
        assert isinstance(error, Unsupported) and words in str(error)


def test_a_rank_that_cannot_join_fails_the_others_too(ranks_or_errors, build):
    path = build("FAILS_ON=1")

    def body(info):
        with Coordinator(info) as coor:
            Communicator(coor, backend=path)

    found = ranks_or_errors(body, 3)
    assert all(isinstance(error, CommunicatorError) for error in found)
    assert "out of patience" in str(found[1])
    assert re.search(r"rank 1 \(.*\): out of patience", str(found[0]))


def test_ranks_with_different_libraries_learn_it_before_they_meet(ranks_or_errors, build):
    paths = [build('NAME="one"'), build('NAME="other"')]
    classes = [load(path) for path in paths]

    def body(info):
        with Coordinator(info) as coor:
            Communicator._of(classes[info.rank], coor)

    for error in ranks_or_errors(body, 2):
        assert isinstance(error, Unsupported) and "other 1.0" in str(error)


def test_an_option_that_the_library_lacks_is_an_error(alone):
    with pytest.raises(ValueError, match=r'no option "colour=red".*Leave it out'):
        Communicator(alone, backend="shm", colour="red")


def test_a_call_costs_less_than_a_microsecond(build):
    """Measured at about 160 ns; the rest is room for a busy machine."""
    comm = _native.open(build()).init(0, 2, Pair())
    tensor = torch.ones(2)
    fastest = min(timeit.repeat(lambda: comm.allreduce(tensor), number=1000, repeat=50)) / 1000
    assert fastest < 1e-6


def test_a_dead_child_of_the_probe_leaves_no_zombie(build, alone):
    path = build("CRASHES")
    before = psutil.Process().children()
    with pytest.raises(Unsupported):
        Communicator(alone, backend=path)
    assert set(psutil.Process().children()) <= set(before)


@pytest.mark.parametrize("how", ["ignored", "blocked"])
def test_a_probe_that_takes_too_long_is_ended_whatever_this_process_does_with_alarms(build, how):
    """Its child went on for ever, and this process with it."""
    plugin = _native.open(build("TAKES_TOO_LONG"))
    handler = signal.signal(signal.SIGALRM, signal.SIG_IGN if how == "ignored" else signal.SIG_DFL)
    if how == "blocked":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        assert plugin.try_probe() is None
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("entry", ["get_unique_id", "set_timeout"])
def test_other_threads_run_while_a_library_takes_its_time(build, entry):
    path = build("WAITS_FOR_A_THREAD", "ID_BYTES=8")
    plugin, library = _native.open(path), ctypes.CDLL(path)
    if entry == "get_unique_id":
        threading.Timer(0.1, library.call_from_a_thread).start()
        assert len(plugin.unique_id()) == 8
        return
    problems = []

    def abort():
        try:
            comm.abort()
        except CommunicatorError as problem:
            problems.append(problem)

    library.call_from_a_thread()
    comm = plugin.init(0, 2, Pair(), unique_id=plugin.unique_id())
    ctypes.c_int.in_dll(library, "is_called").value = 0
    aborting = threading.Thread(target=abort)
    aborting.start()
    threading.Timer(0.3, library.call_from_a_thread).start()
    threading.Event().wait(0.1)
    comm.set_timeout(5000)  # waits for the end of abort()
    aborting.join()
    assert problems == []


def test_memory_of_a_device_is_not_handed_out_as_memory_of_the_cpu(ranks, build):
    path = build("MEMORY", "DEVICE_TYPE=COMM_CUDA")

    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, backend=path) as comm:
            with pytest.raises(
                Unsupported, match=r"rank \d: empty over nothing: .* memory of cuda:"
            ):
                comm.empty(4)
            return str(comm.device)

    assert ranks(body, 2) == ["cuda:0", "cuda:1"]
