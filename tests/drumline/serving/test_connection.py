"""Clients that are slow, many or ambiguous, at raw sockets of a server in this process."""

import asyncio
import contextlib
import http.client
import logging
import socket
import threading
import time

import pytest

from drumline import timings
from drumline.serving import http_server
from drumline.serving.scheduler import ServingLimits
from drumline.timings import ModelTimings

uvicorn = pytest.importorskip("uvicorn", reason="runs after `pip install 'drumline[serve]'`")


def get(path):
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


GET = get("/")
HUGE = 64 << 20
LONG_S = 30.0  # for what is to happen at once


class Echo:
    """Answers the length of the body; at /early before the body, at /huge a long answer.

    At /wait it waits for somebody to ask for /end.
    """

    def __init__(self):
        self.num_waiting, self.end = 0, asyncio.Event()

    async def __call__(self, scope, receive, send):
        nbytes, more, path = 0, scope["path"] != "/early", scope["path"]
        while more:
            message = await receive()
            nbytes, more = nbytes + len(message.get("body", b"")), message.get("more_body", False)
        if path == "/wait":
            self.num_waiting += 1
            await self._wait(receive)
        if path == "/end":
            self.end.set()
        body = b"x" * HUGE if path == "/huge" else str(nbytes).encode()
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})

    async def _wait(self, receive):
        """Look again and again whether the client has left, as the server does."""
        while not self.end.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(receive(), 0.01)
                await self.end.wait()


@pytest.fixture
def connect(monkeypatch, caplog):
    """Connects to a server of at most 10 connections, which logs nothing."""
    monkeypatch.setattr(http_server, "MAX_WAITING_CONNECTIONS", 4)
    app = Echo()
    server = uvicorn.Server(http_server.uvicorn_config(app, ServingLimits(9, 4, 2)))
    logging.getLogger("uvicorn").addHandler(caplog.handler)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    with contextlib.ExitStack() as clients:

        def connect(data=b""):
            client = clients.enter_context(socket.create_connection(address, timeout=LONG_S))
            client.sendall(data)
            return client

        connect.num_open = lambda: len(server.server_state.connections)
        connect.app = app
        yield connect
        server.should_exit = True
    thread.join()
    logging.getLogger("uvicorn").removeHandler(caplog.handler)
    assert not caplog.get_records("call")


def received(client):
    """All that comes until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(1 << 20):
            data += piece
    return data


def answer(client):
    """The status and body of one answer."""
    with http.client.HTTPResponse(client) as response:
        response.begin()
        return response.status, response.read()


def wait_until(is_so):
    until = time.monotonic() + LONG_S
    while not is_so() and time.monotonic() < until:
        time.sleep(0.01)
    assert is_so()


def shorten(monkeypatch, **seconds):
    monkeypatch.setattr(timings, "TIMINGS", ModelTimings(**seconds))


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\nHost: x"])
def test_a_head_that_does_not_arrive_closes_the_connection(connect, monkeypatch, data):
    """Half a header was waited for without end."""
    shorten(monkeypatch, header_s=0.2)
    client = connect()
    with contextlib.suppress(ConnectionError):
        client.sendall(data)
    assert received(client) == b""


POST = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n"


@pytest.mark.parametrize("request_", [GET, POST], ids=["head", "body"])
def test_what_trickles_after_an_answer_does_not_keep_the_connection(connect, monkeypatch, request_):
    """Each byte of the rest of a body ended uvicorn's own time limit."""
    client = connect()
    wait_until(connect.num_open)
    shorten(monkeypatch, header_s=0.2)
    client.sendall(request_)
    assert answer(client)[0] == 200
    with pytest.raises(ConnectionError):
        until = time.monotonic() + LONG_S
        while time.monotonic() < until:
            client.sendall(b"x")
            time.sleep(0.01)


def test_a_client_that_does_not_read_its_answer_is_left(connect, monkeypatch):
    shorten(monkeypatch, body_s=0.2)
    client = connect(get("/huge"))
    assert client.recv(1, socket.MSG_PEEK)
    wait_until(lambda: connect.num_open() == 0)
    assert len(received(client)) < HUGE


def test_connections_that_wait_give_way_to_new_ones(connect):
    """Nine hundred were kept, each with a descriptor."""
    slow = [connect(b"GET / HTTP/1.1\r\n") for _ in range(20)]
    slow += [connect(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n") for _ in range(20)]
    for _ in range(20):
        assert answer(connect(GET)) == (200, b"0")
        assert connect.num_open() <= 10
    assert len(slow) == 40


def test_a_connection_that_is_being_answered_does_not_give_way(connect):
    busy = [connect(get("/wait")) for _ in range(9)]
    wait_until(lambda: connect.app.num_waiting == 9)
    slow = [connect(b"GET / HTTP/1.1\r\n") for _ in range(20)]
    assert answer(connect(get("/end"))) == (200, b"0")
    assert [answer(client) for client in busy] == 9 * [(200, b"0")] and slow


CHUNKED = b"Transfer-Encoding: chunked\r\n"
AMBIGUOUS = {
    "length and chunks": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n" + CHUNKED,
    "two lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n",
    "a list of lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5, 6\r\n",
    "chunks before HTTP/1.1": b"POST / HTTP/1.0\r\n" + CHUNKED,
    "chunks twice": b"POST / HTTP/1.1\r\nHost: x\r\n" + CHUNKED + CHUNKED,
    "signed": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: +5\r\n",
    "a space before the colon": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length : 5\r\n",
    "a folded length": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n 6\r\n",
}


@pytest.mark.parametrize("head", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_a_request_of_two_lengths_is_refused_and_nothing_after_it_is_read(connect, head):
    """The rest of the body was answered as a second request."""
    data = received(connect(head + b"\r\n0\r\n\r\n" + GET))
    assert data.startswith(b"HTTP/1.1 400") and data.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("path", [b"/", b"/early"])
def test_a_malformed_chunk_ends_the_connection_and_is_not_logged(connect, path):
    head = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\n" + CHUNKED + b"\r\n"
    assert received(connect(head + b"no length\r\n" + GET)).count(b"HTTP/1.1") == 1
    client = connect(head)
    if path == b"/early":
        assert answer(client)[0] == 200
    client.sendall(b"no length\r\n" + GET)
    assert received(client).count(b"HTTP/1.1") == (path == b"/")


def test_requests_that_are_sent_at_once_are_answered_in_their_order(connect):
    posts = [
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (n, n * b"x")
        for n in range(50)
    ]
    client = connect(b"".join(posts) + GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    lines = received(client).split(b"\r\n")
    bodies = [int(line.removesuffix(b"HTTP/1.1 200 OK")) for line in lines if line[:1].isdigit()]
    assert bodies == [*range(50), 0]


def test_a_client_that_sends_on_and_on_before_it_has_its_answer_is_left(connect):
    """All of it was kept, and each look for the client's end had more of it read."""
    client = connect(get("/wait"))
    wait_until(lambda: connect.app.num_waiting)
    with contextlib.suppress(ConnectionError):
        client.sendall(GET * (1 << 16))
    wait_until(lambda: connect.num_open() == 0)
    assert answer(connect(get("/end"))) == (200, b"0")
