"""Model parallel by layers: every rank holds some blocks; hidden states go from rank to rank.

drumline run -n 2 examples/recipes/model_parallel.py
"""

import itertools

import torch
from model import DEPTH, WIDTH, device_of, make_batch, make_model

from communicator import Communicator
from coordinator import Coordinator

BATCH = 6

with Coordinator() as coor, Communicator(coor) as comm, torch.no_grad():
    device = device_of(coor)
    model, (words, _) = make_model(device), make_batch(BATCH, device)
    expected = model(words)
    ends = [DEPTH * rank // coor.world_size for rank in range(coor.world_size + 1)]
    mine = model.blocks[ends[coor.rank] : ends[coor.rank + 1]]
    last = coor.world_size - 1

    if coor.rank == 0:
        x = model.embed(words)
    else:
        x = comm.recv(torch.empty(*words.shape, WIDTH, device=device), coor.rank - 1)
    for block in mine:
        x = block(x)
    if coor.rank < last:
        comm.send(x, coor.rank + 1)
    logits = model.head(x) if coor.rank == last else torch.empty_like(expected)
    comm.broadcast(logits, src=last)

    assert torch.equal(logits, expected), "not the same bits"
    if coor.is_master():
        held = [end - start for start, end in itertools.pairwise(ends)]
        print(f"logits equal to the bit; ranks hold {held} blocks")
        print(f"{WIDTH * x.element_size()} bytes sent per token and hop")
