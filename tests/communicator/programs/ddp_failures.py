"""Collectives that fail in DDP's backward: a rank is killed there, is late, or brings what no
communicator moves.

python ddp_failures.py FOLDER     # leaves FOLDER/<case>.<rank>.json of each rank that survives
"""

import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # DDP does so: once for all that are forked here
import torch.distributed as dist
from torch import nn
from torch.distributed import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel

import communicator.torch_interop.process_group  # noqa: F401

WORLD, VICTIM = 3, 1
PATIENT_S, HASTY_S = 30, 0.5


def die(_):
    os.kill(os.getpid(), signal.SIGKILL)


def be_late(_):
    time.sleep(2 * HASTY_S)


def go_on(_):
    pass


def summed(_, bucket):
    work = dist.group.WORLD.allreduce([bucket.buffer()])
    return work.get_future().then(lambda future: future.value()[0])


def wrapped(model, **options):
    return DistributedDataParallel(model, bucket_cap_mb=0.0001, **options)


def layers():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def with_unused():
    model = layers()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return wrapped(model, find_unused_parameters=True)


def with_python_hook():
    model = wrapped(layers())
    model.register_comm_hook(None, summed)
    return model


def with_builtin_hook():
    model = wrapped(layers())
    model._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)
    return model


def sparse():
    return wrapped(nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2)))


# name: the model, what the victim does in backward, the steps before that, the timeout
CASES = {
    "plain": (lambda: wrapped(layers()), die, 2, PATIENT_S),
    "static_graph": (lambda: wrapped(layers(), static_graph=True), die, 2, PATIENT_S),
    "find_unused": (with_unused, die, 2, PATIENT_S),
    "python_hook": (with_python_hook, die, 2, PATIENT_S),
    "builtin_hook": (with_builtin_hook, die, 2, PATIENT_S),
    "late": (lambda: wrapped(layers()), be_late, 2, HASTY_S),
    "sparse": (sparse, go_on, 0, PATIENT_S),
}


def rank_of(case, rank, folder):
    make, act, steps, timeout_s = CASES[case]
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"{case}.store"), WORLD)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("drumline", store=store, rank=rank, world_size=WORLD, timeout=limit)
    model = make()
    inputs = torch.zeros(2, dtype=torch.int64) if case == "sparse" else torch.ones(3, 4)
    for _ in range(steps):
        model(inputs).sum().backward()
    loss = model(inputs).sum()
    if rank == VICTIM:
        loss.register_hook(act)
    told = failure_of(loss.backward)
    checkpoint = folder / f"{case}.{rank}.pt"
    torch.save(model.module.state_dict(), checkpoint)
    model.module.load_state_dict(torch.load(checkpoint))
    (folder / f"{case}.{rank}.json").write_text(json.dumps(told))


def failure_of(call):
    begun = time.monotonic()
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - begun]


def start(case, rank, folder):
    pid = os.fork()
    if pid:
        return pid
    try:
        rank_of(case, rank, folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(folder):
    for case in CASES:
        pids = [start(case, rank, folder) for rank in range(WORLD)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        (folder / f"{case}.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
