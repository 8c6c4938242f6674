"""The pass that a thread is in, also when Ctrl-C comes between any two lines of it."""

import sys

from torch import nn
from transformers.cache_utils import DynamicCache

from drumline.pipeline.pass_hooks import PassContext


def interrupted_at(count: int, context: PassContext, model: nn.Module) -> None:
    """Begin and end a pass, with a KeyboardInterrupt before the line of this number, if any."""
    left = count

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename != sys.modules[PassContext.__module__].__file__:
            return None
        left -= event == "line"
        if left == 0 and event == "line":
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        context.begin(model, (), {"past_key_values": DynamicCache()})
        context.end(model)
    finally:
        sys.settrace(None)


def test_an_interrupt_anywhere_is_the_error_and_the_next_pass_begins():
    context, model = PassContext(), nn.Identity()
    for count in range(1, 100):
        try:
            interrupted_at(count, context, model)
        except KeyboardInterrupt:
            context.end(model)  # as the `finally` of a model's call does
            assert not context.came_empty(DynamicCache())
            continue
        break
    assert count > 8
    context.begin(model, (), {})
    assert context.came_empty(DynamicCache())
