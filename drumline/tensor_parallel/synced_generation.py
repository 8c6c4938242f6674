"""Synchronises sampling and stopping criteria over the ranks of a tensor-parallel model.

with same_samples_on_all_ranks(monitor, device):     # on every rank
    model.generate(tokens, do_sample=True)

Logits are the same bits on every rank, and so is all that follows from them. Random numbers and
clocks are not: there the first rank decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from coordinator import torch_private
from drumline.contact import safetensors_api
from drumline.contact.generate_options import Criteria, Criterion, wrap_undetermined
from drumline.core.group_monitor import GroupMonitor
from drumline.errors import DrumlineError
from drumline.tensor_parallel.dropout_rng import generators, has_process_per_rank


@contextlib.contextmanager
def same_samples_on_all_ranks(monitor: GroupMonitor, device: torch.device) -> Iterator[None]:
    """Within this block every rank samples what the first rank samples. Collective.

    Each sample is collective too if ranks are threads of one process: these share a generator,
    which only the first may use."""
    if has_process_per_rank(monitor.coor):
        _share_rng_state(monitor, device)
        yield
        return
    if any(isinstance(mode, _SampleOnFirstRank) for mode in torch_private.dispatch_modes()):
        yield  # an assistant, whose samples are shared already
        return
    monitor.coor.barrier()  # a rank that still sets the seed does so before the first sample
    with _SampleOnFirstRank(monitor):
        yield


def _share_rng_state(monitor: GroupMonitor, device: torch.device) -> None:
    """Give every rank the state of the first rank's generators of random numbers."""
    for module, place in generators(device):
        state = monitor.broadcast(module.get_rng_state(*place).numpy().tobytes())
        module.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), *place)


class _SampleOnFirstRank(torch_private.DispatchMode):  # type: ignore[no-untyped-call]
    """Runs random operators on the first rank only, and broadcasts their results."""

    def __init__(self, monitor: GroupMonitor):
        super().__init__()  # type: ignore[no-untyped-call]
        self.monitor = monitor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_random(func):
            return func(*args, **kwargs)
        if self.monitor.coor.is_master():
            try:
                samples = func(*args, **kwargs)
            except Exception:
                self.monitor.broadcast(b"")  # the others wait for it
                raise
            results = samples if isinstance(samples, (tuple, list)) else [samples]
            contiguous = {str(n): x.contiguous() for n, x in enumerate(results)}
            self.monitor.broadcast(safetensors_api.to_bytes(contiguous))
            return samples
        inputs = [
            x for x in torch_private.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        ]
        data = self.monitor.broadcast(b"")
        if not data:
            raise _failed_on_first_rank("sampling", self.monitor)
        tensors = safetensors_api.from_bytes(data)
        where = inputs[0].device if inputs else torch.device("cpu")
        values = [tensors[str(n)].to(where) for n in range(len(tensors))]
        if torch_private.schema_of(func).is_mutable:
            return args[0].copy_(values[0])
        return values[0] if len(values) == 1 else tuple(values)


def _failed_on_first_rank(what: str, monitor: GroupMonitor) -> DrumlineError:
    return DrumlineError(
        f"rank {monitor.coor.rank}: {what} failed on the first rank, so no rank has a token; the "
        "error of that rank says why."
    )


def _is_random(func: Any) -> bool:
    """True if its result is random. Attention is tagged so too, for its dropout in training."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    return not any(
        "dropout" in argument.name for argument in torch_private.schema_of(func).arguments
    )


def same_stopping_on_all_ranks(criteria: Criteria, monitor: GroupMonitor) -> Criteria:
    """Criteria by which every rank stops when the first does, whatever clock or code decides."""
    return wrap_undetermined(criteria, lambda item: _StopOnFirstRank(item, monitor))


class _StopOnFirstRank(Criterion):  # type: ignore[misc]
    def __init__(self, plain: Any, monitor: GroupMonitor):
        self.plain, self.monitor = plain, monitor

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        try:
            own = torch.as_tensor(self.plain(input_ids, scores, **kwargs), dtype=torch.bool)
        except Exception:
            self.monitor.broadcast(b"")  # the others wait for it
            raise
        decision = self.monitor.broadcast(own.cpu().numpy().tobytes())
        if not decision:
            raise _failed_on_first_rank("a stopping criterion", self.monitor)
        first = torch.frombuffer(bytearray(decision), dtype=torch.bool)
        return first.view(own.shape).to(input_ids.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)
