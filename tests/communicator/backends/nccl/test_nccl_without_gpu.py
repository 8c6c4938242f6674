"""The real libnccl of the nvidia-nccl wheel, which loads without a GPU and fails as it should.

Libraries called stand-ins are built here by gcc and move nothing.
"""

import ctypes
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import launcher
from communicator import Backend, Communicator, CommunicatorError, Unsupported, _native
from communicator.backends.nccl import Nccl, nccl_library
from communicator.backends.plugin import REPLACEMENTS, PluginBackend
from communicator.backends.shm import Shm
from communicator.own_gpu import own_ordinal
from coordinator import Coordinator
from tests.communicator.backends.nccl import nccl_host
from tests.communicator.backends.nccl.nccl_host import Host

WHEELS = list(nccl_library._of_packages())
needs_wheel = pytest.mark.skipif(
    not WHEELS, reason="needs the real libnccl: pip install --no-deps nvidia-nccl-cu13==2.28.9"
)
without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="this machine has a GPU; tests/gpu is for it"
)


@pytest.mark.parametrize("backend", [Nccl, Shm])
def test_what_a_library_does_not_offer_is_composed(backend):
    plugin = _native.open(backend.path)
    for entry, (method, _) in REPLACEMENTS.items():
        composed = getattr(backend, method) is not getattr(PluginBackend, method)
        assert plugin.offers(entry) or composed, entry


@pytest.fixture(scope="module")
def real():
    return WHEELS[0]


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stand_in")
    return nccl_host.compile_stand_in(folder)


@pytest.fixture
def in_child(warm):
    """in_child(code, *arguments): what code prints in a process where nothing of NCCL is loaded."""

    def run(code, *arguments):
        done = warm.run("-c", code, *arguments, env={"NCCL_SOCKET_IFNAME": "lo"})
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n")[:-1]

    return run


# Which library.


@needs_wheel
def test_the_library_of_the_wheel_is_found(real):
    found = nccl_library.find()
    assert os.path.samefile(found.path, real)
    assert found.version > 22000 and found.version_text.startswith("2.")


@needs_wheel
@without_gpu
@pytest.mark.skipif(torch.version.cuda is not None, reason="CUDA builds of torch load their own")
def test_a_copy_that_is_loaded_comes_before_the_wheels(tmp_path, real, in_child):
    """Two copies in one process would not know of each other's kernels."""
    loaded = tmp_path / "libnccl.so.2"
    loaded.symlink_to(nccl_host.compile_stand_in(tmp_path, name="libnccl.so.2.99.1"))
    code = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1])\n"
        "from communicator.backends.nccl import nccl_library as n\n"
        "print(n.find().path); print(list(n.candidates())[1])"
    )
    assert in_child(code, loaded) == [str(tmp_path / "libnccl.so.2.99.1"), real]


def test_a_path_that_is_given_comes_before_all(stand_in):
    assert nccl_library.find(str(stand_in)).path == str(stand_in)


def test_functions_of_graphs_that_a_driver_lacks_are_named(tmp_path):
    """Without them graphs were not noticed, in silence."""
    drivers = [
        nccl_host.compile_stand_in(tmp_path, *defines, name=f"libcuda{i}.so")
        for i, defines in enumerate([(), ("CUDA",), ("CUDA", "CAPTURE_V3")])
    ]
    missing = [nccl_library.missing_graph_functions(str(driver)) for driver in drivers]
    assert missing[0][0] == "cuStreamGetCaptureInfo_v2 or cuStreamGetCaptureInfo_v3"
    assert len(missing[0]) == 4 and missing[1:] == [[], []]
    assert nccl_library.missing_graph_functions(str(tmp_path / "none.so")) == missing[0]


def test_versions_read_as_nccl_writes_them():
    assert [nccl_library.version_text(code) for code in (2708, 21805, 22809, 23203)] == [
        "2.7.8",
        "2.18.5",
        "2.28.9",
        "2.32.3",
    ]


