"""Captures a stage's layers for one token as one CUDA graph.

A graph repeats the captured kernels, at the same addresses, without a line of Python in between. So
only passes of one token over keys and values in a StaticCache are captured, where Python could do
nothing else the next time. All else runs layer by layer, and a warning says why, once.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from drumline.contact.cache_layers import counts_in_python, is_filled, tensors_of
from drumline.core.pytree import integer_kinds, iter_nodes
from drumline.stages.program import NOTHING, StageRoute, StageStep

if TYPE_CHECKING:
    from drumline.kv_cache.owner import CacheRegistry
    from drumline.stages.messages import Message

Work = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Runs the layers of a stage on the tensors that have arrived; returns those that leave."""

NUM_WARM_UPS = 2
"""Tokens of a cache that run layer by layer first: in them caches and libraries allocate memory,
which must not lie in a graph."""

MAX_GRAPHS = 8
MAX_RECAPTURES = 2
"""Times that a program is captured again for a cache before it is left alone."""

TOO_MANY_CHANGES = f"what they are given changes, or over {MAX_GRAPHS} caches take turns"

NEVER = -(1 << 60)

GraphKey = tuple[int, tuple[int, ...]]
"""A program, and the caches that it is run with."""


class CudaGraph:
    """A torch.cuda.CUDAGraph. stream: where it is captured: one for all, for cuBLAS keeps memory of
    its own on each."""

    def __init__(self, device: torch.device, stream: Any):
        self._device, self._stream = device, stream
        self._graph = torch.cuda.CUDAGraph()
        self._made: list[torch.Tensor] = []

    def capture(self, work: Callable[[], list[torch.Tensor]]) -> None:
        """Note what `work` would do, without doing it. RuntimeError if that cannot be."""
        try:
            self._capture(self._graph, work)
        except RuntimeError:
            # Before 2.13 torch's generator stays in a capture that failed, and the next random
            # number or replay would fail. A capture that does not fail takes it out.
            self._capture(torch.cuda.CUDAGraph(), lambda: [torch.zeros(1, device=self._device)])
            raise

    def _capture(self, graph: Any, work: Callable[[], list[torch.Tensor]]) -> None:
        with (
            torch.cuda.device(self._device),
            # After a capture that failed, torch leaves its stream the current one.
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            # thread_local: other ranks may be threads of this process
            torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
        ):
            self._made = work()

    def replay(self) -> list[torch.Tensor]:
        """Do it, and return what `work` would; the next replay writes over it."""
        self._graph.replay()
        return self._made


