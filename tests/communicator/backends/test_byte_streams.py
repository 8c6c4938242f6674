"""Streams over connections: what is sent comes, and an end is seen."""

import ctypes
import gc
import secrets
import socket
import threading
import time

import pytest

from communicator import PeerLost
from communicator.backends.byte_streams import WRITABLE, TcpStreams
from coordinator import link_state
from launcher.authentication.encryption import EncryptedSocket

NBYTES = 1 << 16


@pytest.fixture(params=["plain", "encrypted"])
def streams(request):
    """Those of ranks 0 and 1, over a connection with each other."""
    both = pair(request.param, 20.0)
    yield both
    for end in both:
        end.close()


def pair(kind, silent_s):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        links = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
    if kind == "encrypted":
        keys = [secrets.token_bytes(32), secrets.token_bytes(32)]
        orders = [keys, keys[::-1]]
        links = [
            EncryptedSocket(link, b"".join(order))
            for link, order in zip(links, orders, strict=True)
        ]
    return [TcpStreams({1 - rank: link}, silent_s) for rank, link in enumerate(links)]


def fill(streams, dst):
    """Write as much as is taken; its number of bytes."""
    total, data = 0, ctypes.create_string_buffer(NBYTES)
    while count := streams.stream_write(dst, b"", ctypes.addressof(data), NBYTES):
        total += count
    return total


def read_all(streams, src):
    """Read to the end; the number of bytes that came."""
    total, memory = 0, ctypes.create_string_buffer(NBYTES)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        count = streams.stream_read(src, ctypes.addressof(memory), NBYTES)
        total += count
        try:
            streams.stream_check(src)
        except PeerLost:
            return total
    raise AssertionError("no end")


@pytest.mark.parametrize("answered", ["before", "after"])
def test_what_was_sent_comes_although_the_sender_closes_before_it_reads_all(streams, answered):
    """Its system reset the connection, and dropped what had not left."""
    nbytes = fill(streams[0], 1)
    closer = threading.Thread(target=streams[0].close)
    if answered == "after":
        closer.start()
        closer.join(0.2)
    streams[1].stream_write(0, b"answer", 0, 0)
    if answered == "before":
        closer.start()
    closer.join(0.2)
    assert read_all(streams[1], 0) == nbytes
    closer.join(20)
    assert not closer.is_alive()


def test_two_threads_that_close_both_wait_until_all_was_sent(streams):
    """Each closed the same descriptors, which may be others' by then."""
    nbytes, errors = fill(streams[0], 1), []

    def close():
        try:
            streams[0].close()
        except OSError as error:
            errors.append(error)

    closers = [threading.Thread(target=close) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(0.1)
        assert closer.is_alive()
    assert read_all(streams[1], 0) == nbytes
    for closer in closers:
        closer.join(20)
        assert not closer.is_alive()
    assert not errors


def test_a_peer_that_reads_nothing_for_long_gets_all():
    """The kernel ended the connection then, and close() gave up, though the peer's host answers."""
    pairs = [pair("plain", 1.8) for _ in range(2)]
    sizes = [fill(sender, 1) for sender, _ in pairs]
    closers = [threading.Thread(target=sender.close, args=(20.0,)) for sender, _ in pairs]
    closers[0].start()
    time.sleep(2.9)
    pairs[1][0].stream_check(1)
    closers[1].start()
    for (_, receiver), nbytes, closer in zip(pairs, sizes, closers, strict=True):
        assert read_all(receiver, 0) == nbytes
        closer.join(20)
        assert not closer.is_alive()
        receiver.close()


def test_a_host_that_is_silent_is_lost_and_not_waited_for(streams, monkeypatch):
    fill(streams[0], 1)
    monkeypatch.setattr(link_state, "is_silent", lambda link, patience_s: patience_s == 20.0)
    with pytest.raises(PeerLost, match="rank 1: network failure between 127"):
        streams[0].stream_check(1)
    start_s = time.monotonic()
    streams[0].close(20.0)
    assert time.monotonic() < start_s + 10


def test_a_probe_has_time_for_its_answer_on_a_slow_link(streams, monkeypatch):
    link = streams[0]._connections[1]
    assert 0 < link_state.round_trip_s(link) < 1
    answered_s = time.monotonic() + 0.3
    monkeypatch.setattr(link_state, "is_silent", lambda *_: time.monotonic() < answered_s)
    monkeypatch.setattr(link_state, "round_trip_s", lambda _: 0.3)
    streams[0].stream_check(1)


@pytest.mark.parametrize("interest", [0, WRITABLE])
def test_end_of_a_peer_that_is_not_read_from_is_seen_once(streams, interest):
    """One with something to send was ready for ever, and another one's end was never seen."""
    fill(streams[1], 0)
    streams[1].stream_wait(bytearray([interest, 0]), 0)
    fill(streams[0], 1)  # is unread, so that the connection is reset
    for link in streams[0]._connections.values():
        link.close()
    for timeout_ms in (10_000, 0, 0):
        if streams[1].stream_wait(bytearray([interest, 0]), timeout_ms) == 0:
            streams[1].stream_write(0, b"rest", 0, 0)
    assert streams[1].stream_wait(bytearray([interest, 0]), 0) == -1
    with pytest.raises(PeerLost, match="rank 0: Connection reset by peer"):
        streams[1].stream_check(0)


def test_a_thread_that_aborts_shortens_the_close_of_another(streams):
    fill(streams[0], 1)
    closer = threading.Thread(target=streams[0].close, args=(60.0,))
    closer.start()
    time.sleep(0.1)
    streams[0].close(0.2)
    closer.join(5)
    assert not closer.is_alive()


def test_transfers_of_many_sizes_leave_nothing_to_the_garbage_collector(streams):
    """Each size had a type of its own, for ever in a program that has disabled the collector."""
    memory = ctypes.create_string_buffer(NBYTES)
    address = ctypes.addressof(memory)
    gc.disable()
    before = set(ctypes.Array.__subclasses__())
    try:
        for nbytes in range(100, 200):
            assert streams[0].stream_write(1, b"", address, nbytes) == nbytes
            streams[1].stream_read(0, address, nbytes)
        num_types = len(set(ctypes.Array.__subclasses__()) - before)
        assert num_types < 10
    finally:
        gc.enable()


def test_a_rank_has_no_connection_to_itself_to_be_lost(streams):
    streams[0].stream_check(0)
