"""One connection of the HTTP server, with the limits that uvicorn has none of.

uvicorn_api.config(app, functools.partial(LimitedConnection, max_connections=256))
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from drumline import timings
from drumline.contact.uvicorn_api import HttpConnection


class LimitedConnection(HttpConnection):
    """Closed if its client is too slow, or when there are too many and it waits for its client.

    Which one of those is chosen at random, so that strangers who come in numbers cannot know how
    to keep the others out.
    """

    def __init__(self, *args: Any, max_connections: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._max_connections = max_connections
        self._deadline = self.later(timings.TIMINGS.header_s, self._on_deadline)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        connections = self.open_connections()
        if len(connections) > self._max_connections:
            waiting = [c for c in connections if c is not self and c.waits_for_client()]
            random.choice(waiting or [self]).close_at_once()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    def on_turn(self) -> None:
        self._deadline.cancel()
        limits = timings.TIMINGS
        seconds = limits.body_s if self.is_untaken() else limits.header_s
        self._deadline = self.later(seconds, self._on_deadline)

    def _on_deadline(self) -> None:
        """Close unless a request is being answered; the application limits the time of a body."""
        if not self.is_answering() or self.is_untaken():
            self.close_at_once()
