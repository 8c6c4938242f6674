"""A connection that waits for a message, and what it does while it waits."""

import socket
import time

import pytest

from coordinator.control.framing import Connection


class Left(Exception):
    """Its sender has left."""


@pytest.mark.parametrize("has_sent", [True, False])
def test_a_message_that_came_while_it_looked_away_is_not_lost(has_sent):
    """Whoever sent it left right after: seen first, that took the answer from the others."""
    receiver, sender = map(Connection, socket.socketpair())

    def idle():
        if has_sent:
            sender.send("the answer", time.monotonic() + 10)
        raise Left

    try:
        if has_sent:
            assert receiver.receive(time.monotonic() + 10, idle) == "the answer"
        else:
            with pytest.raises(Left):
                receiver.receive(time.monotonic() + 10, idle)
    finally:
        receiver.close()
        sender.close()
