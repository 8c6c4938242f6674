"""The operations of a process group with right arguments, and the faults that arguments can have.

from malformed_arguments import FAULTS, OPERATIONS
"""

import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ReduceOp

UNWRITTEN = -7.0
OPERATIONS, FAULTS = {}, {}


def operation(fn):
    """fn(rank, size): what the method gets, by name; options as their class and values."""
    OPERATIONS[fn.__name__] = fn
    return fn


def fault(*names):
    """A fault of the arguments with these names; it changes them, or returns False if it cannot."""

    def register(fn):
        for name in names:
            FAULTS[f"{name} {fn.__name__}"] = (name, fn)
        return fn

    return register


def numbers(rank, *shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 10 * rank


def places(size, *shape):
    return [torch.full(shape, UNWRITTEN) for _ in range(size)]


def options(kind, **values):
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


@operation
def allreduce(rank, size):
    return {"tensors": [numbers(rank, 4)], "options": (c10d.AllreduceOptions, {})}


@operation
def allreduce_coalesced(rank, size):
    tensors = [numbers(rank, 4), numbers(rank, 2, 2)]
    return {"tensors": tensors, "options": (c10d.AllreduceCoalescedOptions, {})}


@operation
def broadcast(rank, size):
    return {"tensors": [numbers(rank, 4)], "options": (c10d.BroadcastOptions, {"rootRank": 1})}


@operation
def reduce(rank, size):
    return {"tensors": [numbers(rank, 4)], "options": (c10d.ReduceOptions, {"rootRank": 1})}


@operation
def allgather(rank, size):
    outs = [places(size, 2, 2)]
    return {"outs": outs, "tensors": [numbers(rank, 2, 2)], "options": (c10d.AllgatherOptions, {})}


@operation
def allgather_coalesced(rank, size):
    outs = [[torch.full((4,), UNWRITTEN), torch.full((2,), UNWRITTEN)] for _ in range(size)]
    tensors = [numbers(rank, 4), numbers(rank, 2)]
    return {"outs": outs, "tensors": tensors, "options": (c10d.AllgatherOptions, {})}


@operation
def _allgather_base(rank, size):
    out = torch.full((2 * size, 3), UNWRITTEN)
    return {"out": out, "tensor": numbers(rank, 2, 3), "options": (c10d.AllgatherOptions, {})}


@operation
def allgather_into_tensor_coalesced(rank, size):
    outs, tensors = places(2, 4 * size), [numbers(rank, 4), numbers(rank, 4)]
    return {"outs": outs, "tensors": tensors, "options": (c10d.AllgatherOptions, {})}


@operation
def gather(rank, size):
    outs = [places(size, 4)] if rank == 1 else []
    root = {"rootRank": 1}
    return {"outs": outs, "tensors": [numbers(rank, 4)], "options": (c10d.GatherOptions, root)}


@operation
def scatter(rank, size):
    rows = [[numbers(rank + row, 4) for row in range(size)]] if rank == 1 else []
    root = {"rootRank": 1}
    return {"outs": places(1, 4), "rows": rows, "options": (c10d.ScatterOptions, root)}


@operation
def reduce_scatter(rank, size):
    rows = [[numbers(rank + row, 4) for row in range(size)]]
    return {"outs": places(1, 4), "rows": rows, "options": (c10d.ReduceScatterOptions, {})}


@operation
def _reduce_scatter_base(rank, size):
    out, kind = torch.full((2, 3), UNWRITTEN), c10d.ReduceScatterOptions
    return {"out": out, "tensor": numbers(rank, 2 * size, 3), "options": (kind, {})}


@operation
def reduce_scatter_tensor_coalesced(rank, size):
    outs, tensors = places(2, 4), [numbers(rank, 4 * size), numbers(rank, 4 * size)]
    return {"outs": outs, "tensors": tensors, "options": (c10d.ReduceScatterOptions, {})}


@operation
def alltoall(rank, size):
    rows = [numbers(rank + row, 4) for row in range(size)]
    return {"parts": places(size, 4), "pieces": rows, "options": (c10d.AllToAllOptions, {})}


@operation
def alltoall_base(rank, size):
    out, sizes = torch.full((2 * size, 2), UNWRITTEN), [2] * size
    return {
        "out": out,
        "tensor": numbers(rank, 2 * size, 2),
        "out_sizes": list(sizes),
        "sizes": list(sizes),
        "options": (c10d.AllToAllOptions, {}),
    }


LISTS = ("outs", "rows", "parts", "pieces")  # of tensors, or of lists of them


def inner(items):
    """The list for the one device, in a list of lists; the list itself otherwise."""
    return items[0] if items and isinstance(items[0], list) else items


@fault(*LISTS)
def one_too_few(items):
    if not items:
        return False
    inner(items).pop()


@fault(*LISTS)
def one_too_many(items):
    if not items:
        return False
    inner(items).append(inner(items)[0].clone())


@fault(*LISTS)
def empty(items):
    if not items:
        return False
    inner(items).clear()


@fault("tensors", *LISTS)
def none_for_this_device(items):
    if not items:
        return False
    items.clear()


@fault(*LISTS)
def first_longer(items):
    return replace(items, 0, lambda tensor: torch.full((9,), UNWRITTEN))


@fault(*LISTS)
def last_broadcastable(items):
    """copy_() took it, and filled the place with one number."""
    return replace(items, -1, lambda tensor: torch.full((1,), UNWRITTEN))


@fault(*LISTS)
def all_of_another_shape(items):
    return all(
        replace(items, index, lambda tensor: torch.full((2, 1, 2), UNWRITTEN)) is not False
        for index in range(max(1, len(inner(items))))
    )


@fault("tensors", *LISTS)
def first_of_another_dtype(items):
    """copy_() took it, and converted."""
    return replace(items, 0, lambda tensor: tensor.int())


@fault(*LISTS)
def all_of_another_dtype(items):
    return all(
        replace(items, index, lambda tensor: tensor.double()) is not False
        for index in range(max(1, len(inner(items))))
    )


@fault("tensors", *LISTS)
def first_sparse(items):
    return replace(items, 0, lambda tensor: torch.eye(2).to_sparse())


@fault("tensors")
def two_for_one_device(items):
    items.append(items[0].clone())


def replace(items, index, change):
    tensors = inner(items)
    if not tensors or not isinstance(tensors[0], torch.Tensor):
        return False
    tensors[index] = change(tensors[index])
    return True


@fault("outs", "parts")
def last_expanded(items):
    """All numbers but one were lost."""
    return replace(items, -1, lambda tensor: tensor[..., :1].expand(tensor.shape))


@fault("out")
def expanded(tensor):
    return tensor[..., :1].expand(tensor.shape)


@fault("out", "tensor")
def of_another_dtype(tensor):
    return tensor.double()


@fault("out", "tensor")
def one_row_longer(tensor):
    return torch.full((tensor.shape[0] + 1, *tensor.shape[1:]), UNWRITTEN)


@fault("out", "tensor")
def of_another_width(tensor):
    return torch.full((tensor.shape[0], 5), UNWRITTEN)


@fault("out", "tensor")
def sparse(tensor):
    return torch.eye(2).to_sparse()


@fault("sizes", "out_sizes")
def one_size_too_few(sizes):
    sizes.pop()


@fault("sizes", "out_sizes")
def one_size_too_many(sizes):
    sizes.append(0)


@fault("sizes", "out_sizes")
def wrong_in_sum(sizes):
    sizes[-1] += 1


@fault("sizes", "out_sizes")
def moved_to_another_rank(sizes):
    """The sum is right, and this rank's part for itself is not as large as its place."""
    sizes[:] = [sum(sizes), *[0] * (len(sizes) - 1)]


@fault("options")
def root_past_the_last_rank(made):
    return change_option(made, "rootRank", 17)


@fault("options")
def root_negative(made):
    return change_option(made, "rootRank", -2)


@fault("options")
def root_tensor_past_the_last(made):
    return change_option(made, "rootTensor", 1) if made[0] is not c10d.GatherOptions else False


@fault("options")
def op_of_bits_for_floats(made):
    return change_option(made, "reduceOp", ReduceOp.BAND)


def change_option(made, name, value):
    kind, values = made
    return (kind, {**values, name: value}) if hasattr(kind(), name) else False


# What is right on each rank alone, so that gloo, which compares nothing, is not asked.
TOGETHER = ""


@fault(TOGETHER)
def one_tensor_more(arguments):
    for tensors in coalesced_lists(arguments):
        tensors.append(tensors[-1].clone())


@fault(TOGETHER)
def last_twice_as_long(arguments):
    """The first was reduced before the ranks that have another last tensor raised."""
    for tensors in coalesced_lists(arguments):
        tensors[-1] = torch.cat([tensors[-1], tensors[-1]])


def coalesced_lists(arguments):
    outs = arguments.get("outs", [])
    rows = outs if outs and isinstance(outs[0], list) else [outs] * bool(outs)
    return [*rows, arguments["tensors"]]
