"""The network between two hosts is captured: nothing of an encrypted launch is found there."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from launcher import LaunchInfo
from tests.network_hosts import INTERFACE, NetworkHosts, NoNetworkNamespaces

ROOT = Path(__file__).parents[2]
SIZES = (2, 1)
KINDS = ("key", "value", "broadcast", "gathered", "object", "error", "sent", "reduced")
END = b"the end of the capture"
CAPTURE = f"""
import socket, sys
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))  # of every protocol
link.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
link.bind(({INTERFACE!r}, 0))
print("ready", flush=True)
with open(sys.argv[1], "wb") as file:
    frame = b""
    while {END!r} not in frame:
        frame = link.recv(1 << 18)
        file.write(frame)
"""
SAY_END = "import socket, sys; socket.socket(type=socket.SOCK_DGRAM).sendto({!r}, (sys.argv[1], 9))"
# One process per host, which forks its ranks: first they do not encrypt.
HOST = """
import os, sys
import torch
from communicator import Communicator
from coordinator import Coordinator, DrumlineError
from launcher import LaunchInfo
from torch.distributed import TCPStore

def text(run, kind, rank):
    return f"<{kind} of {run} run by {rank}>" * 5

def tensor_of(words):
    return torch.frombuffer(bytearray(words.encode() * 1000), dtype=torch.uint8).clone()

def fail(words):
    raise ValueError(words)

def use(run, rank):
    with Coordinator(timeout_s=60) as coor, Communicator(coor) as comm:
        last = coor.world_size - 1
        coor.put(text(run, "key", rank), text(run, "value", rank).encode())
        words = text(run, "broadcast", 0).encode()
        assert coor.broadcast(words) == words
        coor.allgather(text(run, "gathered", rank).encode())
        coor.allgather_object({"x": [text(run, "object", rank)]})
        try:
            coor.run_on_all_ranks(lambda: fail(text(run, "error", rank)))
        except Exception as error:
            assert text(run, "error", 0)[:20] in str(error), error
        if rank == last:
            comm.send(tensor_of(text(run, "sent", rank)), 0)
        elif rank == 0:
            comm.recv(torch.empty_like(tensor_of(text(run, "sent", last))), last)
        words = tensor_of(text(run, "reduced", 0))
        comm.allreduce(words if rank == 0 else torch.zeros_like(words))
        comm.allgather(torch.ones(3, 5 if run == "plain" else 7, dtype=torch.int16))
        coor.barrier()

def refused(make, text):
    try:
        make()
    except DrumlineError as error:
        assert text in str(error), error
    else:
        raise AssertionError("not refused: " + text)

def check_refusals():
    refused(lambda: Coordinator(timeout_s=60, transport="gloo"), "gloo does not encrypt")

def use_over_a_store(info):
    # Its ranks share the secret of their launch, which never was in the store.
    store = TCPStore(info.master_addr, 29633, info.world_size, info.rank == 0)
    with Communicator.over(store, info.rank, info.world_size, timeout_s=60) as comm:
        assert comm.coor.encrypts
        words = tensor_of(text("encrypted", "in a store", 0))
        comm.allreduce(words if info.rank == 0 else torch.zeros_like(words))
        comm.barrier()

def rank(info):
    code = 1
    try:
        for run, port, launch_id in (("plain", 29631, "a"), ("encrypted", 29632, "b")):
            os.environ.update(info.to_env())
            os.environ["DRUMLINE_LAUNCH_ID"] += launch_id
            os.environ["DRUMLINE_MASTER_PORT"] = str(port)
            os.environ["DRUMLINE_SECRET"] = sys.argv[1]
            os.environ["DRUMLINE_ENCRYPT"] = "1" if run == "encrypted" else "0"
            use(run, info.rank)
        check_refusals()
        use_over_a_store(info)
        code = 0
    finally:
        os._exit(code)

pids = [os.fork() or rank(LaunchInfo.from_bytes(data.encode())) for data in sys.argv[2:]]
sys.exit(any([os.waitpid(pid, 0)[1] for pid in pids]))
"""


@pytest.fixture
def hosts():
    try:
        network = NetworkHosts(2)
    except NoNetworkNamespaces as error:
        pytest.skip(str(error))
    with network:
        yield network


def end(process):
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def command_of(host, hosts, launch_id, secret):
    first = sum(SIZES[:host])
    infos = [
        LaunchInfo(launch_id, sum(SIZES), SIZES[host], first + k, k, hosts.addresses[0], 1)
        for k in range(SIZES[host])
    ]
    words = ["python", "-c", HOST, secret, *(info.to_bytes().decode() for info in infos)]
    return hosts.command(host, words)


def test_nothing_of_an_encrypted_launch_is_found_on_the_network(hosts, commands, tmp_path):
    """What is looked for is found where the same ranks do not encrypt. And what would send it
    unencrypted is refused."""
    launch_id, secret = uuid.uuid4().hex, secrets.token_hex(32)
    file = tmp_path / "frames"
    with contextlib.ExitStack() as stack:

        def start(command, **options):
            process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **options)
            stack.callback(end, process)
            return process

        script = [sys.executable, "-S", "-c", CAPTURE, str(file)]
        capture = start(hosts.command(0, script), stdout=subprocess.PIPE)
        assert capture.stdout.readline() == b"ready\n"
        run = [command_of(host, hosts, launch_id, secret) for host in (0, 1)]
        started = [start(command, env={**os.environ, **commands}) for command in run]
        assert [process.wait(90) for process in started] == [0, 0]
        say_end = [sys.executable, "-S", "-c", SAY_END.format(END), hosts.addresses[0]]
        subprocess.run(hosts.command(1, say_end), check=True, timeout=20)
        assert capture.wait(60) == 0
        capture.stdout.close()
    frames = file.read_bytes()
    assert found(frames, "plain") == set(KINDS)
    assert found(frames, "encrypted") == set()
    # And what is sent beside tensors: to which call they belong.
    assert b"allgather of (3, 5) int16" in frames and b"allgather of (3, 7) int16" not in frames


def found(frames, run):
    return {kind for kind in KINDS if f"<{kind} of {run} run by ".encode() in frames}
