"""A script for mpiexec."""

from mpi4py import MPI

world = MPI.COMM_WORLD
print(f"sum {world.allreduce(world.rank + 1)} as {world.rank} of {world.size}")