def test_a_library_that_is_too_old_says_which_is_needed(tmp_path):
    old = nccl_host.compile_stand_in(tmp_path, "VERSION=21701")
    with pytest.raises(Unsupported, match=r"is NCCL 2\.17\.1; needs NCCL 2\.18\.0 or newer"):
        nccl_library.find(str(old))


def test_a_library_that_is_no_nccl_is_named(tmp_path):
    (tmp_path / "other.c").write_text("int other(void) { return 1; }")
    path = tmp_path / "libother.so"
    subprocess.run(["gcc", "-shared", "-o", path, tmp_path / "other.c"], check=True)
    with pytest.raises(Unsupported, match="has no ncclGetVersion, so it is not NCCL"):
        nccl_library.find(str(path))


def test_an_object_file_is_named(tmp_path):
    """It was an error of range(), and the ranks with the right file waited."""
    (tmp_path / "other.c").write_text("int other(void) { return 1; }")
    subprocess.run(["gcc", "-c", "-o", tmp_path / "other.o", tmp_path / "other.c"], check=True)
    with pytest.raises(Unsupported, match="is no 64-bit shared library"):
        nccl_library.find(str(tmp_path / "other.o"))


def test_a_file_that_is_no_library_is_named(tmp_path):
    path = tmp_path / "libnccl.so.2"
    path.write_text("not found (404)\n" * 100)
    with pytest.raises(Unsupported, match="is no 64-bit shared library"):
        nccl_library.find(str(path))


def test_a_path_where_nothing_is_says_so(tmp_path):
    with pytest.raises(Unsupported, match="cannot open shared object file"):
        nccl_library.find(str(tmp_path / "libnccl.so.2"))


def test_a_folder_in_place_of_a_library_raises_on_all_ranks(tmp_path, stand_in, ranks):
    """It was an IsADirectoryError on one rank, and a wait until the deadline on the others."""

    def body(info):
        path = tmp_path if info.rank == 1 else stand_in
        with Coordinator(info, timeout_s=20) as coor:
            with pytest.raises(Unsupported, match=f"rank 1 .*{tmp_path} cannot be read: Is a dir"):
                Communicator._of(Nccl, coor, library=str(path))
            return True

    assert ranks(body, 2) == [True, True]


@needs_wheel
@pytest.mark.parametrize("nbytes", [40, 4096, 1_000_000, 100_000_000])
def test_a_library_cut_off_anywhere_is_refused_without_a_crash(tmp_path, real, nbytes):
    """Loading such a file ends the process with SIGBUS."""
    path = tmp_path / "libnccl.so.2"
    with open(real, "rb") as whole, open(path, "wb") as part:
        part.write(whole.read(4096))  # the headers; what follows is not read before it is refused
        part.truncate(nbytes)
    with pytest.raises(Unsupported, match=r"cut off|no 64-bit"):
        nccl_library.find(str(path))


def test_different_nccl_versions_raise_on_all_ranks_before_init(tmp_path, ranks):
    """Stand-ins of two versions: NCCL itself would find out only in the middle of its start."""
    paths = [
        nccl_host.compile_stand_in(tmp_path, f"VERSION={v}", name=f"libnccl.so.2.{i}")
        for i, v in enumerate((22809, 22703, 22809))
    ]

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            with pytest.raises(Unsupported) as caught:
                Communicator._of(Nccl, coor, library=str(paths[info.rank]))
            return str(caught.value)

    for rank, text in enumerate(ranks(body, 3)):
        assert text.startswith(f"rank {rank}: ")
        assert f"rank 1 has NCCL 2.27.3 at {paths[1]}" in text
        assert f"rank 2 has NCCL 2.28.9 at {paths[2]}" in text
    opened = ctypes.CDLL(str(paths[0]))
    opened.stand_in_log.restype = ctypes.c_char_p
    assert opened.stand_in_log() == b""


def test_a_rank_without_a_library_raises_on_all_ranks(tmp_path, stand_in, ranks):
    def body(info):
        path = str(stand_in) if info.rank != 2 else str(tmp_path / "absent.so")
        with Coordinator(info, timeout_s=20) as coor:
            with pytest.raises(Unsupported) as caught:
                Communicator._of(Nccl, coor, library=path)
            return str(caught.value)

    assert all("rank 2 (host" in text and "absent.so" in text for text in ranks(body, 3))


