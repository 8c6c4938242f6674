"""RAS's answer in the error of a hang, from a stand-in: NCCL starts its own on GPUs alone."""

import socket
import threading

import pytest

from communicator import Communicator, CommunicatorTimeout, timings
from communicator.backends.nccl import Nccl
from communicator.backends.nccl.ras import ras_text
from coordinator import Coordinator
from tests.communicator.backends.nccl import nccl_host

ANSWER = b"Job summary\n  rank 1 did not join AllReduce 7\n"


@pytest.fixture
def stand_in():
    """The address of a server that answers one command, and the commands that it got."""
    commands = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                commands.append(connection.recv(100))
                connection.sendall(ANSWER)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}", commands
        thread.join(10)


def hang(library, **options):
    """The error of a communicator whose next call takes for ever."""
    with Coordinator() as coor:
        comm = Communicator._of(Nccl, coor, library=str(library), **options)
        error = comm._backend.with_dead_peers(CommunicatorTimeout("not done in time"))
        comm.abort()
        return str(error)


def test_the_error_of_a_hang_has_the_answer_if_asked_for(stand_in, tmp_path):
    library = nccl_host.compile_stand_in(tmp_path)
    address, commands = stand_in
    assert "RAS" not in hang(library)
    assert hang(library, ras=address).endswith("says:\n" + ANSWER.decode())
    assert commands == [b"verbose status\n"]


@pytest.mark.parametrize(
    ("address", "why"),
    [("127.0.0.1:1", "refused"), ("nowhere", "invalid literal"), ("[::1]:1", "did not answer")],
)
def test_without_an_answer_the_error_says_why(address, why):
    text = ras_text(address)
    assert text.startswith(f"\nNCCL's RAS at {address} did not answer: ")
    assert why in text


def test_a_server_that_says_nothing_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(timings, "TIMINGS", timings.CommunicatorTimings(ras_s=0.2))
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "timed out" in ras_text(f"127.0.0.1:{server.getsockname()[1]}")
