"""Compile once: one rank makes a program, all load its bytes and move it to their own device.

drumline run -n 2 examples/recipes/compile_once.py
"""

import io
import tempfile
import time

import torch
from model import DEPTH, INNER, WIDTH, Model, device_of, make_batch, make_model

import drumline
from coordinator import Coordinator

with Coordinator() as coor, torch.no_grad(), tempfile.TemporaryDirectory() as folder:
    model, (words, _) = make_model(), make_batch(4)
    builds = []

    def build():
        builds.append(coor.rank)
        program, data = torch.export.export(model, (words,)), io.BytesIO()
        torch.export.save(program, data)
        return data.getvalue()

    key = drumline.fingerprint(Model, sizes=[WIDTH, INNER, DEPTH], batch=list(words.shape))
    start = time.monotonic()
    path = drumline.get_or_build(key, build, coor, folder=folder)
    waited = time.monotonic() - start

    device = device_of(coor)
    drumline.hoist_package(path, f"{folder}/own.pt2", {"cpu": device})
    run = torch.export.load(f"{folder}/own.pt2").module()
    logits = drumline.assert_device(device)(run(words.to(device)))
    torch.testing.assert_close(logits.cpu(), model(words))
    drumline.assert_identical_on_ranks(coor, logits)
    counts = [len(data) for data in coor.allgather(b"x" * len(builds))]
    assert sum(counts) == 1, f"built {counts} times"
    if coor.is_master():
        print(f"built once in {waited:.1f} s, loaded by {coor.world_size} ranks, same bits on each")
