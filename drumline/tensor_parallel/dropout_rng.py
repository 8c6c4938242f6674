"""Synchronises the random numbers of dropout over the ranks of a tensor-parallel model in training.

sync_dropout_rng(model, columns, rows, comm)     # once, after the layers are sharded

Tensors that every rank has in full must drop the same numbers on all ranks. A rank's own shard (its
heads, its columns) has random numbers of its own, as in Megatron-LM (https://arxiv.org/abs/1909.08053,
appendix B.2): each sharded stretch begins with a seed from the shared generator, whose state is
restored behind it. So a layer that is computed again for its gradient drops the same again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from communicator import Communicator
from coordinator import Coordinator
from drumline.errors import DrumlineError

NUM_SEEDS = 1 << 40
DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
RATE_NAMES = ("drop", "jitter")
"""Substrings of the attribute names of dropout and jitter probabilities."""


def has_process_per_rank(coor: Coordinator) -> bool:
    """True if every rank has a generator of its own: threads of one process share theirs."""
    processes = {(peer.host, peer.boot_id, peer.memory, peer.pid) for peer in coor.peers}
    return len(processes) == coor.world_size


def generators(device: torch.device) -> list[tuple[Any, tuple[Any, ...]]]:
    """The modules with this process's generators of random numbers: torch, and that of an
    accelerator, whose functions are told the device."""
    own = [] if device.type == "cpu" else [(torch.get_device_module(device), (device,))]
    return [(torch, ()), *own]


def sync_dropout_rng(
    model: nn.Module,
    sharding: Sequence[nn.Module],
    unsharding: Sequence[nn.Module],
    comm: Communicator,
) -> None:
    """Install the synchronisation, which starts with the first forward in training that drops.

    sharding: the modules whose outputs are a rank's own shard. unsharding: those that take them.
    """
    rng = _DropoutRng(comm)
    whole = weakref.ref(model)  # its memory goes with its last user, not when garbage is collected

    def begin(module: nn.Module, *unused: Any) -> None:
        if module.training and has_dropout(module):
            if not rng.is_installed:
                _install_rank_seeds(whole() or module, sharding, unsharding, rng)
            rng.begin(next(module.parameters()).device)

    model.register_forward_pre_hook(begin)
    trunk = getattr(model, "base_model", model)
    if isinstance(trunk, nn.Module) and trunk is not model:  # some call it, or model.forward
        trunk.register_forward_pre_hook(begin)


def has_dropout(model: nn.Module) -> bool:
    """True if any module of it uses random numbers in training."""
    return any(
        type(value) in (int, float) and value > 0 and any(rate in name for rate in RATE_NAMES)
        for module in model.modules()
        for name, value in (
            [("dropout", module.p)] if isinstance(module, DROPOUTS) else vars(module).items()
        )
    )


def _install_rank_seeds(
    model: nn.Module,
    sharding: Sequence[nn.Module],
    unsharding: Sequence[nn.Module],
    rng: _DropoutRng,
) -> None:
    """Use a rank's own seed from the first sharding to the unsharding module of an owner."""

    def begin_shard(module: nn.Module, *unused: Any) -> None:
        if module.training:
            rng.use_own_seed()

    def end_shard(*unused: Any) -> None:
        rng.use_shared_state()

    for module in sharding:
        module.register_forward_pre_hook(begin_shard)
    for module in unsharding:
        module.register_forward_pre_hook(end_shard)
    for owner in model.modules():
        if any(child is module for child in owner.children() for module in sharding):
            owner.register_forward_hook(end_shard, always_call=True)
    rng.is_installed = True


class _DropoutRng:
    """This rank's generators of random numbers."""

    def __init__(self, comm: Any):
        self.comm, self.device = comm, torch.device("cpu")
        self.saved_states: list[torch.Tensor] = []
        self.is_installed = False

    def begin(self, device: torch.device) -> None:
        """Continue with a seed of the first rank. Collective."""
        if not has_process_per_rank(self.comm.coor):
            raise DrumlineError(
                f"rank {self.comm.rank}: ranks that are threads of one process share a generator "
                "of random numbers, so each would drop other numbers and train another model; "
                "start ranks as processes, or set the dropout of the model to 0."
            )
        first = self.comm.rank == 0
        seed = torch.randint(NUM_SEEDS, ()) if first else torch.zeros((), dtype=torch.int64)
        torch.manual_seed(int(self.comm.allreduce(seed.to(device).view(1))))
        self.device, self.saved_states = device, []

    def use_own_seed(self) -> None:
        if not self.saved_states:
            seed = int(torch.randint(NUM_SEEDS, ()))
            places = generators(self.device)
            self.saved_states = [module.get_rng_state(*place) for module, place in places]
            torch.manual_seed(seed + self.comm.rank)

    def use_shared_state(self) -> None:
        states, self.saved_states = self.saved_states, []
        for state, (module, place) in zip(states, generators(self.device), strict=False):
            module.set_rng_state(state, *place)
