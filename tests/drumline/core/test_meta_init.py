"""A model that is built on meta has its names and shapes, and nothing was drawn for it."""

import threading

import torch
from torch import nn

from drumline.core.meta_init import init_on_meta


class Odd(nn.Module):
    """Fills its weights in every way there is."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(3, 5), nn.Embedding(7, 3, padding_idx=0)
        self.mixed = nn.init.orthogonal_(torch.empty(4, 4))
        self.scale = nn.Parameter(nn.init.constant_(tensor=torch.empty(2), val=3.0))
        nn.init.trunc_normal_(self.linear.weight, std=0.1)
        self.table.weight.data.normal_().uniform_()


def test_a_module_has_the_names_and_shapes_that_it_has_elsewhere():
    with init_on_meta():
        found = Odd()
    expected = {name: tensor.shape for name, tensor in Odd().state_dict().items()}
    assert {name: tensor.shape for name, tensor in found.state_dict().items()} == expected
    assert all(tensor.is_meta for tensor in found.state_dict().values()) and found.mixed.is_meta


def test_what_is_elsewhere_is_filled():
    with init_on_meta():
        filled = nn.init.ones_(torch.empty(3, device="cpu"))
        drawn = torch.empty(3, device="cpu").fill_(7).uniform_()
    assert filled.tolist() == [1, 1, 1] and drawn.max() < 7


def test_other_threads_fill_what_they_build():
    """transformers replaces torch's functions for that, and so for every thread of a process."""
    made = []
    with init_on_meta():
        thread = threading.Thread(target=lambda: made.append(nn.init.ones_(torch.empty(2))))
        thread.start()
        thread.join()
    assert made[0].tolist() == [1, 1]
