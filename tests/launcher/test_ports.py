"""Ports: hashed from the launch_id, probed upward, and bound before any rank exists."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import launcher
from launcher import LaunchInfo, ports
from launcher.external import rank_main
from launcher.runtime import rank_environment
from launcher.system import linux


@given(st.text(min_size=1))
def test_candidates_are_every_port_of_the_range_once(launch_id):
    assert sorted(ports.candidates(launch_id)) == list(range(ports.FIRST_PORT, ports.END_PORT))


def test_ephemeral_ports_come_last(monkeypatch):
    monkeypatch.setattr(linux, "ephemeral_ports", lambda: range(20_000, 60_000))
    candidates = ports.candidates("x")
    assert all(port < 20_000 for port in candidates[:10_000])
    assert all(port >= 20_000 for port in candidates[10_000:])


def test_the_first_candidate_is_the_same_in_every_process_and_on_every_node(monkeypatch):
    """Python's own hash() of a string differs from process to process."""
    monkeypatch.setattr(linux, "ephemeral_ports", lambda: range(0))
    assert ports.candidates("drumline")[0] == 14326


def test_two_launches_with_one_id_get_neighbouring_ports():
    with launcher.listen("same") as first, launcher.listen("same") as second:
        assert first.getsockname()[1] != second.getsockname()[1]
        assert second.getsockname()[1] in ports.candidates("same")


def test_the_socket_listens_on_one_address_and_cannot_be_stolen():
    with launcher.listen("held") as held, socket.socket() as thief:
        assert held.getsockname()[0] == "127.0.0.1"
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            thief.bind(held.getsockname())


def test_no_free_port_names_master_port(monkeypatch):
    with launcher.listen("full") as held:
        monkeypatch.setattr(ports, "candidates", lambda launch_id: [held.getsockname()[1]])
        with pytest.raises(OSError, match="--master-port"):
            launcher.listen("another")


def test_master_port_is_used_or_a_usage_error(command, usage_error):
    with launcher.listen("asked") as held:
        port = str(held.getsockname()[1])
        script = command.script("print('ran')")
        text = usage_error("run", "-n", "2", "--master-port", port, script)
    assert port in text and "in use" in text
    script = command.script("import launcher\nprint(launcher.current().master_port)")
    assert command.run("run", "-n", "2", "--master-port", port, script).lines(1) == [port]


@pytest.mark.parametrize("address", ["nowhere.invalid", "192.0.2.1", "1::2", "x" * 70])
def test_an_address_of_another_node_is_an_error_at_the_first_port(address):
    """Each of the ports was tried, with a look-up of the name for each: for hours."""
    with pytest.raises(OSError, match=r"not an address of this node.*--master-addr"):
        launcher.listen("elsewhere", address)


LAUNCHES = """
import multiprocessing, socket, sys, launcher

def meet():
    info = launcher.current()
    if info.rank == 0:
        peer, _ = socket.socket(fileno=int(info.extras["master_fd"])).accept()
        return peer.recv(100).decode()
    peer = socket.create_connection((info.master_addr, info.master_port))
    peer.sendall(info.launch_id.encode())

def one(launch_id, met):
    met.put((launch_id, launcher.launch(meet, 2, launch_id=launch_id)[0]))

if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    met = fork.SimpleQueue()
    ids = ["same" if i % 2 else f"launch-{i}" for i in range(int(sys.argv[1]))]
    started = [fork.Process(target=one, args=(i, met)) for i in ids]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * len(ids)
    found = [met.get() for _ in ids]
    assert sorted(found) == sorted((i, i) for i in ids), found
"""


@pytest.mark.parametrize("count", [16, pytest.param(64, marks=pytest.mark.soak)])
def test_concurrent_launches_of_equal_and_of_different_ids(command, count):
    """Processes forked from one that has imported everything: they start at once and fast."""
    program = [sys.executable, command.script(LAUNCHES), str(count)]
    with subprocess.Popen(program, stderr=subprocess.PIPE, start_new_session=True) as all_of_them:
        try:
            _, error = all_of_them.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            os.killpg(all_of_them.pid, signal.SIGKILL)
            raise
    assert all_of_them.returncode == 0, error.decode()


def count_sockets():
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    named = [os.readlink(link) for link in links if os.path.exists(link)]
    info = launcher.current()
    return ["master_fd" in info.extras, sum(name.startswith("socket:") for name in named)]


def test_only_rank_0_has_the_listening_socket():
    (first, its), *others = launcher.launch(count_sockets, 3)
    assert first and not any(has for has, _ in others)
    assert all(count == its - 1 for _, count in others)


def test_a_port_that_the_launcher_keeps_on_the_host_of_rank_0_is_no_error_there(monkeypatch):
    """Rank 0 kept it again, where one mpiexec had put its ranks on several hosts."""
    info = LaunchInfo("several", world_size=2, local_world_size=1, master_port=20000)
    with ports.reserve_for_torch("several", 0) as holder:
        port = str(holder.getsockname()[1])
        monkeypatch.setattr(os, "environ", {rank_environment.TORCH_PORT: port})
        with rank_main._torchrun_variables(info):
            assert os.environ["MASTER_PORT"] == port
