"""Addresses and descriptors that rank 0 cannot listen on."""

import os
import resource
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator import Coordinator, CoordinatorError
from coordinator.control import session
from launcher import LaunchInfo


def info(**extras):
    return LaunchInfo("pieces", 2, 2, 0, 0, "127.0.0.1", 1, extras)


@pytest.mark.skipif(os.geteuid() != 0, reason="no network namespace: runs as root")
def test_a_host_without_its_loopback_interface_is_told_at_once(tmp_path):
    """Ranks tried to connect until the deadline of minutes, in silence."""
    script = tmp_path / "script.py"
    script.write_text("from coordinator import Coordinator\nCoordinator()")
    run = ["unshare", "-n", sys.executable, "-m", "launcher", "run", "-n", "2", str(script)]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=100)
    if "unshare" in ended.stderr:
        pytest.skip(ended.stderr)
    assert ended.returncode == 1 and "the loopback interface is down" in ended.stderr, ended


def test_a_descriptor_that_holds_no_secret_is_an_error():
    with open(os.devnull) as file, pytest.raises(CoordinatorError, match="launch secret"):
        Coordinator(info(secret_fd=str(file.fileno())))
    with pytest.raises(CoordinatorError, match="descriptor 999999"):
        Coordinator(info(secret_fd="999999"))


def test_a_descriptor_that_does_not_listen_is_an_error():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(CoordinatorError, match="adopt descriptor"):
            Coordinator(info(master_fd=str(bound.fileno())))


def test_a_descriptor_that_listens_everywhere_is_an_error():
    with (
        socket.create_server(("0.0.0.0", 0)) as anywhere,
        pytest.raises(CoordinatorError, match="every interface"),
    ):
        Coordinator(info(master_fd=str(anywhere.fileno())))


@pytest.mark.parametrize("loopback", ["::1", "127.0.0.1"])
def test_rank_0_listens_beside_a_store_of_either_family(loopback):
    if loopback == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    with session._listener_next_to_store(replace(info(), master_addr=loopback)) as listener:
        assert listener.getsockname()[0] == loopback


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("address", ["0.0.0.0", "::", "0", "::ffff:0.0.0.0"])
def test_every_interface_is_no_address_of_rank_0(rank, address):
    launch = LaunchInfo("pieces", 2, 2, rank, rank, address, 4711)
    with pytest.raises(CoordinatorError, match=rf"rank {rank}: .* is every interface"):
        Coordinator(launch, timeout_s=1)


def test_a_name_that_no_host_can_have_is_an_error():
    """One outside of ASCII was a UnicodeError of the codec."""
    launch = LaunchInfo("pieces", 2, 1, 1, 0, "ü" * 99, 4711)
    with pytest.raises(CoordinatorError, match=r"does not know where 'ü+' is"):
        Coordinator(launch, timeout_s=1)


def test_a_link_local_address_joins_no_nodes():
    """Rank 0 once failed to listen with a bare OSError, and the others waited for it."""
    launch = LaunchInfo("pieces", 2, 1, 0, 0, "fe80::1%lo", 4711)
    with pytest.raises(CoordinatorError, match=r"rank 0: .* one link alone"):
        Coordinator(launch, timeout_s=1)


def test_an_address_of_another_host_cannot_be_listened_on():
    launch = LaunchInfo("pieces", 2, 2, 0, 0, "192.0.2.1", 4711)
    with pytest.raises(CoordinatorError, match=r"rank 0 .* cannot listen at 192.0.2.1:4711"):
        Coordinator(launch)


def test_rank_0_says_at_once_if_it_may_not_open_enough_files():
    """One descriptor for each rank, and some for clients that have not authenticated."""
    many = LaunchInfo("pieces", 4096, 4096, 0, 0, "127.0.0.1", 1, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            pytest.raises(CoordinatorError, match=r"1024 files.*4096 ranks.*ulimit -n"),
        ):
            port = listener.getsockname()[1]
            extras = {"master_fd": str(listener.fileno())}
            Coordinator(replace(many, master_port=port, extras=extras))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_name_server_that_does_not_answer_yet_is_asked_again(fork):
    """A failure that the resolver itself called temporary ended the rank at once."""
    failures = [socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")] * 2
    resolve = socket.getaddrinfo

    def resolve_late(*arguments, **options):
        if failures:
            raise failures.pop()
        return resolve(*arguments, **options)

    def body(own_info):
        if own_info.rank == 1:
            socket.getaddrinfo = resolve_late
        with Coordinator(own_info, timeout_s=20) as coor:
            coor.barrier()
        return len(failures)

    first, second = fork(body, 2).outcomes()
    assert (first.value, second.value) == (2, 0), second
