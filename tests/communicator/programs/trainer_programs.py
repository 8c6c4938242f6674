"""Ways in which trainers use torch.distributed, on gloo and then on drumline.

python trainer_programs.py FOLDER     # writes FOLDER/<program>: a traceback, or nothing
"""

import sys
import threading

import process_group_programs as programs
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from process_group_programs import mine, network, program, train
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from communicator import Unsupported

programs.PROGRAMS.clear()


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def summed_by_the_group(group, bucket):
    work = group.allreduce([bucket.buffer()])
    return work.get_future().then(lambda future: future.value()[0] / group.size())


@program(2)
def data_parallel_with_hooks():
    hooks = [
        (dist.group.WORLD, summed_by_the_group),
        (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    ]
    found = []
    for state, hook in hooks:
        model = DistributedDataParallel(network(), bucket_cap_mb=0.0005)
        model.register_comm_hook(state, hook)
        found += train(model) + weights(model)
    return found


@program(2)
def data_parallel_with_compressed_gradients():
    """PowerSGD compresses what it sums, so only the ranks are compared. It aborts gloo."""
    dist.barrier()
    if dist.get_backend() == "gloo":
        return []
    model = DistributedDataParallel(network())
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, steps=5)
    for weight in weights(model):
        rows = [torch.empty_like(weight) for _ in range(2)]
        dist.all_gather(rows, weight)
        assert torch.equal(*rows)
    return []


@program(2)
def data_parallel_with_a_static_graph_and_views():
    found = []
    for options in ({"static_graph": True}, {"gradient_as_bucket_view": True}):
        model = DistributedDataParallel(network(), bucket_cap_mb=0.0005, **options)
        found += train(model) + weights(model)
    return found


@program(2)
def data_parallel_averaged_now_and_then():
    model = DistributedDataParallel(network())
    alone, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=1)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(mine(4, 8, seed=step)).square().mean().backward()
        optimizer.step()
        averager.average_parameters(model.parameters())  # of those that have a gradient
    return weights(model)


