"""A rank of mpiexec in benchmarks.startup."""

import torch  # noqa: F401 - what every rank of the projects this is for pays
from mpi4py import MPI

from benchmarks.startup_ranks.barriers import pass_barriers

pass_barriers(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.barrier)
