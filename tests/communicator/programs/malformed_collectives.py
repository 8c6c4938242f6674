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
from malformed_arguments import FAULTS, OPERATIONS, TOGETHER, options

import communicator.torch_interop.process_group  # noqa: F401
from communicator.errors import DrumlineError

WORLD_SIZE = 3
PROMPT_S = 20.0  # on a machine that is busy; the deadline of the group is far longer
DEADLINE = timedelta(seconds=120)

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
        all_ranks = [range(size)] if FAULTS[kind][0] != TOGETHER else []
        for ranks, is_async in itertools.product((*all_ranks, [1], [size - 1]), (True, False)):
            faulty = [rank for rank in ranks if build(name, kind, rank, size) is not None]
            if faulty:
                yield name, kind, faulty, is_async


def build(name, kind, rank, size, is_async=False):
    """The arguments of a rank, with this fault; None if it cannot have it."""
    arguments = OPERATIONS[name](rank, size)
    if kind:
        argument, change = FAULTS[kind]
        can_have = argument in arguments or (argument == TOGETHER and "coalesced" in name)
        if not can_have or not is_seen(name, kind, rank, size):
            return None
        changed = change(arguments[argument] if argument else arguments)
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
        is_asked = is_faulty and name not in GLOO_DIES and FAULTS[kind][0] != TOGETHER
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
