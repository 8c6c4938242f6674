"""A stage's layers for one token as one CUDA graph, where every token's are alike.

A graph repeats what was put into it, at the same addresses, without a line of Python in between. So
only what Python could not do otherwise the next time is captured: passes of one token over keys and
values that lie in a StaticCache. All else runs layer by layer, and why is told once.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers.cache_utils import StaticLayer

from drumline.core.pytree import iter_leaves
from drumline.kv_cache.owner import is_filled
from drumline.stages.program import NOTHING, Step

if TYPE_CHECKING:
    from drumline.kv_cache.owner import CacheRegistry
    from drumline.stages.messages import Message
    from drumline.stages.stage import Route

Work = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""What the layers of a stage make of the tensors that have arrived."""

WARM_UPS = 2
"""So many tokens of a cache run layer by layer first: in them caches get their memory, and
libraries theirs, which must not lie in a graph."""

MOST_GRAPHS = 8
MOST_CHANGES = 2
"""So often a program is captured anew for a cache before it is left alone."""

TOO_MANY = f"what they are given changes, or over {MOST_GRAPHS} caches take turns"

NEVER = -(1 << 60)

Use = tuple[int, tuple[int, ...]]
"""A program, and the caches that it is run with."""


class Graph(Protocol):
    def capture(self, work: Callable[[], list[torch.Tensor]]) -> None:
        """Note what `work` would do, without doing it. RuntimeError if that cannot be."""

    def replay(self) -> list[torch.Tensor]:
        """Do it, and return what `work` would; the next replay writes over it."""


class CudaGraph:
    """A torch.cuda.CUDAGraph. stream: where it is captured: one for all, for cuBLAS keeps memory of
    its own on each."""

    def __init__(self, device: torch.device, stream: Any):
        self._device, self._stream = device, stream
        self._graph = torch.cuda.CUDAGraph()
        self._made: list[torch.Tensor] = []

    def capture(self, work: Callable[[], list[torch.Tensor]]) -> None:
        with (
            torch.cuda.device(self._device),
            # thread_local: other ranks may be threads of this process
            torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"),
        ):
            self._made = work()

    def replay(self) -> list[torch.Tensor]:
        self._graph.replay()
        return self._made