@dataclass
class CapturedGraph:
    """inputs: the memory that the graph reads. ints, state: what it takes for granted."""

    graph: CudaGraph
    inputs: list[torch.Tensor]
    ints: list[int]
    state: list[torch.Tensor]

    def fits(self, arrived: Sequence[torch.Tensor], ints: list[int], state: list[Any]) -> bool:
        pairs = zip(arrived, self.inputs, strict=True)
        same_form = all((new.shape, new.dtype) == (old.shape, old.dtype) for new, old in pairs)
        return same_form and ints == self.ints and [*map(id, state)] == [*map(id, self.state)]

    def replay(self, arrived: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for tensor, new in zip(self.inputs, arrived, strict=True):
            tensor.copy_(new)
        return self.graph.replay()


class CudaGraphs:
    """The graphs of one rank. make: a new one; a CudaGraph of the device if not given."""

    def __init__(
        self, rank: int, device: torch.device, make: Callable[[], CudaGraph] | None = None
    ):
        self.rank, self.device = rank, device
        if make is None:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            make = functools.partial(CudaGraph, device, stream)
        self.make = make
        self.num_replays = 0
        self.reasons: set[str] = set()  # why something was not captured, each warned of once
        self._programs: dict[int, ProgramInfo] = {}
        # How many passes of one token; NEVER where it is refused.
        self._num_passes: dict[GraphKey, int] = {}
        self._recaptures: Counter[GraphKey] = Counter()
        self._captured: dict[GraphKey, CapturedGraph] = {}

    def run(self, route: StageRoute, message: Message, caches: CacheRegistry, work: Work) -> Any:
        """The tensors that leave, to be sent before the next call; None if `work` is to be done."""
        info = self._programs.get(message.program)
        if info is None:
            info = self._programs[message.program] = ProgramInfo(route)
        arrived = message.tensors[: len(route.arriving)]
        if not info.is_single_token(arrived):
            return None
        key = (message.program, tuple(message.ints[at] for at in info.caches_at))
        self._num_passes[key] = self._num_passes.get(key, 0) + 1
        if self._num_passes[key] <= NUM_WARM_UPS:
            return None
        own_caches = [caches.cache(number) for number in key[1]]
        layers = [layer for cache in own_caches for layer in cache.layers if is_filled(layer)]
        reason = info.why_not_capturable or why_not_capturable(layers)
        if reason:
            self._decline(info, key, reason)
            return None
        state = [tensor for layer in layers for tensor in tensors_of(layer)]
        captured = self._captured.get(key)
        if captured is None or not captured.fits(arrived, message.ints, state):
            captured = self._capture(info, key, arrived, message.ints, state, work)
        if captured is None:
            return None
        self.num_replays += 1
        return captured.replay(arrived)

    def keep_only(self, caches: Collection[int]) -> None:
        """Let go of what is for other caches than these."""
        kept: Any
        for kept in (self._captured, self._num_passes, self._recaptures):
            for key in [key for key in kept if not set(key[1]) <= set(caches)]:
                del kept[key]

    def _capture(
        self,
        info: ProgramInfo,
        key: GraphKey,
        arrived: list[torch.Tensor],
        ints: list[int],
        state: list[torch.Tensor],
        work: Work,
    ) -> CapturedGraph | None:
        if self._captured.pop(key, None) is not None:
            self._recaptures[key] += 1
        if self._recaptures[key] > MAX_RECAPTURES:
            self._decline(info, key, TOO_MANY_CHANGES)
            return None
        inputs = [torch.empty_like(tensor, device=self.device) for tensor in arrived]
        graph = self.make()
        try:
            graph.capture(lambda: work(inputs))
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            self._decline(info, key, f"they cannot be captured ({why})")
            return None
        while len(self._captured) >= MAX_GRAPHS:
            oldest = next(iter(self._captured))
            del self._captured[oldest]
            self._recaptures[oldest] += 1
        self._captured[key] = CapturedGraph(graph, inputs, list(ints), state)
        return self._captured[key]

    def _decline(self, info: ProgramInfo, key: GraphKey, reason: str) -> None:
        self._num_passes[key] = NEVER
        if reason not in self.reasons:
            self.reasons.add(reason)
            warnings.warn(
                f"rank {self.rank}: {info.name} do not run as a CUDA graph: {reason}. Their "
                "results are the same without it.",
                stacklevel=2,
            )


class ProgramInfo:
    """One program on one rank: whether its passes can be captured, and if not, why.

    hidden_at: index of the hidden state among the tensors that arrive. caches_at: indices of cache
    numbers among a message's integers. name: of its layers, for a warning.
    """

    def __init__(self, route: StageRoute):
        steps = [step for step, *_ in route.steps]
        self.is_possible = bool(steps) and route.program.operations == NOTHING
        self.is_possible &= all(step.output is not None and step.slots for step in steps)
        if not self.is_possible:
            return
        self.name = f"{steps[0].module} to {steps[-1].module}"
        self.hidden_at = route.arriving.index(steps[0].slots[0])
        self.caches_at = sorted({at for step in steps for at in _caches_at(step)})
        kinds = {kind for step in steps for kind, *_ in iter_nodes(step.arguments)}
        self.why_not_capturable = "" if self.caches_at else "they have no cache"
        if kinds & {"pair", "shared"}:
            self.why_not_capturable = "they read what an encoder or a layer has left in Python"

    def is_single_token(self, arrived: Sequence[torch.Tensor]) -> bool:
        if not self.is_possible:
            return False
        shape = arrived[self.hidden_at].shape
        return len(shape) > 2 and shape[-2] == 1


def _caches_at(step: StageStep) -> Iterator[int]:
    """The places of the numbers of a step's caches among a message's integers."""
    kinds = enumerate(integer_kinds(step.arguments))
    yield from (step.ints_at + at for at, kind in kinds if kind == "cache")


def why_not_capturable(layers: Sequence[Any]) -> str:
    """Why no graph can go on with layers of a cache; nothing if it can."""
    kinds = {type(layer).__name__ for layer in layers if counts_in_python(layer)}
    if kinds:
        return f"the {' and '.join(sorted(kinds))} of their cache counts or grows in Python"
    return "" if layers else "their cache is empty"
