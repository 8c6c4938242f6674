"""One connection of the HTTP server, with the limits that uvicorn has none of.

config = uvicorn.Config(app, http=functools.partial(LimitedConnection, max_connections=256))
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from drumline import timings


class LimitedConnection(H11Protocol):  # type: ignore[misc]
    """Closed if its client is too slow, or when there are too many and it waits for its client.

    Which one of those is chosen at random, so that strangers who come in numbers cannot know how
    to keep the others out.
    """

    def __init__(self, *args: Any, max_connections: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _UnambiguousRequests(h11.SERVER)
        self._max_connections = max_connections
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._set_deadline()
        if len(self.connections) > self._max_connections:
            waiting = [c for c in self.connections if c is not self and c.waits_for_client()]
            surplus = random.choice(waiting or [self])
            self.connections.discard(surplus)
            surplus.transport.abort()

    def waits_for_client(self) -> bool:
        """True unless a whole request is being answered, and the answer is taken."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) or self.flow.write_paused

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def _set_deadline(self) -> None:
        self._clear_deadline()
        limits = timings.TIMINGS
        seconds = limits.body_s if self.flow.write_paused else limits.header_s
        self._deadline = self.loop.call_later(seconds, self._on_deadline)

    def _on_deadline(self) -> None:
        """Close unless a request is being answered; the application limits the time of a body."""
        if self.cycle is None or self.cycle.response_complete or self.flow.write_paused:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
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
