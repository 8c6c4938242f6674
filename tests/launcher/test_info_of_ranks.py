"""What a rank finds: who it is, wherever it looks, and its device."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

import launcher
from launcher import launch_secret, registry
from launcher.launch_info import LaunchInfo
from launcher.local import cpu_affinity
from launcher.records import json_values, pipe_records
from launcher.system import gpus, nesting

ranks = st.integers(1, 50).flatmap(
    lambda size: st.tuples(st.just(size), st.integers(0, size - 1), st.integers(1, size))
)
text = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1)


@st.composite
def infos(draw):
    world_size, rank, local_world_size = draw(ranks)
    return LaunchInfo(
        launch_id=draw(text),
        world_size=world_size,
        local_world_size=local_world_size,
        rank=rank,
        local_rank=draw(st.integers(0, local_world_size - 1)),
        master_addr=draw(text),
        master_port=draw(st.integers(1, 65535)),
        extras=draw(st.dictionaries(text, text, max_size=3)),
    )


@given(infos())
def test_launch_info_survives_the_environment_and_bytes(info):
    assert LaunchInfo.from_env(info.to_env()) == info
    assert LaunchInfo.from_bytes(info.to_bytes()) == info
    assert hash(LaunchInfo.from_bytes(info.to_bytes())) == hash(info)


@given(infos())
def test_launch_info_can_be_copied_with_what_holds_it(info):
    assert copy.deepcopy([info]) == [info] and copy.copy(info) == info


@pytest.mark.parametrize("extras", ["[1]", "[]", "5", "null", "{"])
def test_extras_in_the_environment_that_are_no_object_are_an_error(extras):
    environ = LaunchInfo("x").to_env() | {"DRUMLINE_EXTRAS": extras}
    with pytest.raises(launcher.LaunchInfoError):
        LaunchInfo.from_env(environ)


@pytest.mark.parametrize("text", ["", "zz", "ab", "ab" * 31, "é" * 64])
def test_a_secret_in_the_environment_that_is_none_is_an_error_that_does_not_show_it(text):
    with pytest.raises(launcher.LaunchInfoError, match="DRUMLINE_SECRET") as raised:
        launch_secret.take({"DRUMLINE_SECRET": text})
    assert not text or f"'{text}'" not in str(raised.value)


@given(infos(), st.data())
def test_half_a_launch_info_is_an_error_that_names_what_is_missing(info, data):
    environ = info.to_env()
    gone = data.draw(st.sampled_from(sorted(environ)))
    del environ[gone]
    with pytest.raises(launcher.LaunchInfoError, match=gone):
        LaunchInfo.from_env(environ)


@pytest.mark.parametrize(
    "wrong",
    [
        {"world_size": 0},
        {"rank": 2},
        {"rank": -1},
        {"local_world_size": 3},
        {"local_rank": 1},
        {"master_port": 0},
        {"master_port": 65536},
        {"launch_id": ""},
        {"rank": "0"},
        {"extras": {"a": 1}},
    ],
)
def test_a_launch_info_that_contradicts_itself_cannot_be_made(wrong):
    right = {"launch_id": "x", "world_size": 2, "rank": 0, "master_port": 1}
    with pytest.raises(launcher.LaunchInfoError):
        LaunchInfo(**(right | wrong))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(values)
def test_values_that_travel_arrive_equal(value):
    assert json_values.loads(json_values.dumps(value)) == value


@pytest.mark.parametrize("value", [{1: 2}, {"a": {3}}, [object()], {"__bytes__": "x"}])
def test_values_that_would_arrive_different_are_refused(value):
    with pytest.raises(TypeError):
        json_values.dumps(value)


@given(st.lists(st.binary(), max_size=6))
def test_lines_come_out_as_they_went_in_however_they_were_cut(parts):
    lines = pipe_records.Lines()
    found = [line for part in parts for line in lines.feed(part)]
    assert b"\n".join([*found, lines.take()]) == b"".join(parts)


def test_a_process_that_nobody_started_is_a_world_of_one_with_a_name_of_its_own(monkeypatch):
    info = launcher.current()
    assert (info.world_size, info.rank, info.master_port) == (1, 0, 0)
    assert launcher.current() == info
    code = "import launcher; print(launcher.current().launch_id)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert other.stdout.strip() not in ("", info.launch_id)


def test_naming_a_launcher_that_did_not_start_us_is_an_error(monkeypatch):
    with pytest.raises(launcher.LaunchInfoError, match="torchrun"):
        launcher.current("torchrun")
    monkeypatch.setenv("DRUMLINE_LAUNCHER", "mpi")
    with pytest.raises(launcher.LaunchInfoError, match="mpi"):
        launcher.current()


def test_naming_a_launcher_overrides_the_innermost(monkeypatch):
    variables = {"SLURM_PROCID": "0"}
    torchrun = {
        "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400",
        "TORCHELASTIC_RUN_ID": "theirs", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    around = variables | torchrun
    ours = LaunchInfo("ours", 2, 2, 1, 1, master_port=1, extras=nesting.extras(around))
    for name, value in (around | ours.to_env()).items():
        monkeypatch.setenv(name, value)
    assert launcher.current("torchrun").rank == 2
    assert launcher.current().rank == 1


def test_threads_of_a_rank_are_ranks_of_the_inner_launch():
    def outer():
        inner = launcher.launch(lambda: launcher.current().rank, 3, launcher="threads")
        return [launcher.current().rank, inner]

    assert launcher.launch(outer, 2) == [[0, [0, 1, 2]], [1, [0, 1, 2]]]


def test_a_rank_can_launch_ranks_of_its_own():
    def outer():
        return launcher.launch(lambda: launcher.current().world_size, 3)

    assert launcher.launch(outer, 2) == [[3, 3, 3], [3, 3, 3]]


def test_a_secret_in_the_environment_is_gone_once_it_was_read():
    code = (
        "import os, launcher\n"
        "first, second = launcher.current(), launcher.current()\n"
        "fd = int(first.extras['secret_fd'])\n"
        "assert second == first\n"
        "print(os.pread(fd, 100, 0).hex())\n"
        "print(open('/proc/self/environ').read(), dict(os.environ))\n"
    )
    variables = launch_secret.variables()
    (text,) = variables.values()
    run = [sys.executable, "-c", code]
    shown = subprocess.run(run, env=os.environ | variables, capture_output=True, text=True)
    first, _, rest = shown.stdout.partition("\n")
    assert first == text and text not in rest, shown.stderr


def test_registered_launchers_are_asked_and_can_start_ranks(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})  # other tests list all that there are
    info = LaunchInfo("mine", 4, 2, 3, 1, master_port=1)
    mine = types.SimpleNamespace(
        NAME="a-launcher-of-a-test",
        detect=lambda environ: info if "MINE" in environ else None,
        run=lambda job: [job.target.function(*job.args)] * job.nprocs,
    )
    launcher.register(mine)
    monkeypatch.setenv("MINE", "1")
    assert launcher.current() == info
    monkeypatch.delenv("MINE")
    assert launcher.launch(abs, 2, launcher=mine.NAME, args=(-3,)) == [3, 3]


@pytest.mark.parametrize("lacking", [{"NAME": "x"}, {"NAME": "mpi", "detect": None}, {}])
def test_half_a_launcher_cannot_be_registered_nor_take_a_name_of_ours(lacking):
    with pytest.raises((TypeError, ValueError)):
        launcher.register(types.SimpleNamespace(**lacking))


def machine(folder, nodes, threads_per_core):
    """A folder like /sys/devices/system of a machine with these NUMA nodes."""
    for number, cpus in enumerate(nodes):
        node = folder / "node" / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(cpu_affinity.ranges(cpus) + "\n")
    every = sorted(cpu for cpus in nodes for cpu in cpus)
    half = len(every) // threads_per_core
    for cpu in every:
        topology = folder / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        siblings = range(cpu % half, len(every), half)
        (topology / "thread_siblings_list").write_text(cpu_affinity.ranges(siblings))
    return folder


def test_ranks_fill_numa_nodes_and_keep_the_threads_of_a_core_together(tmp_path):
    nodes = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    places = cpu_affinity.places(4, range(16), machine(tmp_path, nodes, threads_per_core=2))
    assert [place.cpus for place in places] == [
        (0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15),
    ]  # fmt: skip
    assert [(place.node, place.num_cores) for place in places] == [(0, 2), (0, 2), (1, 2), (1, 2)]


@given(st.integers(1, 40), st.integers(1, 40))
def test_places_share_out_every_core_once(nprocs, count):
    if nprocs > count:
        with pytest.raises(ValueError, match=f"{count} cores"):
            cpu_affinity.places(nprocs, range(count), system=types_path())
        return
    places = cpu_affinity.places(nprocs, range(count), system=types_path())
    assert sorted(cpu for place in places for cpu in place.cpus) == list(range(count))
    assert all(place.num_cores >= 1 for place in places)


def types_path():
    from pathlib import Path

    return Path("/no/such/machine")


@given(st.sets(st.integers(0, 200)))
def test_ranges_of_processors_are_written_as_the_kernel_writes_them(numbers):
    assert cpu_affinity.parse_ranges(cpu_affinity.ranges(numbers)) == sorted(numbers)


A, B, C = "GPU-aaaa", "GPU-aabb", "GPU-cc"


class NoSuchThing(Exception):
    pass


def driver(*devices, divided=()):
    """What pynvml would be on a machine with these GPUs, those in divided as two instances each."""
    names = dict(enumerate(devices))

    def instance(handle, index):
        if index > 1:
            raise NoSuchThing
        return f"MIG-{names[handle]}-{index}"

    return types.SimpleNamespace(
        NVML_DEVICE_MIG_ENABLE=1,
        NVMLError_NotSupported=NoSuchThing,
        NVMLError_NotFound=NoSuchThing,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(devices),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: names.get(handle, handle),
        nvmlDeviceGetMigMode=lambda handle: (int(names[handle] in divided), 0),
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=instance,
    )


@pytest.fixture
def two_gpus(monkeypatch, tmp_path):
    """Pretend that there are three GPUs, the last of them divided."""
    (tmp_path / "driver").touch()
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "driver")
    monkeypatch.setitem(sys.modules, "pynvml", driver(A, B, C, divided=(C,)))


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, [A, B, f"MIG-{C}-0", f"MIG-{C}-1"]),
        ("", []),
        ("1,0", [B, A]),
        ("0,-1,1", [A]),
        ("0,7,1", [A]),
        ("GPU-aab, 0", [B, A]),
        ("GPU-aa", []),
        (f"MIG-{C}-1", [f"MIG-{C}-1"]),
        ("nonsense", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(two_gpus, chosen, expected):
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert [device.uuid for device in gpus.visible(environ)] == expected


def test_no_two_ranks_get_one_device_unless_asked_for(two_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert gpus.of_ranks(3, share=False) == {0: {"device": A}, 1: {"device": B}}
    shared = gpus.of_ranks(3, share=True)
    assert shared == {0: {"device": A}, 1: {"device": B}, 2: {"device": A}}


def test_a_machine_without_a_driver_has_no_devices(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "none")
    assert gpus.visible() == [] and gpus.of_ranks(2, share=True) == {}