@without_gpu
def test_where_torch_sees_no_gpu_the_backend_says_so_on_every_rank(ranks):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            with pytest.raises(Unsupported, match="torch sees no CUDA device"):
                Communicator(coor, backend="nccl")
            return True

    assert ranks(body, 2) == [True, True]


@pytest.mark.parametrize(
    ("local_rank", "count", "is_restricted", "expected"),
    [(0, 1, False, 0), (1, 2, False, 1), (3, 1, True, 0), (3, 2, True, 1), (5, 0, False, 5)],
)
def test_a_rank_has_its_own_gpu_also_where_it_sees_no_other(
    monkeypatch, local_rank, count, is_restricted, expected
):
    """Under srun --gpus-per-task every rank sees one GPU; all but the first were refused."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(launcher.gpus, "is_restricted", lambda: is_restricted)
    assert own_ordinal(local_rank) == expected


def test_a_rank_beyond_the_gpus_that_all_see_has_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(launcher.gpus, "is_restricted", lambda: False)
    with pytest.raises(Unsupported, match="local rank 1 has no GPU of its own among the 1 here"):
        own_ordinal(1)


def test_a_gpu_that_is_named_is_taken_whatever_the_local_rank(ranks, monkeypatch):
    """The first of two ranks was refused GPU 0 by its probe, although device=0 named it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(launcher.gpus, "is_restricted", lambda: False)

    class OnGpu(Backend):
        name, device_type = "on-gpu", "cuda"
        probe = classmethod(lambda cls, coor: 1)

        def open(self):
            pass

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            with pytest.raises(Unsupported, match="no GPU of its own"):
                Communicator(coor, OnGpu)
            with pytest.raises(Unsupported, match="not on cpu"):
                Communicator(coor, OnGpu, device="cpu")
            named = [Communicator(coor, OnGpu, device=name) for name in (0, "cuda:0")]
            return [str(comm.device) for comm in named]

    assert ranks(body, 2) == [["cuda:0"] * 2] * 2


def test_ranks_that_got_one_gpu_together_are_told():
    """CUDA_VISIBLE_DEVICES of 2 GPUs and 3 ranks: the third had the first one's, silently."""
    me_and_names = "rank 1", "rank {}".format
    nccl_library.check_gpus(*me_and_names, ["a", "b", None, None])
    with pytest.raises(Unsupported, match=r"rank 0, rank 2 have one GPU together, a, .* name "):
        nccl_library.check_gpus(*me_and_names, ["a", "b", "a"])


# What works without a GPU.


@needs_wheel
def test_unique_ids_have_128_bytes_and_differ(real, in_child):
    code = (
        "import sys; from communicator.backends.nccl import nccl_library as n\n"
        "lib = n.NcclLibrary(sys.argv[1])\n"
        "for _ in range(3): print(lib.unique_id().hex())"
    )
    ids = in_child(code, real)
    assert len(set(ids)) == 3 and {len(text) for text in ids} == {256}


@needs_wheel
def test_a_unique_id_survives_the_coordinator_byte_for_byte(real, ranks):
    found = nccl_library.NcclLibrary(real).unique_id()
    assert any(byte >= 0x80 for byte in found) and b"\0" in found

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            return coor.broadcast(found if info.rank == 0 else None)

    assert ranks(body, 3) == [found] * 3


@needs_wheel
def test_error_texts_are_nccls_own(real):
    library = nccl_library.NcclLibrary(real)
    assert "invalid usage" in library.error_string(5)
    assert "remote process exited" in library.error_string(6)
    assert library.error_string(0) == "no error"


@needs_wheel
def test_group_calls_work_and_one_end_too_many_is_refused(real):
    library = ctypes.CDLL(real)
    assert [library.ncclGroupStart(), library.ncclGroupEnd()] == [0, 0]
    assert library.ncclGroupEnd() == 5


