"""Add a tensor over all ranks: the sample of vLLM's RFC #3587, as it stands there.

drumline run -n 4 examples/02_allreduce.py
"""

import torch

from communicator import Communicator
from coordinator import Coordinator

coor = Coordinator()
comm = Communicator(coor)
device = f"cuda:{coor.local_rank}" if comm.device_type == "cuda" else "cpu"
data = torch.ones((1024, 1024)).to(device=device)
comm.allreduce(data)

assert data.mean().item() == coor.world_size
print(f"rank {coor.rank}: {comm.backend} gave every element {data.mean().item()}")
comm.close()
coor.close()
