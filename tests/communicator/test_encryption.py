"""Communicators of ranks that encrypt: they do all that others do, or are refused by name."""

import contextlib
import socket
import threading

import pytest
import torch

from communicator import Communicator, PeerLost, Unsupported, conformance
from coordinator import Coordinator
from coordinator.transport.connections import PeerConnector
from launcher.authentication.encryption import EncryptedSocket
from tests.cases import soak


@pytest.mark.parametrize("nodes", [[2, 1], soak([1, 1, 1]), soak([3, 2])], ids=str)
def test_the_selected_backend_conforms(ranks, nodes):
    def body(info):
        with (
            Coordinator(info, timeout_s=60, encrypt=True) as coor,
            Communicator(coor) as comm,
        ):
            report = conformance.check(comm, large=100_003)
            coor.barrier()
            return comm.backend, report.having(conformance.FAILED)

    name = "tcp" if nodes == [1, 1, 1] else "hierarchical"
    assert ranks(body, sum(nodes), nodes) == [(name, [])] * sum(nodes)


def test_large_tensors_pass_both_ways_at_once(ranks):
    def body(info):
        with Coordinator(info, timeout_s=60, encrypt=True) as coor, Communicator(coor) as comm:
            peer, rows = 1 - comm.rank, [torch.arange(3_000_001) * (rank + 1) for rank in (0, 1)]
            for _ in range(3):
                received = torch.zeros_like(rows[peer])
                with comm.group():
                    comm.send(rows[comm.rank], peer)
                    comm.recv(received, peer)
                assert torch.equal(received, rows[peer])

    ranks(body, 2, [1, 1])


@pytest.mark.parametrize("nbytes", [0, 1000, 3_000_001])
def test_messages_move_by_themselves(ranks, nbytes):
    """More of them than are buffered, so that what was decrypted has to wait to be read."""
    count = 1 if nbytes > 1000 else 9

    def body(info):
        with (
            Coordinator(info, timeout_s=60, encrypt=True) as coor,
            Communicator(coor, "tcp") as comm,
        ):
            rows = [torch.full((nbytes,), rank + 1, dtype=torch.uint8) for rank in range(3)]
            peers = [rank for rank in range(3) if rank != comm.rank]
            works = [comm.isend(rows[comm.rank], peer) for peer in peers for _ in range(count)]
            received = {
                (peer, k): torch.zeros_like(rows[0]) for peer in peers for k in range(count)
            }
            works += [comm.irecv(tensor, peer) for (peer, _), tensor in received.items()]
            for work in works:
                work.wait()
            coor.barrier()
            return all(torch.equal(data, rows[peer]) for (peer, _), data in received.items())

    assert ranks(body, 3, [1, 1, 1]) == [True] * 3


@pytest.mark.parametrize("options", [{"backend": "gloo"}, {"between": "gloo"}], ids=str)
def test_a_backend_that_does_not_encrypt_is_refused_between_hosts(ranks, options):
    def body(info):
        with Coordinator(info, timeout_s=20, encrypt=True) as coor:
            with pytest.raises(Unsupported, match=r"gloo: it does not encrypt.*--encrypt"):
                Communicator(coor, **{"backend": "hierarchical", **options})
            coor.barrier()

    ranks(body, 3, [2, 1])


def test_a_backend_that_does_not_encrypt_serves_one_host(ranks):
    def body(info):
        with (
            Coordinator(info, timeout_s=20, encrypt=True) as coor,
            Communicator(coor, "gloo") as comm,
        ):
            return comm.allreduce(torch.ones(2)).tolist()

    assert ranks(body, 2) == [[2.0, 2.0]] * 2


def relayed(link, alter):
    """The connection through a stranger, who passes on what alter(data) makes of it."""
    keys, plain = link.take_keys(), socket.socket(fileno=link.detach())
    plain.setblocking(True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()

    def pass_on(source, target, change):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(change(data))
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    for way in ((theirs, plain, alter), (plain, theirs, bytes)):
        threading.Thread(target=pass_on, args=way, daemon=True).start()
    return EncryptedSocket(ours, keys)


@pytest.mark.parametrize("how", ["altered", "repeated"])
def test_a_stranger_in_between_ends_the_call_of_both_ranks(ranks, monkeypatch, how):
    does_alter = threading.Event()
    connect = PeerConnector.connect

    def alter(data):
        if not does_alter.is_set():
            return data
        return data + data if how == "repeated" else data[:-1] + bytes([data[-1] ^ 1])

    def connect_through_a_stranger(self, *arguments):
        links = connect(self, *arguments)
        return {
            rank: relayed(link, alter) if self.rank == 1 else link for rank, link in links.items()
        }

    monkeypatch.setattr(PeerConnector, "connect", connect_through_a_stranger)

    def body(info):
        with (
            Coordinator(info, timeout_s=20, encrypt=True) as coor,
            Communicator(coor, "tcp") as comm,
        ):
            comm.allreduce(torch.ones(5))
            coor.barrier()
            does_alter.set()
            with pytest.raises(PeerLost) as lost:
                while True:
                    comm.allreduce(torch.ones(100_000))
            coor.barrier()
            return str(lost.value)

    texts = ranks(body, 2, [1, 1])
    assert "altered, repeated or left out on its way" in texts[0], texts
