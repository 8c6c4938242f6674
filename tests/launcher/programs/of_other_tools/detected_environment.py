"""The variables by which DeepSpeed and Lightning find out that a launcher has started them.

DeepSpeed 0.18, deepspeed/comm/comm.py, init_distributed: asks MPI unless all of REQUIRED are set.
Lightning 2.6, lightning/fabric/plugins/environments: TorchElasticEnvironment.detect and
validate_settings; LightningEnvironment.creates_processes_externally.
"""

import os

import torch
import torch.distributed as dist

REQUIRED = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"]
assert all(name in os.environ for name in REQUIRED)
assert dist.is_available() and dist.is_torchelastic_launched()
rank, devices = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert int(os.environ["GROUP_RANK"]) * devices + int(os.environ["LOCAL_RANK"]) == rank
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert int(total) == devices
dist.destroy_process_group()
print(f"detected as {rank} of {devices}")
