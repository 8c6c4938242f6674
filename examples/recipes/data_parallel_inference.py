"""Inference over a dataset: every rank answers its share; every answer comes back once, in order.

drumline run -n 2 examples/recipes/data_parallel_inference.py
"""

import json

import torch
from model import device_of, make_batch, make_model

from coordinator import Coordinator

QUESTIONS, BATCH = 53, 8  # a prime: no number of ranks divides it

with Coordinator() as coor, torch.no_grad():
    device = device_of(coor)
    model, (words, _) = make_model(device), make_batch(QUESTIONS, device)
    mine = range(coor.rank, QUESTIONS, coor.world_size)
    answers = {}
    for start in range(0, len(mine), BATCH):
        ids = list(mine[start : start + BATCH])  # the last batch may be short, or there be none
        best = model(words[ids])[:, -1].argmax(-1)
        answers.update(zip(ids, best.tolist(), strict=True))

    parts = [
        json.loads(data) for data in coor.allgather(json.dumps(list(answers.items())).encode())
    ]
    together = sorted(pair for part in parts for pair in part)
    assert [number for number, _ in together] == list(range(QUESTIONS)), "an id is missing or twice"
    assert [word for _, word in together] == model(words)[:, -1].argmax(-1).tolist()
    if coor.is_master():
        sizes = [len(part) for part in parts]
        print(f"{QUESTIONS} answers in order, each once, from ranks with {sizes} of them")
