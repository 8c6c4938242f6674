"""The random operations of the state machine, over the ranks of this launch, which are processes.

mpiexec -n 3 python random_operations.py BACKEND SEED CALLS
"""

import random
import sys

from communicator import Communicator
from coordinator import Coordinator
from tests.communicator.test_random_operations import DTYPES, REDUCTIONS, RandomOperations


class OwnRank:
    """In place of the threads of all ranks: this process's own, which makes the same calls."""

    def __init__(self, comm):
        self.comm = comm

    def run(self, fn):
        return [fn(self.comm)]


def shape(pick):
    if pick.random() < 0.3:
        return (pick.randint(1000, 40_000),)
    return tuple(pick.randint(0, 5) for _ in range(pick.randint(0, 3)))


def call(machine, pick):
    """One operation, the same on every rank, for all draw from the same seed."""
    common = {"seed": pick.randrange(2**20), "shape": shape(pick)}
    reduction, dtype = pick.choice(REDUCTIONS), pick.choice(DTYPES)
    step, pair, in_place = pick.randrange(7), (pick.randrange(7), pick.randrange(7)), pick.random()
    arguments = {
        "allreduce": {"reduction": reduction, "in_place": in_place < 0.5},
        "reduce": {"reduction": reduction, "step": step},
        "reduce_scatter": {"reduction": reduction},
        "broadcast": {"dtype": dtype, "step": step},
        "allgather": {"dtype": dtype},
        "alltoall": {"dtype": dtype},
        "everyone_passes_on": {"dtype": dtype, "step": step},
        "one_sends_to_another": {"dtype": dtype, "pair": pair},
    }
    name = pick.choice([*arguments])
    try:
        getattr(machine, name)(**common, **arguments[name])
    except AssertionError as wrong:
        raise AssertionError(f"{name}({common}, {arguments[name]})") from wrong


backend, seed, calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with Coordinator(timeout_s=60) as coor, Communicator(coor, backend) as comm:
    machine, pick = RandomOperations(), random.Random(seed)
    machine.ranks, machine.world_size = OwnRank(comm), comm.world_size
    for _ in range(calls):
        call(machine, pick)
    del machine.ranks
