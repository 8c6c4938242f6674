"""Tensors that layers put out are sent to the master unless it is known not to read them."""

import torch

from drumline.pipeline.deferred_calls import NUM_TRIALS, OutputUsage

USAGE = (("layer", 0, None), False)


def test_a_tensor_is_sent_until_some_of_its_kind_were_let_go_unread():
    """Some that were sent at the same time, and not read yet, were taken for unread ones."""
    usage = OutputUsage()
    tensors = [torch.empty(1) for _ in range(NUM_TRIALS + 2)]
    assert all(usage.is_wanted(USAGE, tensor) for tensor in tensors)
    del tensors[1:]
    assert not usage.is_wanted(USAGE, torch.empty(1))
    assert usage.is_wanted((("layer", 1, None), False), torch.empty(1))
    usage.looked_at.add(USAGE)
    assert usage.is_wanted(USAGE, torch.empty(1))
