"""A rank of ours in benchmarks.startup."""

import torch  # noqa: F401 - what every rank of the projects this is for pays

from benchmarks.startup_ranks.barriers import pass_barriers
from coordinator import Coordinator

coor = Coordinator()
pass_barriers(coor.rank, coor.barrier)
