"""Ctrl-C while a message is sent or received."""

import gc
import signal
import weakref
from typing import Any, cast

import pytest
import torch
from torch import nn

from drumline.pipeline.driver import PipelineDriver
from drumline.stages.interrupt import DelayedInterrupt


@pytest.mark.usefixtures("interrupts")
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


def test_an_interrupted_pass_keeps_no_model_alive():
    """Its end is not heard of. Other ranks would have waited until the script ends."""
    driver, model = PipelineDriver(cast("Any", None), torch.device("cpu")), nn.Module()
    driver.context.begin(model, (), {})
    left = weakref.ref(model)
    del model
    gc.collect()
    assert left() is None
