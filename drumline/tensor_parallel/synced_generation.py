"""Lets ranks that share a model decide as one: what is drawn, and when to stop.

with drawn_alike(vigil, device):         # on every rank; what is random in it is the first one's
    model.generate(tokens, do_sample=True)

Logits are the same bits on every rank, so what follows from them is, too. A clock and a generator
of random numbers are not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors.torch import load, save
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from transformers.generation import stopping_criteria as stopping

from drumline.errors import DrumlineError
from drumline.liveness.group_monitor import Vigil
from drumline.liveness.stopped_ranks import process_of

SURE = (
    stopping.MaxLengthCriteria,
    stopping.EosTokenCriteria,
    stopping.StopStringCriteria,
    stopping.ConfidenceCriteria,
)
"""Reasons to stop that follow from tokens and scores alone."""


@contextlib.contextmanager
def drawn_alike(vigil: Vigil, device: torch.device) -> Iterator[None]:
    """Within this block every rank draws what the first one draws. Collective, and so is each draw
    if ranks are threads of one process: those have one generator, and only the first may use it."""
    if len({process_of(peer) for peer in vigil.coor.peers}) == vigil.coor.world_size:
        _share_state(vigil, device)
        yield
        return
    if any(isinstance(mode, _FirstDraws) for mode in _get_current_dispatch_mode_stack()):
        yield  # an assistant, whose draws are shared already
        return
    vigil.coor.barrier()  # whoever still sets the seed does so before the first draw
    with _FirstDraws(vigil):
        yield


def _share_state(vigil: Vigil, device: torch.device) -> None:
    """Give every rank the state of the first one's generators of random numbers."""
    places = [torch.device("cpu"), device] if device.type == "cuda" else [torch.device("cpu")]
    for place in places:
        own = torch if place.type == "cpu" else torch.cuda
        where = [] if place.type == "cpu" else [place]
        mine = own.get_rng_state(*where).numpy().tobytes()
        state = bytearray(vigil.first_of(mine))
        own.set_rng_state(torch.frombuffer(state, dtype=torch.uint8), *where)


class _FirstDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What an operator draws, the first rank draws, and the others are told."""

    def __init__(self, vigil: Vigil):
        super().__init__()  # type: ignore[no-untyped-call]
        self.vigil = vigil

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _draws(func):
            return func(*args, **kwargs)
        if self.vigil.coor.is_master():
            try:
                found = func(*args, **kwargs)
            except Exception:
                self.vigil.first_of(b"")  # for which the others wait
                raise
            drawn = found if isinstance(found, (tuple, list)) else [found]
            self.vigil.first_of(save({str(n): x.contiguous() for n, x in enumerate(drawn)}))
            return found
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        data = self.vigil.first_of(b"")
        if not data:
            raise DrumlineError(
                f"rank {self.vigil.coor.rank}: the first rank could not draw for all, so no rank "
                "has its token; its own error says why."
            )
        told = load(data)
        where = given[0].device if given else torch.device("cpu")
        values = [told[str(n)].to(where) for n in range(len(told))]
        if func._schema.is_mutable:
            return args[0].copy_(values[0])
        return values[0] if len(values) == 1 else tuple(values)


def _draws(func: Any) -> bool:
    """Is what it returns random? Attention is tagged so too, for what it leaves out in training."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    return not any("dropout" in argument.name for argument in func._schema.arguments)


def stopping_alike(
    criteria: stopping.StoppingCriteriaList, vigil: Vigil
) -> stopping.StoppingCriteriaList:
    """Where a clock or a user's code says when to stop, every rank stops when the first does."""
    return stopping.StoppingCriteriaList(
        one if type(one) in SURE else _FirstSays(one, vigil) for one in criteria
    )


class _FirstSays(stopping.StoppingCriteria):  # type: ignore[misc]
    def __init__(self, plain: Any, vigil: Vigil):
        self.plain, self.vigil = plain, vigil

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        mine = torch.as_tensor(self.plain(input_ids, scores, **kwargs), dtype=torch.bool)
        told = self.vigil.first_of(mine.cpu().numpy().tobytes())
        first = torch.frombuffer(bytearray(told), dtype=torch.bool)
        return first.view(mine.shape).to(input_ids.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)
