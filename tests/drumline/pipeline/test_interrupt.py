"""Ctrl-C while a message is sent or received."""

import signal

import pytest

from drumline.pipeline.interrupt import DelayedInterrupt


def test_an_interrupt_waits_for_the_end_of_a_message_and_a_second_one_does_not():
    done = []
    with pytest.raises(KeyboardInterrupt), DelayedInterrupt():
        signal.raise_signal(signal.SIGINT)
        done.append("the rest")
    with pytest.raises(KeyboardInterrupt), DelayedInterrupt():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("never")
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert done == ["the rest"]
