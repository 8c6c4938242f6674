"""Shared by these programs: the checkpoint of argv[1] over all ranks of the launch."""

import sys

import torch

import drumline
from coordinator import Coordinator

torch.set_num_threads(1)
PROMPT = torch.arange(3, 12)[None]


def load(**options):
    """A Coordinator, and on rank 0 the model; all other ranks serve within this call."""
    coor = Coordinator()
    memory = [1 << 30] * coor.world_size
    return coor, drumline.load(sys.argv[1], coor=coor, max_memory=memory, **options)


def generate(model, num_tokens=20):
    return model.generate(PROMPT, max_new_tokens=num_tokens, do_sample=False)
