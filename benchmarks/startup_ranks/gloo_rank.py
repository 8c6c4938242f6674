"""A rank of torchrun in benchmarks.startup."""

import torch.distributed as dist

from benchmarks.startup_ranks.barriers import pass_barriers

dist.init_process_group("gloo")
pass_barriers(dist.get_rank(), dist.barrier)
