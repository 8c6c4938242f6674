"""What the ranks of test_dropout_rng.py run, one process each: dropout over tensor parallel.

python -m launcher run -n 2 tests/drumline/tensor_parallel/dropout_ranks.py FOLDER
"""

import json
import sys

import torch
from torch import nn

import drumline
from communicator import Communicator
from coordinator import Coordinator

IDS = torch.arange(22).reshape(2, 11) + 3


class Pair(nn.Module):
    """Leaves out in what a rank has alone, and in what all have."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 400), nn.Linear(400, 300)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x):
        self.own = self.inner(torch.ones_like(self.up(x)))
        return self.outer(self.down(self.own))


def step(model):
    """The loss, and the gradient of a tensor that every rank has."""
    model.zero_grad()
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    return loss.item(), model.model.final_layernorm.weight.grad.tolist()


def look(folder):
    with Coordinator() as coor:
        torch.manual_seed(coor.rank)
        model = drumline.load(folder, coor=coor, tp=2).train()
        steps = [step(model), step(model)]
        torch.manual_seed(7)
        once = step(model)
        torch.manual_seed(coor.rank)
        trunk = model.model(IDS).last_hidden_state.sum().item()
        torch.manual_seed(7)
        model.gradient_checkpointing_enable()
        again = step(model)
        model.close()
        with Communicator(coor) as comm:
            torch.manual_seed(0)
            pair = Pair()
            drumline.parallelize(pair, {"up": "colwise", "down": "rowwise"}, comm)
            torch.manual_seed(coor.rank)
            y = pair(torch.ones(3, 6))
            own = pair.own.tolist()
        found = {"steps": steps, "trunk": trunk, "once": once, "again": again}
        found |= {"y": y.tolist(), "own": own}
        told = coor.allgather(json.dumps(found).encode())
        if coor.is_master():
            print("found", json.dumps([json.loads(data) for data in told]))


if __name__ == "__main__":
    look(sys.argv[1])
