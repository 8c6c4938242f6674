"""A rank of a training run is killed, stopped or late; the others are to be told, and go on alone.

    python trainer_failures.py FOLDER CASE ACT

CASE: ddp, fsdp2, ...; ACT: kill, stop, late, raise or random.
It leaves FOLDER/outcome.json: the victim's pid, the exit code of each survivor, and the type and
text of its error with the seconds since the act; each has loaded what it saved after the error.
With "random" the victim is killed from outside, anywhere in its steps.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # DDP does so: once for all that are forked here
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed import BuiltinCommHookType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import communicator.torch_interop.process_group  # noqa: F401

WORLD, VICTIM, STEPS_BEFORE = 3, 1, 2
LIVES = ("late", "raise")  # after which the victim ends by itself
PATIENT_S, HASTY_S = 30, 1  # the group's timeout where a rank dies, and where it is late
FOLDER, CASE, ACT = Path(sys.argv[1]), sys.argv[2], sys.argv[3]


def act():
    """The victim's end, or its pause of twice the timeout; the time is left in a file."""
    (FOLDER / "acted").write_text(str(time.time()))
    if ACT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if ACT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if ACT == "late":
        time.sleep(2 * HASTY_S)
    if ACT == "raise":
        raise ValueError("a bad batch")


def layers():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def stepping(model):
    """step(is_last): one step of training; the victim acts as the last backward begins."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(is_last):
        loss = model(torch.ones(3, 4)).sum()
        if is_last:
            loss.register_hook(lambda _: act())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(**options):
    model = DistributedDataParallel(layers(), bucket_cap_mb=0.0001, **options)
    return model, stepping(model)


def ddp_find_unused():
    model = layers()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    model = DistributedDataParallel(model, bucket_cap_mb=0.0001, find_unused_parameters=True)
    return model, stepping(model)


def ddp_python_hook():
    def summed(_, bucket):
        work = dist.group.WORLD.allreduce([bucket.buffer()])
        return work.get_future().then(lambda future: future.value()[0])

    model, step = ddp()
    model.register_comm_hook(None, summed)
    return model, step


def ddp_builtin_hook():
    model, step = ddp()
    model._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)
    return model, step


def ddp_no_sync():
    model, step = ddp()

    def steps(is_last):
        with model.no_sync():
            model(torch.ones(3, 4)).sum().backward()
        step(is_last)

    return model, steps


def ddp_by_accelerate():
    accelerator, model = Accelerator(cpu=True), layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(is_last):
        loss = model(torch.ones(3, 4)).sum()
        if is_last:
            loss.register_hook(lambda _: act())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.gather(loss.detach())

    return model, step


def fsdp1():
    model = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"))
    return model, stepping(model)


def fsdp2():
    model, mesh = layers(), init_device_mesh("cpu", (WORLD,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    return model, stepping(model)


def pipeline():
    rank = dist.get_rank()
    part = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    stage = PipelineStage(part, rank, WORLD, torch.device("cpu"))
    schedule = Schedule1F1B(stage, WORLD, loss_fn=nn.functional.mse_loss)

    def step(is_last):
        if is_last:
            part.register_full_backward_hook(lambda *_: act())
        words = {"target": torch.zeros(6, 4)} if rank == WORLD - 1 else {}
        schedule.step(*([torch.ones(6, 4)] if rank == 0 else []), **words)

    return part, step


CASES = {
    "ddp": ddp,
    "ddp_static_graph": lambda: ddp(static_graph=True),
    "ddp_find_unused": ddp_find_unused,
    "ddp_python_hook": ddp_python_hook,
    "ddp_builtin_hook": ddp_builtin_hook,
    "ddp_no_sync": ddp_no_sync,
    "ddp_by_accelerate": ddp_by_accelerate,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "pipeline": pipeline,
}


def error_of_training(rank):
    """The error that ends it: type, text, and the seconds since the victim acted."""
    limit = timedelta(seconds=HASTY_S if ACT in ("stop", "late") else PATIENT_S)
    store = dist.FileStore(str(FOLDER / "store"), WORLD)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    os.environ.update(LOCAL_WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    dist.init_process_group("drumline", store=store, rank=rank, world_size=WORLD, timeout=limit)
    model, step = CASES[CASE]()
    (FOLDER / f"ready{rank}").touch()
    number = 0
    try:
        while True:
            number += 1
            step(rank == VICTIM and ACT != "random" and number > STEPS_BEFORE)
    except Exception as error:
        took_s = time.time() - float((FOLDER / "acted").read_text())
        save(model, rank)
        return [type(error).__name__, str(error), took_s]


def save(model, rank):
    """Save what this rank has, and load it again."""
    state = {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        for name, tensor in model.named_parameters()
    }
    torch.save(state, FOLDER / f"{rank}.pt")
    torch.load(FOLDER / f"{rank}.pt")


def start(rank):
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        (FOLDER / f"{rank}.json").write_text(json.dumps(error_of_training(rank)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def kill_at_random(pid):
    while len(list(FOLDER.glob("ready*"))) < WORLD:
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.5))
    (FOLDER / "acted").write_text(str(time.time()))
    os.kill(pid, signal.SIGKILL)


def main():
    pids = [start(rank) for rank in range(WORLD)]
    if ACT == "random":
        kill_at_random(pids[VICTIM])
    survivors = [rank for rank in range(WORLD) if rank != VICTIM or ACT in LIVES]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1]) for rank in survivors]
    if ACT == "stop":
        os.kill(pids[VICTIM], signal.SIGKILL)
    if ACT not in LIVES:
        os.waitpid(pids[VICTIM], 0)
    errors = [json.loads((FOLDER / f"{rank}.json").read_text()) for rank in survivors]
    outcome = {"pid": pids[VICTIM], "codes": codes, "errors": errors}
    (FOLDER / "outcome.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