@program(2)
def data_parallel_with_sparse_gradients():
    torch.manual_seed(4)
    model = DistributedDataParallel(nn.EmbeddingBag(9, 4, mode="sum", sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        model(mine(2, 3, seed=step).long().abs()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@program(3)
def sparse_sums():
    rank, found = dist.get_rank(), []
    for entries, dtype in ((2 * rank, torch.float64), (0, torch.float32), (5, torch.int64)):
        indices, values = mine(2, entries).abs().long() % 4, mine(entries, 3).to(dtype)
        tensor = torch.sparse_coo_tensor(indices, values, (4, 4, 3))
        dist.all_reduce(tensor)
        found.append(tensor.to_dense())
    if dist.get_backend() == "gloo":
        return found
    try:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    except Unsupported as error:
        assert "of sparse tensors is not offered, only SUM" in str(error)
    else:
        raise AssertionError("nobody noticed")
    return found


@program(2)
def optimizer_sharded():
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    for step in range(3):
        model(mine(4, 8, seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict(to=0)
    steps = []
    if dist.get_rank() == 0:
        steps = [float(state["step"]) for state in optimizer.state_dict()["state"].values()]
    return weights(model) + steps


@program(2)
def fully_sharded_in_one_piece():
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    losses = train(model)
    with FullyShardedDataParallel.summon_full_params(model):
        return losses + weights(model)


@program(2)
def fully_sharded_in_its_other_ways():
    mesh, found = init_device_mesh("cpu", (2,)), []
    lower = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in ({"reshard_after_forward": False}, {"mp_policy": lower}):
        model = network()
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh, **options)
        model.set_requires_gradient_sync(False)
        model(mine(4, 8, seed=9)).sum().backward()
        model.set_requires_gradient_sync(True)
        model(mine(4, 8, seed=10)).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found += [norm.full_tensor(), *(weight.grad.full_tensor() for weight in model.parameters())]
        found += train(model)
    return found


@program(4)
def tensors_laid_out_anew():
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    whole, found = torch.randint(-9, 9, (7, 6)).float(), []
    layouts = [Replicate(), Shard(0), Shard(1)]
    pairs = [(one, other) for one in layouts for other in layouts]
    for start in pairs:
        for end in pairs:
            moved = distribute_tensor(whole, mesh, start).redistribute(mesh, end)
            found.append(moved.to_local())
    for end in layouts:
        sums = DTensor.from_local(mine(7, 6), mesh, [Partial(), Replicate()], run_check=False)
        found.append(sums.redistribute(mesh, [end, Replicate()]).to_local())
    most = DTensor.from_local(mine(3), mesh, [Replicate(), Partial("max")], run_check=False)
    return [*found, most.full_tensor()]


@program(2)
def sequence_and_loss_parallel():
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6))
    plan = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(
            input_layouts=Shard(0), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, plan)
    with loss_parallel():
        loss = nn.functional.cross_entropy(model(mine(2, 8)), torch.arange(4))
        loss.backward()
    return [loss.full_tensor().detach(), *(w.grad.full_tensor() for w in model.parameters())]


def blocks(count):
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(count)]


def pipelined(schedule, stages_per_rank):
    rank, world = dist.get_rank(), dist.get_world_size()
    count = stages_per_rank * world
    parts = blocks(count)[rank::world]
    stages = [
        PipelineStage(part, rank + world * index, count, torch.device("cpu"))
        for index, part in enumerate(parts)
    ]
    one_or_more = stages if stages_per_rank > 1 else stages[0]
    running = schedule(one_or_more, 4, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(5)
    inputs, target, losses = torch.randn(8, 8), torch.randn(8, 8), []
    for _ in range(2):
        words = {"target": target, "losses": losses} if rank == world - 1 else {}
        running.step(*([inputs] if rank == 0 else []), **words)
    return [
        *map(torch.Tensor.detach, losses),
        *(w.grad for part in parts for w in part.parameters()),
    ]


@program(2)
def pipelines_with_one_stage_or_two_on_a_rank():
    return [
        *pipelined(Schedule1F1B, 1),
        *pipelined(ScheduleInterleaved1F1B, 2),
        *pipelined(ScheduleInterleavedZeroBubble, 2),
    ]


@program(2)
def collectives_with_gradients():
    world, rank, found = dist.get_world_size(), dist.get_rank(), []

    def ask(call, x):
        outs = call(x)
        outs = [outs] if isinstance(outs, torch.Tensor) else list(outs)
        sum((out * (3 + rank)).sum() for out in outs).backward()
        found.extend([*(out.detach() for out in outs), x.grad])

    def leaf(*shape, seed):
        return mine(*shape, seed=seed).requires_grad_()

    ask(lambda x: differentiable.all_reduce(x * 2), leaf(4, seed=1))
    ask(lambda x: differentiable.broadcast(x * 2, 1), leaf(4, seed=2))
    ask(lambda x: differentiable.all_gather(x * 2), leaf(4, seed=3))
    ask(
        lambda x: differentiable.all_to_all_single(torch.zeros(world, 2), x * 2),
        leaf(world, 2, seed=5),
    )
    return found


@program(2)
def ranks_of_a_group_by_their_number_in_it():
    pair, rank = dist.new_group([0, 1]), dist.get_rank()
    one, other, row = mine(3), mine(3, seed=1), torch.zeros(2)
    dist.broadcast(one, group=pair, group_src=1)
    dist.reduce(other, group=pair, group_dst=0)
    dist.scatter(row, list(mine(2, 2).unbind()) if rank else None, group=pair, group_src=1)
    return [one, row, *([other] if rank == 0 else [])]


@program(2)
def threads_that_call_each_in_a_group_of_their_own():
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    found = [mine(1000, seed=number) for number in range(3)]

    def work(tensor, group):
        for _ in range(20):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(found, groups, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


if __name__ == "__main__":
    for each in sys.argv[2:] or programs.PROGRAMS:
        programs.run(each, sys.argv[1])
