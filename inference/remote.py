"""What stands in for a layer that another rank holds.

It answers at once with a lazy hidden state, so the calls of one forward pass gather in a chain and
go round the ring together when something looks at the result. Only the first call of a layer with
arguments of a new form waits, to learn what the layer returns.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import torch
from torch import nn

from inference.chain import Call, Chain
from inference.lazy import Lazy
from inference.mirror import advance, number_of
from inference.session import Session
from inference.values import Leaves, flatten, frozen, kinds_of_new, rebuild


class RemoteModule:
    """Stands in for the forward of a module that another rank holds."""

    def __init__(self, session: Session, name: str, module: nn.Module, rank: int):
        self.session, self.name, self.rank = session, name, rank
        self.cache_layers = _cache_layers(module)
        self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._repeated(args, kwargs) or self._call(args, kwargs)
        chain, leaves = self.session.chain, call.leaves
        chain.calls.append(call)
        result = self._result(chain, call, leaves)
        if leaves.tensors:
            for cache in leaves.caches[:1]:
                advance(cache, self.cache_layers, leaves.tensors[0])
        return result

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        leaves = Leaves()
        template = flatten([args, kwargs], leaves, lambda cache: number_of(cache, self.session))
        chain = self.session.chain
        if chain.calls and chain.calls[-1].layer.rank > self.rank:
            chain.flush()  # it has passed this rank already
            chain = self.session.chain
        slots = tuple([chain.slot(tensor) for tensor in leaves.tensors])
        return Call(self, (args, kwargs), self.session.form(template), leaves, slots)

    def _repeated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The call if it is like the last one of the chain but for the hidden state."""
        chain = self.session.chain
        if not chain.calls or not args or getattr(args[0], "source", None) is not chain:
            return None
        last = chain.calls[-1]
        if last.layer.rank > self.rank or not last.is_repeated_by(args, kwargs):
            return None
        old, hidden = last.leaves, args[0]
        leaves = Leaves(old.ints, [hidden, *old.tensors[1:]], old.caches)
        return Call(self, (args, kwargs), last.form, leaves, (~hidden.slot, *last.slots[1:]))

    def _result(self, chain: Chain, call: Call, leaves: Leaves) -> Any:
        """What the layer returns, after putting what it wrote into dicts that layers share."""
        new = self._learn(chain, call) if call.output is None else self._later(chain, call, leaves)
        output = self.session.outputs[(self.name, call.form)]
        value, *written = rebuild(output, leaves.tensors, iter(new), leaves.caches)
        for shared, changes in zip(leaves.shared, written, strict=True):
            shared.update(changes)
        return value

    def _learn(self, chain: Chain, call: Call) -> list[torch.Tensor]:
        """Run the call now, for its output and the description of it."""
        reply = chain.flush()
        assert reply is not None
        self.session.outputs[(self.name, call.form)] = frozen(json.loads(reply.note))
        return [tensor.to(self.session.device) for tensor in reply.tensors]

    def _later(self, chain: Chain, call: Call, leaves: Leaves) -> list[Lazy]:
        hidden = leaves.tensors[0] if leaves.tensors else torch.empty(0)
        kinds = enumerate(kinds_of_new(call.output))
        return [chain.lazy(kind, (self.name, number), hidden) for number, kind in kinds]

    def __deepcopy__(self, memo: Any) -> RemoteModule:
        return self


def _cache_layers(module: nn.Module) -> tuple[int, ...]:
    """The layers of the cache that a module fills: those that its attention says are its own."""
    numbers = {getattr(child, "layer_idx", None) for child in module.modules()}
    return tuple(sorted(number for number in numbers if isinstance(number, int)))
