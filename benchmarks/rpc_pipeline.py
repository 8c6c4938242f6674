"""The smallest fair pipeline over torch RPC in the manner of Accelerate's pull request 4066.

That one wraps each remote module in a call that carries its arguments, and cannot run as it stands:
it sends the cache along by value and loses what the layers wrote to it. Here the cache stays with
the layers, and the layers of a rank are one call, so that only what RPC itself costs is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import rpc
from transformers import Cache, DynamicCache, LlamaForCausalLM

from coordinator import Coordinator

OWNER = "rank-1"


class Owner:
    """The layers from `first` on, and the cache of the one generation that goes on."""

    def __init__(self, folder: str, first: int):
        torch.set_num_threads(1)
        self.model = LlamaForCausalLM.from_pretrained(folder)
        self.first, self.cache = first, DynamicCache()

    def run(
        self, hidden: torch.Tensor, cached: str, is_new: bool, arguments: dict[str, Any]
    ) -> torch.Tensor:
        """cached: the argument of a layer that is the cache, whose name transformers changes."""
        torch.set_num_threads(1)  # each thread of RPC is asked anew
        if is_new:
            self.cache = DynamicCache()
        with torch.inference_mode():
            for layer in self.model.model.layers[self.first :]:
                hidden = layer(hidden, **{cached: self.cache}, **arguments)
        return hidden


@contextlib.contextmanager
def joined(coor: Coordinator, folder: str) -> Iterator[None]:
    """Over sockets: what RPC does in shared memory keeps a core of each process busy all the time,
    and so slows whoever else has its turn, and itself."""
    store = f"file://{Path(folder) / 'rpc'}"
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=store, num_worker_threads=4, _transports=["uv"]
    )
    rpc.init_rpc(
        f"rank-{coor.rank}",
        rank=coor.rank,
        world_size=coor.world_size,
        rpc_backend_options=options,
    )
    yield
    rpc.shutdown()


def master(model: Any, first: int) -> Any:
    """The model with its layers from `first` on replaced by one call of their owner."""
    owner = rpc.remote(OWNER, Owner, args=(model.name_or_path, first))

    def forward(hidden: torch.Tensor, **arguments: Any) -> Any:
        sent = {key: value for key, value in arguments.items() if value is not None}
        (cached,) = [key for key, value in sent.items() if isinstance(value, Cache)]
        is_new = sent.pop(cached).layers[0].keys.shape[-2] == hidden.shape[-2]
        return rpc.rpc_sync(OWNER, _run, args=(owner, hidden, cached, is_new, sent))

    model.model.layers[first].forward = forward
    for layer in model.model.layers[first + 1 :]:
        layer.forward = lambda hidden, **_: hidden
    return model


def _run(owner: Any, *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = owner.local_value().run(*arguments)
    return result
