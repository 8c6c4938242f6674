"""Move tensors among ranks, over the best backend that every rank can use.

with Communicator(Coordinator()) as comm:
    comm.allreduce(torch.ones(4))
"""

import functools

import launcher

__getattr__ = functools.partial(launcher.import_public, __name__)
__dir__ = functools.partial(launcher.list_public, __name__)
