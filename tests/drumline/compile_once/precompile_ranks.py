"""What test_precompile.py runs on two ranks, with weights of their own and one compiler."""

import os
import sys
import time

import torch
from torch import nn

from coordinator import Coordinator
from drumline import assert_identical_on_ranks, precompile_modules


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 40), nn.Linear(40, 16)
        self.register_buffer("scale", torch.rand(16))
        self.again = nn.Linear(16, 40)
        self.again.weight = self.up.weight

    def forward(self, x):
        hidden = torch.relu(self.up(x)) + self.again(x)
        return torch.softmax(self.down(hidden) * self.scale, -1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    with Coordinator() as coor, torch.no_grad():
        if coor.rank:  # only the builder has a compiler
            os.environ.update(CXX="/bin/false", CC="/bin/false")
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1] + ".inductor"
        torch.manual_seed(coor.rank)
        model, second = Net().eval(), Net().eval()
        start = time.process_time()
        quick: dict[str, object] = {"aot_inductor.compile_wrapper_opt_level": "O0"}
        # Each is compiled for longer than the one file that has them.
        quick |= {"aot_inductor.precompile_headers": False, "cpp_cache_precompile_headers": False}
        run, other = precompile_modules(
            [model, second], (x,), coor, folder=sys.argv[1], options=quick
        )
        spent = time.process_time() - start
        error = (run(x) - model(x)).abs().max().item()
        assert error < 1e-5, error
        torch.testing.assert_close(other(x), second(x))
        assert not torch.allclose(run(x), other(x))
        for tensor in [*model.parameters(), *model.buffers()]:
            coor_bytes = coor.broadcast(tensor.numpy().tobytes())
            tensor.copy_(
                torch.frombuffer(bytearray(coor_bytes), dtype=tensor.dtype).view_as(tensor)
            )
        assert_identical_on_ranks(coor, run(x))
        print(f"rank {coor.rank} within {error:.0e} of its own weights, {spent:.1f} s of CPU")
