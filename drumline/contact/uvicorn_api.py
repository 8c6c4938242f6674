"""All that drumline takes from uvicorn and h11: no other module imports them.

Of uvicorn's connection only `http=` is documented, which takes a class. What such a class may use
is not: HttpConnection says that in words of our own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol


def config(app: Any, connection: Callable[..., Any], **settings: Any) -> Any:
    """The settings of a server. connection: makes each connection, an HttpConnection."""
    return uvicorn.Config(app, http=connection, ws="none", lifespan="off", **settings)


def server(settings: Any) -> Any:
    """A server with config()'s settings, that leaves signals to the caller: handle_exit takes one.

    run(sockets=) returns when should_exit is set.
    """
    made = uvicorn.Server(settings)
    made.capture_signals = contextlib.nullcontext  # uvicorn's own raises the signal again
    return made


MAX_UNREAD_NBYTES = 64 << 10  # of requests that come while one is answered


class HttpConnection(H11Protocol):  # type: ignore[misc]
    """A connection of uvicorn's, whose requests have one length each, in our words."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _UnambiguousRequests(h11.SERVER)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.on_turn()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # which pauses reading; an application that waits resumes it
        if self.is_answering() and len(self.conn.trailing_data[0]) > MAX_UNREAD_NBYTES:
            self.close_at_once()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.on_turn()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.on_turn()

    def on_turn(self) -> None:
        """Called when it begins to wait for its client: to send a request, or to take an answer."""

    def open_connections(self) -> list[HttpConnection]:
        """All of this server, this one among them."""
        return [*self.connections]

    def waits_for_client(self) -> bool:
        """True unless a whole request is being answered, and the answer is taken."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) or self.is_untaken()

    def is_untaken(self) -> bool:
        """True if its client does not take the answer."""
        return bool(self.flow.write_paused)

    def is_answering(self) -> bool:
        """True if the application has a request and has not answered it whole."""
        return self.cycle is not None and not self.cycle.response_complete

    def close_at_once(self) -> None:
        """Close, and count as open no longer."""
        self.connections.discard(self)
        self.transport.abort()

    def later(self, seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        handle: asyncio.TimerHandle = self.loop.call_later(seconds, callback)
        return handle

    def send_400_response(self, msg: str) -> None:
        """Answer that the request is wrong, or close where an answer has begun already."""
        is_answered = self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE)
        if self.cycle is not None:
            self.cycle.disconnected = True  # nothing that its application sends can follow
        if is_answered:
            self.transport.abort()
        else:
            super().send_400_response(msg)


class _UnambiguousRequests(h11.Connection):
    """h11, but a body has one length: two servers that disagree would see two requests."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            has_length = b"content-length" in names or event.http_version < b"1.1"
            if b"transfer-encoding" in names and has_length:
                raise h11.RemoteProtocolError("two lengths of one body")  # RFC 9112, 6.1
        return event