@dataclass
class Captured:
    """inputs: the memory that the graph reads. ints, state: what it takes for granted."""

    graph: Graph
    inputs: list[torch.Tensor]
    ints: list[int]
    state: list[torch.Tensor]

    def fits(self, arrived: Sequence[torch.Tensor], ints: list[int], state: list[Any]) -> bool:
        pairs = zip(arrived, self.inputs, strict=True)
        alike = all((new.shape, new.dtype) == (old.shape, old.dtype) for new, old in pairs)
        return alike and ints == self.ints and [*map(id, state)] == [*map(id, self.state)]

    def replay(self, arrived: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for mine, new in zip(self.inputs, arrived, strict=True):
            mine.copy_(new)
        return self.graph.replay()


class Graphs:
    """The graphs of one rank. make: a new one; a CudaGraph of the device if not given."""

    def __init__(self, rank: int, device: torch.device, make: Callable[[], Graph] | None = None):
        self.rank, self.device = rank, device
        self.make = make or _captured_on(device)
        self.num_replays = 0
        self.reasons: set[str] = set()  # why something was not captured, each told once
        self._passes: dict[int, Pass] = {}
        self._uses: dict[Use, int] = {}  # how many passes of one token; NEVER where it is refused
        self._changes: Counter[Use] = Counter()
        self._captured: dict[Use, Captured] = {}

    def run(self, route: Route, message: Message, vault: CacheRegistry, work: Work) -> Any:
        """The tensors that leave, to be sent before the next call; None if `work` is to be done."""
        its = self._passes.get(message.program)
        if its is None:
            its = self._passes[message.program] = Pass(route)
        arrived = message.tensors[: len(route.arriving)]
        if not its.is_of_one_token(arrived):
            return None
        use = (message.program, tuple(message.ints[at] for at in its.caches_at))
        self._uses[use] = self._uses.get(use, 0) + 1
        if self._uses[use] <= WARM_UPS:
            return None
        layers = [each for cache in use[1] for each in vault.cache(cache).layers if is_filled(each)]
        reason = its.unfit or unfit(layers)
        if reason:
            self._refuse(its, use, reason)
            return None
        state = [t for layer in layers for t in (layer.keys, layer.values, layer.cumulative_length)]
        captured = self._captured.get(use)
        if captured is None or not captured.fits(arrived, message.ints, state):
            captured = self._capture(its, use, arrived, message.ints, state, work)
        if captured is None:
            return None
        self.num_replays += 1
        return captured.replay(arrived)

    def keep_only(self, caches: Collection[int]) -> None:
        """Let go of what is for other caches than these."""
        kept: Any
        for kept in (self._captured, self._uses, self._changes):
            for use in [use for use in kept if not set(use[1]) <= set(caches)]:
                del kept[use]

    def _capture(
        self,
        its: Pass,
        use: Use,
        arrived: list[torch.Tensor],
        ints: list[int],
        state: list[torch.Tensor],
        work: Work,
    ) -> Captured | None:
        if self._captured.pop(use, None) is not None:
            self._changes[use] += 1
        if self._changes[use] > MOST_CHANGES:
            self._refuse(its, use, TOO_MANY)
            return None
        inputs = [torch.empty_like(tensor, device=self.device) for tensor in arrived]
        graph = self.make()
        try:
            graph.capture(lambda: work(inputs))
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            self._refuse(its, use, f"they cannot be captured ({why})")
            return None
        while len(self._captured) >= MOST_GRAPHS:
            oldest = next(iter(self._captured))
            del self._captured[oldest]
            self._changes[oldest] += 1
        self._captured[use] = Captured(graph, inputs, list(ints), state)
        return self._captured[use]

    def _refuse(self, its: Pass, use: Use, reason: str) -> None:
        self._uses[use] = NEVER
        if reason not in self.reasons:
            self.reasons.add(reason)
            warnings.warn(
                f"rank {self.rank}: {its.name} do not run as a CUDA graph: {reason}. Their results "
                "are the same without it.",
                stacklevel=2,
            )


class Pass:
    """What can be said of a program beforehand."""

    def __init__(self, route: Route):
        steps = [step for step, *_ in route.steps]
        self.is_possible = bool(steps) and route.program.operations == NOTHING
        self.is_possible &= all(step.output is not None and step.slots for step in steps)
        if not self.is_possible:
            return
        self.name = f"{steps[0].module} to {steps[-1].module}"
        self.hidden_at = route.arriving.index(steps[0].slots[0])
        self.caches_at = sorted({at for step in steps for at in _caches_at(step)})
        kinds = {leaf[0] for step in steps for leaf in iter_leaves(step.arguments)}
        self.unfit = "" if self.caches_at else "they have no cache"
        if kinds & {"pair", "shared"}:
            self.unfit = "they read what an encoder or another layer has left in Python"

    def is_of_one_token(self, arrived: Sequence[torch.Tensor]) -> bool:
        if not self.is_possible:
            return False
        shape = arrived[self.hidden_at].shape
        return len(shape) > 2 and shape[-2] == 1


def _captured_on(device: torch.device) -> Callable[[], Graph]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return functools.partial(CudaGraph, device, stream)


def _caches_at(step: Step) -> Iterator[int]:
    """Where in a message's integers the numbers of a step's caches are."""
    kinds = [leaf[0] for leaf in iter_leaves(step.arguments) if leaf[0] in ("int", "cache")]
    yield from (step.ints_at + at for at, kind in enumerate(kinds) if kind == "cache")


def unfit(layers: Sequence[Any]) -> str:
    """Why no graph can go on with layers of a cache; nothing if it can."""
    kinds = {type(layer).__name__ for layer in layers if type(layer) is not StaticLayer}
    if kinds:
        return f"the {' and '.join(sorted(kinds))} of their cache counts or grows in Python"
    return "" if layers else "their cache is empty"
