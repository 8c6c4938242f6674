"""LaunchInfo: its forms, its validation, and its detection."""

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
from launcher.system import nesting

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
def test_launch_info_can_be_deep_copied(info):
    assert copy.deepcopy([info]) == [info] and copy.copy(info) == info


@pytest.mark.parametrize("extras", ["[1]", "[]", "5", "null", "{", "[" * 60_000])
def test_extras_that_are_no_json_object_are_an_error(extras):
    environ = LaunchInfo("x").to_env() | {"DRUMLINE_EXTRAS": extras}
    with pytest.raises(launcher.LaunchInfoError):
        LaunchInfo.from_env(environ)


def test_bytes_that_nest_without_end_are_no_launch_info():
    with pytest.raises(launcher.LaunchInfoError, match="not a LaunchInfo"):
        LaunchInfo.from_bytes(b"[" * 60_000)


@pytest.mark.parametrize("text", ["", "zz", "ab", "ab" * 31, "é" * 64])
def test_an_invalid_secret_is_an_error_that_does_not_show_it(text):
    with pytest.raises(launcher.LaunchInfoError, match="DRUMLINE_SECRET") as raised:
        launch_secret.take({"DRUMLINE_SECRET": text})
    assert not text or f"'{text}'" not in str(raised.value)


@given(infos(), st.data())
def test_an_incomplete_launch_info_names_the_missing_variables(info, data):
    environ = info.to_env()
    missing = data.draw(st.sampled_from(sorted(environ)))
    del environ[missing]
    with pytest.raises(launcher.LaunchInfoError, match=missing):
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
        {"launch_id": "a\0"},
        {"launch_id": "\udcff"},
        {"master_addr": "\udcff"},
        {"rank": "0"},
        {"extras": {"a": 1}},
    ],
)
def test_a_launch_info_that_contradicts_itself_cannot_be_made(wrong):
    right = {"launch_id": "x", "world_size": 2, "rank": 0, "master_port": 1}
    with pytest.raises(launcher.LaunchInfoError):
        LaunchInfo(**(right | wrong))


def test_a_process_without_launcher_has_world_size_1_and_its_own_launch_id(monkeypatch):
    info = launcher.current()
    assert (info.world_size, info.rank, info.master_port) == (1, 0, 0)
    assert launcher.current() == info
    code = "import launcher; print(launcher.current().launch_id)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert other.stdout.strip() not in ("", info.launch_id)


def test_naming_a_launcher_that_did_not_start_this_process_is_an_error(monkeypatch):
    with pytest.raises(launcher.LaunchInfoError, match="torchrun"):
        launcher.current("torchrun")
    monkeypatch.setenv("DRUMLINE_LAUNCHER", "mpi")
    with pytest.raises(launcher.LaunchInfoError, match="mpi"):
        launcher.current()


def test_naming_a_launcher_overrides_the_innermost(monkeypatch):
    variables = {"SLURM_PROCID": "0"}
    mpi = {
        "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "PMIX_NAMESPACE": "other@1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    }  # fmt: skip
    enclosing = variables | mpi
    own = LaunchInfo("own", 2, 2, 1, 1, master_port=1, extras=nesting.extras(enclosing))
    for name, value in (enclosing | own.to_env()).items():
        monkeypatch.setenv(name, value)
    assert launcher.current("mpi").rank == 2
    assert launcher.current().rank == 1


def own_rank():
    return launcher.current().rank


def own_world_size():
    return launcher.current().world_size


def launch_threads():
    return [own_rank(), launcher.launch(own_rank, 3, launcher="threads")]


def launch_processes():
    return launcher.launch(own_world_size, 3)


def test_threads_of_a_rank_are_ranks_of_the_inner_launch():
    assert launcher.launch(launch_threads, 2) == [[0, [0, 1, 2]], [1, [0, 1, 2]]]


def test_a_rank_can_launch_ranks_of_its_own():
    assert launcher.launch(launch_processes, 2) == [[3, 3, 3], [3, 3, 3]]


def test_reading_the_secret_removes_it_from_the_environment():
    code = (
        "import os, launcher\n"
        "first, second = launcher.current(), launcher.current()\n"
        "fd = int(first.extras['secret_fd'])\n"
        "assert second == first\n"
        "print(os.pread(fd, 100, 0).hex())\n"
        "print(open('/proc/self/environ').read(), dict(os.environ))\n"
    )
    text = os.urandom(launch_secret.NBYTES).hex()
    variables = {launch_secret.SECRET: text, **LaunchInfo("x").to_env()}
    run = [sys.executable, "-c", code]
    shown = subprocess.run(run, env=os.environ | variables, capture_output=True, text=True)
    first, _, rest = shown.stdout.partition("\n")
    assert first == text and text not in rest, shown.stderr


def test_registered_launchers_detect_and_start_ranks(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})  # other tests list all that there are
    info = LaunchInfo("test", 4, 2, 3, 1, master_port=1)
    registered = types.SimpleNamespace(
        NAME="a-launcher-of-a-test",
        detect=lambda environ: info if "REGISTERED_TEST" in environ else None,
        run=lambda job: [job.target.function(*job.args)] * job.nprocs,
    )
    launcher.register(registered)
    monkeypatch.setenv("REGISTERED_TEST", "1")
    assert launcher.current() == info
    monkeypatch.delenv("REGISTERED_TEST")
    assert launcher.launch(abs, 2, launcher=registered.NAME, args=(-3,)) == [3, 3]


@pytest.mark.parametrize("attributes", [{"NAME": "x"}, {"NAME": "mpi", "detect": None}, {}])
def test_register_needs_all_attributes_and_a_new_name(attributes):
    with pytest.raises((TypeError, ValueError)):
        launcher.register(types.SimpleNamespace(**attributes))
