"""Collectives whose arguments are wrong on some ranks, in process groups of gloo and of drumline.

python malformed_collectives.py FOLDER     # writes FOLDER/<rank>: a line for each fault found

A case is an operation, a fault of its arguments, and the ranks that have it. Of gloo only those
ranks call, which must raise; of drumline all of them call, all must raise, at once and before
anything is written, and the next right call of the operation must give gloo's numbers.
"""

import itertools
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ReduceOp

import communicator.torch_interop.process_group  # noqa: F401
from communicator.errors import DrumlineError

WORLD_SIZE = 3
UNWRITTEN = -7.0
PROMPT_S = 20.0  # on a machine that is busy; the deadline of the group is far longer
DEADLINE = timedelta(seconds=120)
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


# Which torch binds to groups alone: there it sends no empty list and nothing sparse to a backend.
NOT_OF_BACKENDS = ("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")
GLOO_DIES = ("allgather_into_tensor_coalesced",)  # it writes past the end
# Right in these operations, or what gloo takes in its own way.
NO_MISTAKE = {
    *((name, "tensors first_of_another_dtype") for name in ("allreduce", "broadcast", "reduce")),
    *((name, "tensors two_for_one_device") for name in ("allreduce", "broadcast")),
    *((name, "tensors two_for_one_device") for name in OPERATIONS if "coalesced" in name),
    *(("alltoall_base", f"{name} of_another_dtype") for name in ("out", "tensor")),
    ("allreduce", "tensors first_sparse"),
    *(
        (name, f"{argument} {fault}")
        for name in NOT_OF_BACKENDS
        for argument in ("tensors", "outs")
        for fault in ("none_for_this_device", "first_sparse")
    ),
}


def is_seen(name, kind, rank, size):
    """Whether a rank of gloo can see that it has this fault, and need not wait for the others."""
    if (name, kind) in NO_MISTAKE:
        return False
    if name == "reduce_scatter" and kind.startswith("rows ") and "_of_" not in kind:
        return rank == 0 if "first" in kind else rank == size - 1 if "last" in kind else True
    if name == "reduce_scatter" and kind == "rows first_of_another_dtype":
        return rank == 0
    at_root = {"scatter": "outs ", "gather": "tensors first_of_another_dtype"}
    is_of_list = "first" not in kind and "of" not in kind and "last" not in kind
    if name in at_root and kind.startswith(at_root[name]) and "sparse" not in kind:
        return rank == 1 or is_of_list
    return True


def cases(size):
    """Of each operation and each fault that it can have: on all ranks, and on one alone."""
    for name, kind in itertools.product(OPERATIONS, FAULTS):
        for ranks, is_async in itertools.product((range(size), [1], [size - 1]), (True, False)):
            faulty = [rank for rank in ranks if build(name, kind, rank, size) is not None]
            if faulty:
                yield name, kind, faulty, is_async


def build(name, kind, rank, size, is_async=False):
    """The arguments of a rank, with this fault; None if it cannot have it."""
    arguments = OPERATIONS[name](rank, size)
    if kind:
        argument, change = FAULTS[kind]
        if argument not in arguments or not is_seen(name, kind, rank, size):
            return None
        changed = change(arguments[argument])
        if changed is False:
            return None
        if not isinstance(changed, (bool, type(None))):
            arguments[argument] = changed
    option_kind, values = arguments.pop("options")
    values = {**values, **({"asyncOp": is_async} if hasattr(option_kind(), "asyncOp") else {})}
    return {**arguments, "options": options(option_kind, **values)}


def call(group, name, arguments):
    backend = group._get_backend(torch.device("cpu"))
    where = group if name in NOT_OF_BACKENDS else backend
    getattr(where, name)(*arguments.values()).wait()


def error_of(group, name, arguments):
    try:
        call(group, name, arguments)
    except Exception as error:
        return error
    return None


def written(arguments):
    """All tensors that the call may write, flat."""
    found = []
    for argument in arguments.values():
        stack = [argument]
        while stack:
            item = stack.pop(0)
            if isinstance(item, list):
                stack = item + stack
            elif isinstance(item, torch.Tensor):
                found.append(item.to_dense().clone())
    return found


def same(ones, others):
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


class Checker:
    """Runs cases on a rank, in a group of gloo and in one of drumline of the same ranks."""

    def __init__(self, gloo, ours):
        self.gloo, self.ours, self.rank, self.size = gloo, ours, gloo.rank(), gloo.size()
        self.problems, self.count = [], 0
        self.expected = {name: self.right_call(gloo, name) for name in OPERATIONS}

    def right_call(self, group, name):
        arguments = build(name, "", self.rank, self.size)
        call(group, name, arguments)
        # What is on other ranks than the root of a reduce, gloo leaves there unfinished.
        return written(arguments) if name != "reduce" or self.rank == 1 else []

    def check(self, name, kind, faulty, is_async):
        self.count += 1
        problems = [*self.problems_of(name, kind, faulty, is_async)]
        if not same(self.expected[name], self.right_call(self.ours, name)):
            problems.append("the next right call was wrong")
        case = f"{name}, {kind}, on {faulty}, {'async' if is_async else 'sync'}"
        self.problems += [f"{case}: {problem}" for problem in problems]

    def problems_of(self, name, kind, faulty, is_async):
        is_faulty = self.rank in faulty
        of_case = (name, kind if is_faulty else "", self.rank, self.size, is_async)
        is_asked = is_faulty and name not in GLOO_DIES
        if is_asked and error_of(self.gloo, name, build(*of_case)) is None:
            yield "gloo did not raise"
        arguments, start = build(*of_case), time.monotonic()
        before, error = written(arguments), error_of(self.ours, name, arguments)
        took_s = time.monotonic() - start
        if error is None:
            yield "did not raise"
        elif not isinstance(error, (ValueError, DrumlineError)):
            yield f"raised {error!r}"
        elif not is_faulty and not any(f"rank {rank}" in str(error) for rank in faulty):
            yield f"did not name the rank: {error}"
        if not same(before, written(arguments)):
            yield "something was written"
        if took_s > PROMPT_S:
            yield f"raised after {took_s} s"


def rank_of(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), WORLD_SIZE)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=10)
    )
    checker = Checker(dist.group.WORLD, dist.new_group(backend="drumline", timeout=DEADLINE))
    try:
        for case in cases(WORLD_SIZE):
            checker.check(*case)
    finally:
        lines = [f"{checker.count} cases", *checker.problems]
        Path(folder, str(rank)).write_text("\n".join(lines))


def main(folder):
    pids = []
    for rank in range(WORLD_SIZE):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                rank_of(rank, folder)
                code = 0
            except BaseException:
                Path(folder, f"{rank}.error").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        pids.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