@needs_wheel
def test_the_plugin_finds_every_function_it_knows_in_this_version(real):
    source = (Path(nccl_host.PLUGIN).parents[3] / "csrc" / "nccl" / "library.h").read_text()
    names = re.findall(r"X\((\w+), (\d+), ", source)
    library = ctypes.CDLL(real)
    assert len(names) > 25
    assert [name for name, since in names if not hasattr(library, f"nccl{name}")] == []


# Starting without a GPU.


@needs_wheel
@without_gpu
def test_start_without_a_gpu_fails_with_nccls_text_and_the_process_goes_on(real):
    start = time.monotonic()
    with Coordinator(timeout_s=20) as coor:
        with pytest.raises(CommunicatorError, match=r"ncclCommInitRankConfig.*[Cc]uda"):
            Communicator._of(Nccl, coor, library=real)
        assert time.monotonic() - start < 10
        assert len(nccl_library.NcclLibrary(real).unique_id()) == 128
        with Communicator(coor, backend="shm") as comm:
            assert comm.barrier() is None


@needs_wheel
@without_gpu
@pytest.mark.parametrize("options", [{}, {"revoke": True}])
def test_start_without_a_gpu_fails_on_every_rank(real, ranks, options):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            with pytest.raises(CommunicatorError) as caught:
                Communicator._of(Nccl, coor, library=real, **options)
            return str(caught.value)

    for rank, text in enumerate(ranks(body, 3)):
        assert text.startswith(f"rank {rank}: ncclCommInitRankConfig failed in NCCL 2.")


@needs_wheel
def test_an_allreduce_without_a_communicator_is_an_invalid_argument(real):
    library = ctypes.CDLL(real)
    none = ctypes.c_void_p()
    assert library.ncclAllReduce(none, none, ctypes.c_size_t(1), 7, 0, none, none) == 4


# The configuration that is sent.


def config_fields(header):
    """ncclConfig_t as the real header has it: the type and name of each field, in order."""
    body = re.search(r"typedef struct ncclConfig_v\w+ \{(.*?)\} ncclConfig_t;", header, re.S)
    text = re.sub(r"/\*.*?\*/", "", body.group(1), flags=re.S)
    return re.findall(r"([\w ]+?[ *]+)(\w+);", text)


C_TYPES = {
    "size_t": ctypes.c_size_t,
    "unsigned int": ctypes.c_uint,
    "int": ctypes.c_int,
    "const char *": ctypes.c_char_p,
}


@needs_wheel
def test_the_configuration_is_laid_out_as_in_the_header(real, stand_in):
    """The stand-in keeps the bytes it got; the header of the real library says what they mean."""
    header = (Path(real).parents[1] / "include" / "nccl.h").read_text()
    fields = [(name, C_TYPES[kind.strip()]) for kind, name in config_fields(header)]
    config = type("Config", (ctypes.Structure,), {"_fields_": fields})
    host = Host(stand_in, "max_ctas=3")
    sent = config.from_buffer_copy(host.config)
    undefined = -(2**31)
    assert sent.magic == 0xCAFEBEEF and sent.version == 21800
    assert (sent.blocking, sent.maxCTAs) == (0, 3)
    assert (sent.cgaClusterSize, sent.minCTAs, sent.splitShare) == (undefined,) * 3
    assert sent.netName is None
    assert sent.size == config.commName.offset == 48


def test_blocking_is_sent_when_asked_for(stand_in):
    host = Host(stand_in, "blocking=1")
    assert int.from_bytes(host.config[16:20], sys.byteorder) == 1


def test_our_plugin_needs_nothing_of_nccl_cuda_or_torch_to_load():
    needed = subprocess.run(
        ["readelf", "-d", nccl_host.PLUGIN], capture_output=True, text=True, check=True
    ).stdout
    assert not re.search("nccl|cuda|torch|python", "\n".join(re.findall(r"NEEDED.*", needed)))


def test_the_bare_table_refuses_a_call_of_an_aborted_communicator(stand_in):
    host = Host(stand_in)
    host.call("abort")
    assert host.call("broadcast", 64, 1, 7, 0, 0) == 6
