"""Connections between any two ranks."""

import contextlib
import os
import re
import socket
import threading
import time

import pytest

from coordinator import Coordinator, CoordinatorError, PeerLost
from coordinator.peers import Peer
from coordinator.store import torch_store
from coordinator.transport import connections
from coordinator.transport.connections import PeerConnector
from coordinator.transport.tree import connect_to_parent
from launcher import Credentials


def word(sender, receiver):
    return f"from {sender} to {receiver}".encode()


@pytest.mark.parametrize("nodes", [[5], [3, 2]])
def test_every_two_ranks_are_connected_and_to_each_other(ranks, nodes):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor, contextlib.ExitStack() as stack:
            for _ in range(2):  # the second ones are others
                links = coor.connections()
                for rank, link in links.items():
                    stack.enter_context(link)
                    link.setblocking(True)
                    link.sendall(word(coor.rank, rank))
                heard = {rank: link.recv(100) for rank, link in links.items()}
                assert heard == {rank: word(rank, coor.rank) for rank in heard}
            coor.barrier()
            return sorted(heard)

    results = ranks(body, 5, nodes)
    assert results == [[r for r in range(5) if r != rank] for rank in range(5)]


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_forked_child_leaves_them_open_at_both_ends(ranks, encrypt):
    """That which had accepted one closed it, and the other did not."""

    def body(info):
        with Coordinator(info, timeout_s=20, encrypt=encrypt) as coor:
            (link,) = coor.connections().values()
            with link:
                child = os.fork()
                if child == 0:
                    os._exit(link.fileno() < 0)
                return os.waitpid(child, 0)[1]

    assert ranks(body, 2) == [0, 0]


def test_a_subgroup_has_connections_by_its_own_ranks(ranks):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            group = coor.split([2, 0])
            if group is None:
                return None
            with group, contextlib.ExitStack() as stack:
                links = {r: stack.enter_context(link) for r, link in group.connections().items()}
                group.barrier()
                return sorted(links)

    assert ranks(body, 3) == [[0], None, [1]]


def test_errors_name_ranks_of_the_launch(ranks_or_errors, monkeypatch):
    monkeypatch.setattr(
        PeerConnector, "_connect", lambda self, *_: "nothing to say" if self.rank == 0 else ""
    )

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            group = coor.split([2, 0])
            if group is not None:
                group.connections()

    error, _, cause = ranks_or_errors(body, 3)
    assert str(error).startswith("rank 0 has no connections") and str(cause) == "nothing to say"


def test_connections_are_on_one_address_and_nobody_listens_afterwards(ranks):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            (link,) = coor.connections().values()
            with link:
                addresses = {link.getsockname()[0], link.getpeername()[0]}
                listener = max(link.getsockname(), link.getpeername(), key=lambda a: coor.rank == 0)
                coor.barrier()
                if coor.rank == 0:
                    with pytest.raises(ConnectionRefusedError):
                        socket.create_connection(link.getsockname(), timeout=5)
                coor.barrier()
                return addresses, listener[0]

    assert ranks(body, 2) == [({"127.0.0.1"}, "127.0.0.1")] * 2


def test_a_rank_that_does_not_come_is_named(ranks_or_errors):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            if coor.rank != 1:
                coor.connections(timeout_s=1)

    begun = time.monotonic()
    outcomes = ranks_or_errors(body, 3)
    assert time.monotonic() - begun < 10
    for error in (outcomes[0], outcomes[2]):
        assert isinstance(error, CoordinatorError) and "rank 1" in str(error)


def test_ranks_that_cannot_reach_each_other_say_so_at_the_deadline(ranks_or_errors, monkeypatch):
    """They had no time left to tell each other, and said no more than that."""
    monkeypatch.setattr(
        connections,
        "connect_to_parent",
        lambda address, *others: connect_to_parent((address[0], 9), *others),
    )

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            coor.connections(timeout_s=1)

    waiting, failing = ranks_or_errors(body, 2)
    assert re.search(r"waited (0\.[89]|1\.0) s for rank 1", str(waiting))
    assert "firewall" in str(failing)


def test_a_rank_that_leaves_while_others_connect_to_it_is_named_at_once(
    ranks_or_errors, monkeypatch
):
    """They waited until their deadline, their error had no failures, and they kept sockets."""
    connect, made = PeerConnector._connect, []

    def leave(connector, *arguments):
        made.append(connector.connections)
        return 1 // 0 if connector.rank == 2 else connect(connector, *arguments)

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            coor.connections()

    monkeypatch.setattr(PeerConnector, "_connect", leave)
    begun = time.monotonic()
    errors = ranks_or_errors(body, 3)
    assert time.monotonic() - begun < 10
    for error in errors[:2]:
        assert isinstance(error, PeerLost) and [each.rank for each in error.failures] == [2], error
    assert [link for links in made for link in links.values() if link.socket.fileno() >= 0] == []


def test_a_connection_to_what_never_answers_ends_as_its_rank_does():
    """Once it was connected, it waited for the whole deadline without a look at who was lost."""
    begun, loss = time.monotonic(), PeerLost("rank 0 is gone")

    def check():
        if time.monotonic() - begun > 0.1:
            raise loss

    here = Peer(0, 0, 1, "here", "", os.getpid(), 0)
    credentials = Credentials(bytes(32), "launch", 2)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(PeerLost) as raised:
        address, deadline = listener.getsockname(), begun + 10
        connect_to_parent(address, credentials, here, here, "connections", deadline, check)
    assert raised.value is loss


def test_over_gloo_a_rank_may_leave_as_soon_as_it_has_joined(ranks, monkeypatch):
    """Another one still connected, and lost what it had."""
    wait, late = torch_store.TorchStore.wait, threading.local()

    def wait_and_sleep(store, keys, timeout=None):
        wait(store, keys, timeout)
        time.sleep(0.1 * hasattr(late, "here"))

    def body(info):
        if info.rank == 1:
            late.here = True
        Coordinator(info, transport="gloo", timeout_s=60).close()

    monkeypatch.setattr(torch_store.TorchStore, "wait", wait_and_sleep)
    ranks(body, 4)
