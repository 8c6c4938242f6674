"""Pipeline parallel training: micro-batches keep the stages busy, in GPipe and in 1F1B order.

drumline run -n 2 examples/recipes/pipeline_parallel.py
"""

import json

import torch
from model import DEPTH, WIDTH, device_of, largest_error, loss_of, make_batch, make_model

from communicator import Communicator
from coordinator import Coordinator

BATCH, MICRO = 24, 6


def order(name, rank, stages):
    """What a stage does, in order: ("F", 3) is forward of micro-batch 3."""
    first = MICRO if name == "GPipe" else min(stages - rank, MICRO)
    steps = [("F", n) for n in range(first)]
    for n in range(MICRO - first):
        steps += [("B", n), ("F", first + n)]
    return steps + [("B", n) for n in range(MICRO - first, MICRO)]


def run(name, coor, comm, model, batches):
    """Gradients of this stage's part, and its event log."""
    ends = [DEPTH * rank // coor.world_size for rank in range(coor.world_size + 1)]
    blocks = model.blocks[ends[coor.rank] : ends[coor.rank + 1]]
    last, kept = coor.world_size - 1, {}
    for kind, n in order(name, coor.rank, coor.world_size):
        words, targets = batches[n]
        shape = (*words.shape, WIDTH)
        if kind == "F":
            x = (
                model.embed(words)
                if coor.rank == 0
                else comm.recv(
                    torch.empty(shape, device=words.device), coor.rank - 1
                ).requires_grad_()
            )
            y = x
            for block in blocks:
                y = block(y)
            if coor.rank == last:
                y = loss_of(model.head(y), targets) / MICRO
            else:
                comm.send(y.detach(), coor.rank + 1)
            kept[n] = x, y
        else:
            x, y = kept.pop(n)
            given = None
            if coor.rank < last:
                given = comm.recv(torch.empty(shape, device=words.device), coor.rank + 1)
            y.backward(given)
            if coor.rank:
                comm.send(x.grad, coor.rank - 1)
    return order(name, coor.rank, coor.world_size)


def draw(logs):
    """A picture of the steps as a clock of equal ticks would see them, and the idle part of it."""
    done, clock, rows = {}, [0] * len(logs), [""] * len(logs)
    waiting = [list(log) for log in logs]
    while any(waiting):
        for stage, steps in enumerate(waiting):
            needs = steps and ("F", stage - 1) if steps and steps[0][0] == "F" else ("B", stage + 1)
            if not steps or (0 <= needs[1] < len(logs) and (*needs, steps[0][1]) not in done):
                continue
            kind, n = steps.pop(0)
            start = max(clock[stage], done.get((*needs, n), 0))
            rows[stage] += "." * (start - clock[stage]) + (str(n) if kind == "F" else chr(97 + n))
            clock[stage] = done[(kind, stage, n)] = start + 1
    length = max(clock)
    idle = sum(row.ljust(length, ".").count(".") for row in rows) / (length * len(rows))
    return [row.ljust(length, ".") for row in rows], idle


with Coordinator() as coor, Communicator(coor) as comm:
    device = device_of(coor)
    alone = make_model(device)
    inputs, targets = make_batch(BATCH, device)
    loss_of(alone(inputs), targets).backward()
    for name in ("GPipe", "1F1B"):
        model = make_model(device)
        batches = list(zip(inputs.chunk(MICRO), targets.chunk(MICRO), strict=True))
        log = run(name, coor, comm, model, batches)
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        mine = [(p.grad, q.grad) for p, q in pairs if p.grad is not None]
        error = largest_error(*zip(*mine, strict=True))
        assert error < 1e-5, error
        logs = [json.loads(data) for data in coor.allgather(json.dumps(log).encode())]
        rows, idle = draw([[tuple(step) for step in log] for log in logs])
        stages = coor.world_size
        assert abs(idle - (stages - 1) / (MICRO + stages - 1)) < 1e-9
        if coor.is_master():
            print(f"{name}: gradients within {error:.0e}, bubble {idle:.0%}", *rows, sep="\n  ")
