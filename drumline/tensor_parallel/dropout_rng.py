"""Lets ranks that share a model leave out alike in training what all of them have: dropout.

leave_out_alike(model, columns, rows, comm)     # once, after the layers are cut

What every rank has in full must lose the same numbers on all, or they compute different models from
there on. What a rank has alone (its heads, its columns) it draws for itself, as Megatron-LM does
(https://arxiv.org/abs/1909.08053, appendix B.2): each such stretch begins with a seed that all draw
alike, and afterwards they draw on as if nothing had been drawn in it. So a layer that is computed
again for its gradient leaves out the same again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from communicator import Communicator
from drumline.errors import DrumlineError
from drumline.liveness.stopped_ranks import process_of

SEEDS = 1 << 40
RATES = ("drop", "jitter")
"""What the names of the probabilities have in common, by which modules leave out or stir."""


def leave_out_alike(
    model: nn.Module,
    opening: Sequence[nn.Module],
    closing: Sequence[nn.Module],
    comm: Communicator,
) -> None:
    """From the first forward in training on that leaves anything out, of the model or its trunk.

    opening: the modules that leave each rank a part of its own. closing: those that take it.
    """
    draws = _Draws(comm)
    whole = weakref.ref(model)  # its memory goes with its last user, not when garbage is collected

    def begin(module: nn.Module, *unused: Any) -> None:
        if module.training and leaves_out(module):
            if not draws.are_parted:
                _part(whole() or module, opening, closing, draws)
            draws.begin(next(module.parameters()).device)

    model.register_forward_pre_hook(begin)
    trunk = getattr(model, "base_model", model)
    if isinstance(trunk, nn.Module) and trunk is not model:  # some call it, or model.forward
        trunk.register_forward_pre_hook(begin)


def leaves_out(model: nn.Module) -> bool:
    """Does any module of it draw in training?"""
    return any(
        type(value) in (int, float) and value > 0 and any(rate in name for rate in RATES)
        for module in model.modules()
        for name, value in _numbers(module)
    )


def _numbers(module: nn.Module) -> Iterable[tuple[str, Any]]:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return [("dropout", module.p)]
    return vars(module).items()


def _part(
    model: nn.Module,
    opening: Sequence[nn.Module],
    closing: Sequence[nn.Module],
    draws: _Draws,
) -> None:
    """Have each rank draw for itself from the first opening to the closing module of an owner."""

    def open_(module: nn.Module, *unused: Any) -> None:
        if module.training:
            draws.own()

    def close(*unused: Any) -> None:
        draws.alike()

    for module in opening:
        module.register_forward_pre_hook(open_)
    for module in closing:
        module.register_forward_pre_hook(close)
    for owner in model.modules():
        if any(child is module for child in owner.children() for module in opening):
            owner.register_forward_hook(close, always_call=True)
    draws.are_parted = True


class _Draws:
    """The state of this rank's generators of random numbers."""

    def __init__(self, comm: Any):
        self.comm, self.device = comm, torch.device("cpu")
        self.kept: list[torch.Tensor] = []
        self.are_parted = False

    def begin(self, device: torch.device) -> None:
        """Draw from here on what the first rank draws. Collective."""
        peers = self.comm.coor.peers
        if len({process_of(peer) for peer in peers}) < len(peers):
            raise DrumlineError(
                f"rank {self.comm.rank}: ranks that are threads of one process have one generator "
                "of random numbers, so each would leave out other numbers of what all have, and "
                "they would train different models; start ranks as processes, or set the dropout "
                "of the model to 0."
            )
        first = self.comm.rank == 0
        seed = torch.randint(SEEDS, ()) if first else torch.zeros((), dtype=torch.int64)
        torch.manual_seed(int(self.comm.allreduce(seed.to(device).view(1))))
        self.device, self.kept = device, []

    def own(self) -> None:
        if not self.kept:
            seed = int(torch.randint(SEEDS, ()))
            self.kept = [torch.get_rng_state()]
            if self.device.type == "cuda":
                self.kept.append(torch.cuda.get_rng_state(self.device))
            torch.manual_seed(seed + self.comm.rank)

    def alike(self) -> None:
        if self.kept:
            torch.set_rng_state(self.kept[0])
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(self.kept[1], self.device)
            self.kept = []
