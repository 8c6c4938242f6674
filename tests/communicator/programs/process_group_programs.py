"""Programs of torch.distributed, each run by ranks on gloo and then on drumline.

python process_group_programs.py FOLDER     # writes FOLDER/<program>: a traceback, or nothing
"""

import os
import sys
import time
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from communicator import Communicator, CommunicatorTimeout, PeerLost
from communicator.torch_interop import process_group

PROGRAMS = {}


def program(world_size):
    def register(fn):
        PROGRAMS[fn.__name__] = (fn, world_size)
        return fn

    return register


def mine(*shape, seed=0):
    """Values of this rank, small whole numbers so that no order of adding shows."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(-8, 8, shape, generator=generator).float()


@program(3)
def collectives():
    world, rank = dist.get_world_size(), dist.get_rank()
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        tensor = mine(7)
        dist.all_reduce(tensor, op)
        found.append(tensor)
    tensor = mine(5)
    dist.broadcast(tensor, 1)
    found.append(tensor)
    tensor = mine(5)
    dist.reduce(tensor, 2)
    found += [tensor] if rank == 2 else []
    outs = [torch.zeros(2, 3) for _ in range(world)]
    dist.all_gather(outs, mine(2, 3))
    found += outs
    flat = torch.zeros(2 * world, 3)
    dist.all_gather_into_tensor(flat, mine(2, 3))
    found.append(flat)
    out = torch.zeros(4)
    dist.reduce_scatter(out, list(mine(world, 4).unbind()))
    found.append(out)
    out = torch.zeros(2, 3)
    dist.reduce_scatter_tensor(out, mine(2 * world, 3))
    found.append(out)
    outs = [torch.zeros(3) for _ in range(world)] if rank == 1 else None
    dist.gather(mine(3), outs, dst=1)
    found += outs or []
    out = torch.zeros(3)
    dist.scatter(out, list(mine(world, 3).unbind()) if rank == 2 else None, src=2)
    found.append(out)
    dist.barrier()
    return found


@program(3)
def calls_of_a_group_without_options():
    world, rank = dist.get_world_size(), dist.get_rank()
    group, most = dist.group.WORLD, dist.ReduceOp.MAX
    found = []

    def ask(call, outs, *arguments, **words):
        call(*arguments, **words).wait()
        found.extend(outs)

    for arguments in ([], [most], [most, timedelta(seconds=9)]):
        one, other = mine(5), mine(5, seed=1)
        ask(group.allreduce, [one], one, *arguments)
        ask(group.allreduce, [other], [other], *arguments)
    one, other, another = mine(5), mine(5), mine(5)
    ask(group.allreduce, [one], one, op=most)
    ask(group.broadcast, [other], other, 1)
    ask(group.broadcast, [another], another, root=2)
    for arguments, words in (([1], {}), ([1, most], {}), ([], {"root": 1, "op": most})):
        one = mine(5)
        ask(group.reduce, [one] if rank == 1 else [], one, *arguments, **words)
    for arguments, words in (([1], {}), ([], {"root": 1})):
        rows = [torch.zeros(5) for _ in range(world)] if rank == 1 else []
        ask(group.gather, rows, rows, mine(5), *arguments, **words)
        out, parts = torch.zeros(4), list(mine(world, 4).unbind()) if rank == 1 else []
        ask(group.scatter, [out], out, parts, *arguments, **words)
    for arguments in ([], [most]):
        out, parts = torch.zeros(4), list(mine(world, 4).unbind())
        ask(group.reduce_scatter, [out], out, parts, *arguments)
    rows = [torch.zeros(5) for _ in range(world)]
    ask(group.allgather, rows, rows, mine(5))
    ask(group.barrier, [], timeout=timedelta(seconds=9))
    return found


@program(3)
def lists_gathered_from_each_rank():
    outs = [[torch.zeros(2, 3), torch.zeros(5)] for _ in range(dist.get_world_size())]
    dist.all_gather_coalesced(outs, [mine(2, 3), mine(5)])
    return [out for row in outs for out in row]


@program(3)
def alltoall_of_even_and_uneven_parts():
    world, rank = dist.get_world_size(), dist.get_rank()
    even = torch.zeros(2 * world, 2)
    dist.all_to_all_single(even, mine(2 * world, 2))
    sizes = [(rank + 1) * dst for dst in range(world)]
    come = [(src + 1) * rank for src in range(world)]
    uneven = torch.zeros(sum(come), 2)
    dist.all_to_all_single(uneven, mine(sum(sizes), 2), come, sizes)
    if dist.get_backend() == "gloo":  # which has no list form: the same through the single one
        return [even, uneven, *uneven.split(come)]
    outs = [torch.zeros(size, 2) for size in come]
    dist.all_to_all(outs, list(mine(sum(sizes), 2).split(sizes)))
    return [even, uneven, *outs]


@program(3)
def alltoall_of_even_outputs_and_inputs_of_given_sizes():
    """The outputs were cut as the inputs are."""
    out = torch.zeros(6, 2)
    dist.all_to_all_single(out, mine(6, 2), None, [2, 2, 2])
    other = torch.zeros(6, 2)
    dist.all_to_all_single(other, mine(6, 2, seed=1), [2, 2, 2], None)
    rank = dist.get_rank()
    uneven = torch.zeros(3 * [1, 2, 3][rank], 2)
    dist.all_to_all_single(uneven, mine(6, 2, seed=2), None, [1, 2, 3])
    return [out, other, uneven]


@program(3)
def the_same_tensor_twice_in_a_coalesced_call():
    """It was reduced twice."""
    tensor, whole = mine(5), mine(6)
    dist.all_reduce_coalesced([tensor, tensor])
    dist.all_reduce_coalesced([whole, mine(3), whole[2:]])
    return [tensor, whole]


@program(3)
def expanded_tensors():
    """All numbers of one are the same memory; they were refused."""
    rank = dist.get_rank()
    summed, sent, rows = (mine(1, seed=seed).expand(4) for seed in range(3))
    dist.all_reduce(summed)
    dist.broadcast(sent, 1)
    columns = mine(3, 1, seed=3).expand(3, 2)
    dist.all_reduce(columns)
    gathered = [torch.zeros(4) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, rows)
    dist.reduce(rows, 2)
    return [summed + 0, sent + 0, columns + 0, *gathered, *([rows + 0] if rank == 2 else [])]


@program(3)
def dtypes_and_layouts():
    world = dist.get_world_size()
    found = []
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64):
        tensor = mine(9).to(dtype)
        dist.all_reduce(tensor)
        found.append(tensor)
    tensor = torch.view_as_complex(mine(4, 2))
    dist.all_reduce(tensor)
    found.append(tensor)
    bits = (mine(9).int() & 7).contiguous()
    if dist.get_backend() == "gloo":  # complex and bitwise the plain way
        rows = [torch.empty_like(bits) for _ in range(world)]
        dist.all_gather(rows, bits)
        found.append(rows[0] | rows[1] | rows[2])
    else:
        dist.all_reduce(bits, dist.ReduceOp.BOR)
        found.append(bits)
    tensor = mine(9).requires_grad_()
    dist.all_reduce(tensor)
    found.append(tensor.detach())
    rows = [torch.zeros(3, 4)[:, :2] for _ in range(world)] if dist.get_backend() != "gloo" else []
    if rows:
        dist.all_gather(rows, mine(2, 3).t())
    else:
        rows = [torch.zeros(3, 2) for _ in range(world)]
        dist.all_gather(rows, mine(2, 3).t().contiguous())
    return [*found, *(row.contiguous() for row in rows)]


@program(3)
def calls_in_flight_end_in_order():
    tensors = [mine(1000, seed=number) for number in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    assert all(work.is_completed() for work in works)
    value = dist.all_reduce(mine(3), async_op=True).get_future().wait()
    return [*tensors, *value]


@program(3)
def calls_made_when_another_ends():
    """PowerSGD does so, in the thread of the group, and waited there for itself for ever."""

    def again(future):
        total = future.value()[0]
        return dist.all_reduce(total, async_op=True).get_future().wait()[0] + 1

    work = dist.all_reduce(mine(200_000), async_op=True)
    ended = work.get_future().then(again)
    if dist.get_backend() == "gloo":  # its ranks number calls as they come, here in two threads
        ended.wait()
    other = mine(5)
    dist.all_reduce(other, async_op=True).wait()
    found = ended.wait()
    return [found, other, found.is_inference()]


@program(3)
def messages_cross():
    """Everyone sends to the next before receiving from the one before: large enough to block."""
    world, rank = dist.get_world_size(), dist.get_rank()
    came = torch.zeros(200_000)
    sent = dist.isend(mine(200_000), (rank + 1) % world)
    received = dist.irecv(came, (rank - 1) % world)
    received.wait()
    sent.wait()
    both = torch.zeros(5)
    ops = [
        dist.P2POp(dist.isend, mine(5), (rank + 1) % world),
        dist.P2POp(dist.irecv, both, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    word = torch.tensor([float(rank)])
    if rank == 0:
        dist.send(word, 2)
    elif rank == 2:
        dist.recv(word, 0)
    return [came, both, word]


@program(3)
def objects():
    rank = dist.get_rank()
    gathered = [None] * 3
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * 100 * rank})
    sent = [("a", 1), None] if rank == 1 else [None, None]
    dist.broadcast_object_list(sent, src=1)
    scattered = [None]
    dist.scatter_object_list(scattered, ["a", "b", "c"] if rank == 0 else None, src=0)
    collected = [None] * 3 if rank == 2 else None
    dist.gather_object(rank * 2, collected, dst=2)
    return [gathered, sent, scattered, collected]


@program(3)
def subgroups():
    rank = dist.get_rank()
    pair = dist.new_group([2, 0])
    every = [dist.new_group([member]) for member in range(3)]
    found = mine(4)
    dist.all_reduce(found, group=every[rank])
    if rank != 1:
        dist.all_reduce(found, group=pair)
        dist.broadcast(found, src=2, group=pair)
    dist.all_reduce(found)
    return [found, dist.get_world_size(every[rank])]


@program(3)
def communicators_over_groups():
    """Two over the default group, and one over a group of some ranks."""
    pair, found = dist.new_group([0, 2]), mine(4)
    groups = [dist.group.WORLD, dist.group.WORLD, pair]
    for group in groups if dist.get_rank() != 1 else groups[:2]:
        with Communicator.over(group, timeout_s=60) as comm:
            comm.allreduce(found)
            names = [comm.rank_name(rank) for rank in range(comm.world_size)]
            ranks = dist.get_process_group_ranks(group)
            assert names == [f"rank {rank}" for rank in ranks], names  # as torch numbers them
    return [found]


@program(3)
def a_peer_that_dies_is_named_where_it_is_waited_for():
    dist.barrier()  # a rank that left gloo sooner would end those that are still connecting
    if dist.get_backend() == "gloo":
        return []
    if dist.get_rank() == 1:
        os._exit(0)
    for work in (dist.all_reduce(mine(3), async_op=True), dist.irecv(mine(3), 1)):
        try:
            work.wait()
        except PeerLost as error:
            assert "rank 1" in str(error) and isinstance(_exception_of(work, error), PeerLost)
        else:
            raise AssertionError("nobody noticed")
    os._exit(0)


def _exception_of(work, error):
    """The exception of a failed work; the raised one under torch 2.11 and 2.12, which give none."""
    try:
        return work.exception()
    except TypeError:
        assert torch.__version__.startswith(("2.11.", "2.12."))
        return error


@program(3)
def calls_made_as_one():
    from torch.distributed.distributed_c10d import _coalescing_manager

    world, found = dist.get_world_size(), [mine(3), mine(4)]
    with _coalescing_manager():
        for tensor in found:
            dist.all_reduce(tensor)
    gathered = [torch.zeros(world * 2), torch.zeros(world * 3)]
    with _coalescing_manager():
        for out, count in zip(gathered, (2, 3), strict=True):
            dist.all_gather_into_tensor(out, mine(count))
    scattered = [torch.zeros(2), torch.zeros(3)]
    with _coalescing_manager(async_ops=True) as work:
        for out, count in zip(scattered, (2, 3), strict=True):
            dist.reduce_scatter_tensor(out, mine(world * count))
    work.wait()
    last = mine(3)
    if dist.get_backend() == "gloo":  # which does not offer the form that names a device
        dist.all_reduce(last)
    else:
        with _coalescing_manager(device=last.device, async_ops=True) as work:
            dist.all_reduce(last, async_op=True)
        work.wait()
    return [*found, *gathered, *scattered, last]


@program(2)
def messages_with_tags():
    found = [torch.zeros(3), torch.zeros(2)]
    if dist.get_rank() == 0:
        dist.send(mine(3), 1, tag=7)
        dist.send(mine(2), 1, tag=8)
    else:
        dist.recv(found[0], 0, tag=7)
        dist.recv(found[1], 0, tag=8)
    return found


@program(2)
def odd_shapes_and_handles():
    rank, found = dist.get_rank(), []
    for tensor in (torch.zeros(0), torch.tensor(float(rank)), mine(2, 1, 3)):
        dist.all_reduce(tensor)
        found.append(tensor)
    outs = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(outs, torch.tensor(float(rank)))
    bits = [torch.zeros(3, dtype=torch.bool) for _ in range(2)]
    dist.all_gather(bits, mine(3) > 0)
    whole = mine(4)
    dist.all_gather_into_tensor(whole, whole[2 * rank : 2 * rank + 2])  # in place
    row = torch.zeros(3)
    dist.reduce_scatter_tensor(row, mine(6))
    doubled = dist.all_reduce(mine(2), async_op=True).get_future()
    doubled = doubled.then(lambda future: future.value()[0] * 2).wait()
    dist.barrier(async_op=True).wait(timedelta(seconds=30))
    return [*found, *outs, *bits, whole, row, doubled, dist.get_process_group_ranks(None)]


@program(4)
def groups_made_from_groups():
    pair, _ = dist.new_subgroups(2)
    other, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = [pair, other, mesh["dp"].get_group(), mesh["tp"].get_group()]
    groups.append(mesh["dp", "tp"]._flatten("all").get_group())
    groups.append(dist.new_group([0, 1, 2, 3], backend="gloo"))
    found = [mine(3) for _ in groups]
    for tensor, group in zip(found, groups, strict=True):
        dist.all_reduce(tensor, group=group)
    if dist.get_rank() in (1, 2):
        local = dist.new_group([1, 2], use_local_synchronization=True)
        dist.all_reduce(found[0], group=local)
        dist.destroy_process_group(local)
    dist.barrier()
    return found


@program(4)
def groups_beside_a_default_group_of_any_backend():
    """Beside gloo ranks meet once, and not again in later groups, destroyed or not in between."""
    rank, new_group = dist.get_rank(), partial(dist.new_group, backend="drumline")
    first = new_group([0, 1, 3])
    if rank == 3:
        dist.destroy_process_group(first)
    groups = [new_group(ranks) for ranks in ([1, 3], [2, 3], [0, 1, 2, 3], [1, 3], [0, 2])]
    if dist.get_backend() == "gloo":
        met = process_group._met_beside[dist.group.WORLD]
        expected = {0: 2, 1: 2, 2: 2, 3: 3}
        assert len(met) == expected[rank], met
    found = []
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            tensor, received = mine(3), torch.zeros(1)
            dist.all_reduce(tensor, group=group)
            size, place = dist.get_world_size(group), dist.get_rank(group)
            sent = dist.isend(tensor[:1] + rank, group=group, group_dst=(place + 1) % size)
            dist.recv(received, group=group, group_src=(place - 1) % size)
            sent.wait()
            found += [tensor, received]
    dist.barrier()
    return found


@program(2)
def a_rank_that_stays_away_is_named_in_time():
    dist.barrier()
    if dist.get_backend() == "gloo":
        return []
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(torch.ones(1), group=pair)
        except CommunicatorTimeout as error:
            assert "rank 1" in str(error)
        else:
            raise AssertionError("nobody noticed")
    dist.barrier()
    return []


@program(3)
def a_rank_that_stays_away_from_a_group_is_named_as_torch_numbers_it():
    """Calls in C++ said a number within the group, and not that it was one."""
    dist.barrier()
    pair = dist.new_group([1, 2], timeout=timedelta(seconds=1))
    if dist.get_rank() and dist.get_backend() != "gloo":
        dist.all_reduce(torch.ones(1), group=pair)  # opens it
    if dist.get_rank() == 1 and dist.get_backend() != "gloo":
        try:
            dist.all_reduce(torch.ones(1), group=pair)
        except CommunicatorTimeout as error:
            assert "rank 1, in the group of rank 1, rank 2, numbered from 0" in str(error), error
        else:
            raise AssertionError("nobody noticed")
    dist.barrier()
    return []


@program(2)
def a_call_that_another_thread_runs_is_synchronized_with():
    """It was waited for with the GIL, for which the call waited."""
    tensor = mine(3)
    if dist.get_rank() == 1:
        time.sleep(0.3)
    work = dist.reduce(tensor, 0, async_op=True)
    work.wait() if dist.get_backend() == "gloo" else work.synchronize()
    return [tensor] if dist.get_rank() == 0 else []


@program(2)
def set_timeout_gives_later_calls_another_deadline():
    dist.barrier()
    if dist.get_backend() == "gloo":
        return []
    pair, tensor = dist.new_group([0, 1]), torch.ones(20)
    dist.all_reduce(tensor, group=pair)
    pair.set_timeout(timedelta(seconds=0.5))
    assert pair._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=0.5)
    if dist.get_rank() == 0:
        for call in (dist.recv, dist.all_reduce):
            try:
                call(tensor, group=pair, **({"src": 1} if call is dist.recv else {}))
            except CommunicatorTimeout as error:
                assert "timed out after 0.5" in str(error), error
            else:
                raise AssertionError("nobody noticed")
    dist.barrier()
    return []


@program(2)
def functional_collectives():
    group = dist.group.WORLD
    found = [
        functional.all_reduce(mine(5), "sum", group),
        functional.all_gather_tensor(mine(2, 3), 0, group),
        functional.all_gather_tensor(mine(2, 3), 1, group),
        functional.reduce_scatter_tensor(mine(4, 3), "sum", 0, group),
        functional.all_to_all_single(mine(4), None, None, group),
        functional.broadcast(mine(3), 1, group),
        *functional.all_reduce_coalesced([mine(2), mine(3)], "sum", group),
        *functional.all_gather_into_tensor_coalesced([mine(2), mine(3)], group),
    ]
    return [tensor + 0 for tensor in found]


@program(2)
def functional_collectives_with_gradients_and_compiled():
    group = dist.group.WORLD
    x, y = mine(4).requires_grad_(), mine(4, seed=2).requires_grad_()
    (functional.all_gather_tensor_autograd(x, 0, group) * mine(8, seed=3)).sum().backward()
    (functional.reduce_scatter_tensor_autograd(y, "sum", 0, group) * 3).sum().backward()
    sent = functional.permute_tensor(mine(3), [1, 0], group)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(tensor):
        return functional.all_reduce(tensor * 2, "sum", group)

    return [x.grad, y.grad, sent + 0, layer(mine(4))]


def network():
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def train(model, steps=3):
    """The losses and, by name, the parameters after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = model(mine(4, 8, seed=step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@program(2)
def data_parallel():
    model = DistributedDataParallel(network(), bucket_cap_mb=0.0005)  # several buckets
    return [*train(model), *(parameter.detach() for parameter in model.parameters())]


@program(2)
def hooks_that_ddp_has_in_cpp():
    found = []
    for hook in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        model = DistributedDataParallel(network())
        model._register_builtin_comm_hook(hook)
        found += train(model)
    return found


@program(2)
def group_as_torch_registers_it():
    group, cpu = dist.group.WORLD, torch.device("cpu")
    backend = group._get_backend(cpu)
    before = backend._get_sequence_number_for_group()
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(mine(3))
        dist.barrier()
        dist.broadcast(mine(2, 2), 0)
        dist.all_gather([mine(3), mine(3)], mine(3))
        counted = backend._get_sequence_number_for_group() - before
        row = mine(4)
        dist.send(row, 1) if dist.get_rank() == 0 else dist.recv(row, 0)
    name = dist.get_backend()
    shapes = {
        event.name.removeprefix(name): event.input_shapes
        for event in profile.events()
        if event.name.startswith(name)
    }
    return [
        *(cpu in group._device_types, type(group) is dist.ProcessGroup, counted),
        *(backend.options._timeout, backend.rank(), backend.size()),
        shapes,
    ]


@program(2)
def weights_loaded_from_rank_0_and_saved_while_training_goes_on():
    model, folder = network(), Path(sys.argv[1], "async by " + dist.get_backend())
    whole = {name: tensor + dist.get_rank() for name, tensor in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole if dist.get_rank() == 0 else {}, options=options)
    checkpoint.async_save(model.state_dict(), checkpoint_id=folder).result()
    again = model.state_dict()
    checkpoint.load(again, checkpoint_id=folder)
    return [tensor.full_tensor().detach() for tensor in again.values()]


@program(2)
def functional_collectives_into_a_tensor():
    out, name = torch.zeros(4, 3), dist.group.WORLD.group_name
    work = torch.ops._c10d_functional.all_gather_into_tensor_out(mine(2, 3), 2, name, out=out)
    return [torch.ops._c10d_functional.wait_tensor(work) + 0, out]


@program(2)
def other_backends_beside_it_in_one_group():
    dist.barrier()
    if dist.get_backend() == "gloo":
        return []
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    mixed = dist.new_group([0, 1], backend="cpu:gloo,cuda:drumline")
    names = [mixed._get_backend(device).name() for device in (cpu, cuda)]
    assert names == ["gloo", "drumline"], names
    dist.all_reduce(mine(3), group=mixed)
    return []


@program(2)
def fully_sharded():
    model = network()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = train(model)
    return [*losses, *(parameter.full_tensor().detach() for parameter in model.parameters())]


@program(2)
def data_parallel_in_its_other_ways():
    hooked = DistributedDataParallel(network())
    hooked.register_comm_hook(None, fp16_compress_hook)
    found = train(hooked)
    found += train(DistributedDataParallel(network(), find_unused_parameters=True))
    with_buffers = DistributedDataParallel(nn.Sequential(network(), nn.BatchNorm1d(4)))
    with with_buffers.no_sync():
        with_buffers(mine(4, 8)).sum().backward()
    found += train(with_buffers)
    torch._dynamo.reset()
    buffers = DistributedDataParallel(nn.Sequential(network(), nn.BatchNorm1d(4)))
    found += train(torch.compile(buffers, backend="eager"))  # which calls the group while it traces
    uneven = DistributedDataParallel(network())
    with uneven.join():
        for step in range(1 + dist.get_rank()):
            uneven(mine(4, 8, seed=step)).sum().backward()
    return [*found, *(parameter.grad for parameter in uneven.parameters())]


@program(4)
def sharded_over_a_mesh_and_saved():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, both = network(), network()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    fully_shard(both, mesh=mesh)  # replicated over dp, sharded over tp
    found = train(model) + train(both)
    folder = Path(sys.argv[1], "saved by " + dist.get_backend())
    checkpoint.save(both.state_dict(), checkpoint_id=folder)
    again = both.state_dict()
    for tensor in again.values():
        tensor.to_local().zero_()
    checkpoint.load(again, checkpoint_id=folder)
    return [*found, *(parameter.full_tensor().detach() for parameter in both.parameters())]


@program(2)
def a_pipeline():
    rank, model = dist.get_rank(), network()
    part = model[:2] if rank == 0 else model[2:]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(5)
    inputs, target = torch.randn(4, 8), torch.randn(4, 4)
    out = schedule.step(inputs) if rank == 0 else schedule.step(target=target)
    return [out, *(parameter.grad for parameter in part.parameters())]


@program(2)
def distributed_tensors():
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    left, right = torch.randn(6, 5), torch.randn(5, 7)
    sharded = distribute_tensor(left, mesh, [Shard(1)])
    product = sharded @ distribute_tensor(right, mesh, [Shard(0)])
    again = product.redistribute(mesh, [Replicate()])
    other = sharded.redistribute(mesh, [Shard(0)])
    return [sharded.to_local(), again.to_local(), product.full_tensor(), other.to_local()]


@program(2)
def transformers_tensor_parallel():
    folder = Path(sys.argv[1], "llama")
    model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto")
    shard = model.model.layers[0].self_attn.q_proj.weight
    assert (
        shard.to_local().shape == (16, 32)
        if hasattr(shard, "to_local")
        else shard.shape == (16, 32)
    )
    with torch.no_grad():
        return [model(torch.arange(10)[None]).logits]


def save_llama(folder):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(Path(folder, "llama"))


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def on(backend, fn, rank, world_size, store):
    """What the program returns on a backend; every program leaves no group behind."""
    store = dist.PrefixStore(backend, store)
    limit = timedelta(seconds=60)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    assert backend.endswith(dist.get_backend())
    try:
        return fn()
    finally:
        dist.destroy_process_group()


def rank_of(name, rank, folder):
    fn, world_size = PROGRAMS[name]
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, f"{name}.store"), world_size)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    plain = on("gloo", fn, rank, world_size, store)
    long_form = ["cpu:drumline,cuda:drumline"] if fn is collectives else []
    for backend in ("drumline", *long_form):
        found = on(backend, fn, rank, world_size, store)
        assert same(plain, found), f"gloo: {plain}\n{backend}: {found}"


def run(name, folder):
    """Fork the ranks of a program, and keep what they had to say."""
    pids = []
    for rank in range(PROGRAMS[name][1]):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                rank_of(name, rank, folder)
                code = 0
            except BaseException:
                Path(folder, f"{name}.{rank}.txt").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    said = "".join(path.read_text() for path in sorted(Path(folder).glob(f"{name}.*.txt")))
    Path(folder, name).write_text("" if not any(codes) else f"exit codes {codes}\n{said}")


if __name__ == "__main__":
    save_llama(sys.argv[1])
    for each in PROGRAMS:
        run(each, sys.argv[1])
