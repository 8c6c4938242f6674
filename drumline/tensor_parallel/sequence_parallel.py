"""Sequence parallelism: between layers each rank holds a part of the tokens.

tokens = SequenceParallel(model, styles, comm)     # styles that name norms "sequence_parallel"
tokens.install()                                   # once, after the layers themselves are sharded

Inside the layers every rank holds its own tokens of [batch, length, width]: norms see those alone,
what computes between norms is given all of them (an allgather), and leaves the sum of its parts
where it is needed (a reduce_scatter). That is as much traffic as one allreduce, and norms,
additions and their activations are divided by the number of ranks. Positions, masks and caches
stay whole, so generation is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from communicator import Communicator
from drumline.errors import DrumlineError
from drumline.planner.model_profile import layer_names
from drumline.tensor_parallel import autograd_collectives as collectives
from drumline.tensor_parallel.tp_plan import INPUT_SHARDED, SEQUENCE_PARALLEL, trunk_of


class SequenceParallel:
    """The tokens of the pass that runs now, if they are partitioned. One pass at a time."""

    def __init__(self, model: nn.Module, styles: Mapping[str, str], comm: Communicator):
        self.model, self.styles, self.comm = model, styles, comm
        self.full_shape: torch.Size | None = None
        """[batch, length, width] of all ranks together; None if tokens are not partitioned."""
        self.stays_partitioned = False
        self.may_partition = True

    def install(self) -> None:
        """Wrap layers whose norms are all in the plan, their children and what is around them.

        A norm by itself stays whole on each rank: to gather its tokens takes longer than it does.
        """
        norms = {name for name, style in self.styles.items() if style == SEQUENCE_PARALLEL}
        stacks: dict[str, list[str]] = {}
        for name in layer_names(self.model):
            stacks.setdefault(trunk_of(name), []).append(name)
        for trunk, layers in stacks.items():
            if all(_norms_of(name, norms) and self._calls_children_only(name) for name in layers):
                self._wrap_stack(trunk, layers, norms)

    def _calls_children_only(self, name: str) -> bool:
        """True if the layer computes by calling its children, so that wrapping those is enough."""
        layer, lists = self.model.get_submodule(name), (nn.ModuleList, nn.ModuleDict)
        is_bare = not any(True for _ in layer.parameters(recurse=False))
        return is_bare and not any(isinstance(c, lists) for c in layer.children())

    def _wrap_stack(self, trunk: str, layers: list[str], norms: set[str]) -> None:
        """Layers that follow each other, and what their trunk calls before and behind them."""
        behind = _norms_of(trunk, norms)
        for name in layers:
            for child, module in self.model.get_submodule(name).named_children():
                self._wrap_child(f"{name}.{child}", module, norms)
            self._wrap_layer(name, gathers=not behind and name == layers[-1])
        for child, module in self.model.get_submodule(trunk).named_children():
            name = f"{trunk}.{child}" if trunk else child
            if name in behind:
                self._wrap_norm(module, gathers=True)
            elif not any(layer.startswith(f"{name}.") for layer in layers):
                self._require_all_tokens(name, module)
        self._wrap_trunk(trunk, layers)

    def _wrap_norm(self, module: Any, gathers: bool) -> None:
        plain, on_own_tokens = module.forward, collectives.with_reduced_gradients(module, self.comm)

        def forward(x: torch.Tensor) -> Any:
            if not self._is_own_tokens(x):
                return plain(x)
            y = on_own_tokens(x)
            if gathers:
                y, self.full_shape = self._gather_in(y), None
            return y

        module.forward = forward

    def _wrap_child(self, name: str, module: Any, norms: set[str]) -> None:
        """Norms see this rank's tokens; everything else is given all, and keeps its own."""
        if name in norms:
            self._wrap_norm(module, gathers=False)
            return
        for inner, part in module.named_modules():
            style = self.styles.get(f"{name}.{inner}")
            if inner and style is not None:
                self._require_all_tokens(f"{name}.{inner}", part)
            is_child = inner and "." not in inner
            if style in INPUT_SHARDED and is_child and isinstance(part, nn.Linear):
                self._wrap_row(part)
        plain = module.forward
        has_columns = "colwise" in self.styles.get(name, "")

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.full_shape is None:
                return plain(*args, **kwargs)
            args = tuple(self._gather_in(value) for value in args)
            kwargs = {key: self._gather_in(value) for key, value in kwargs.items()}
            output = plain(*args, **kwargs)
            return output if has_columns else self._scatter_in(output)

        module.forward = forward

    def _require_all_tokens(self, name: str, module: Any) -> None:
        """Let a module that is sharded by heads or experts raise if it is given only own tokens."""
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if any(self._is_own_tokens(value) for value in [*args, *kwargs.values()]):
                raise DrumlineError(
                    f"{name} was given the tokens of rank {self.comm.rank} alone, as its layer "
                    "calls it in a way that is not known here, so the result would be wrong; "
                    f"leave the norms ({SEQUENCE_PARALLEL!r}) out of tp_plan."
                )
            return plain(*args, **kwargs)

        module.forward = forward

    def _wrap_row(self, module: Any) -> None:
        """The sum over ranks goes, part by part, to the ranks whose tokens they are."""
        plain = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            if self.full_shape is None or x.dim() != 3 or x.shape[:2] != self.full_shape[:2]:
                return plain(x)  # type: ignore[no-any-return]
            y = collectives.reduce_scatter_tokens(F.linear(x, module.weight), self.comm)
            if module.bias is None:
                return y
            return y + collectives.copy_to_ranks(module.bias, self.comm).to(y.dtype)

        module.forward = forward

    def _wrap_layer(self, name: str, gathers: bool) -> None:
        layer: Any = self.model.get_submodule(name)
        plain = layer.forward

        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            others = [*args, *kwargs.values()]
            if self.full_shape is None and self._can_partition(hidden_states, others):
                self.full_shape = hidden_states.shape
                hidden_states = collectives.scatter_tokens(hidden_states, self.comm)
            try:
                output = plain(hidden_states, *args, **kwargs)
                if self.full_shape is not None and (gathers or not self.stays_partitioned):
                    output, self.full_shape = self._gather_in(output), None
            except BaseException:
                self.full_shape = None
                raise
            return output

        layer.forward = forward

    def _wrap_trunk(self, name: str, layers: list[str]) -> None:
        """Keep tokens partitioned from one layer to the next, unless all are to be returned."""
        trunk: Any = self.model.get_submodule(name)
        plain, modules = trunk.forward, [self.model.get_submodule(layer) for layer in layers]

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Gradient checkpointing calls a layer again, outside the pass that partitioned it.
            checkpointed = (m.training and getattr(m, "gradient_checkpointing", 0) for m in modules)
            self.may_partition = not (_returns_layer_outputs(trunk, kwargs) or any(checkpointed))
            self.stays_partitioned = True
            try:
                output = plain(*args, **kwargs)
                assert self.full_shape is None, f"{name} did not call what joins its tokens again"
                return output
            finally:
                self.full_shape, self.stays_partitioned, self.may_partition = None, False, True

        trunk.forward = forward

    def _can_partition(self, x: torch.Tensor, others: Iterable[Any]) -> bool:
        """One token, as in decoding, is computed by all: to gather it would take longer.

        Nor are the tokens of a decoder partitioned that attends to another sequence: both have the
        same width, and could not be told apart.
        """
        if not self.may_partition or x.dim() != 3 or x.shape[1] < 2 * self.comm.world_size:
            return False
        tensors = [other for other in others if isinstance(other, torch.Tensor)]
        return not any(t.dim() == 3 and t.shape[-1] == x.shape[-1] for t in tensors)

    def _is_own_tokens(self, x: Any) -> bool:
        if self.full_shape is None or not isinstance(x, torch.Tensor):
            return False
        batch, length, width = self.full_shape
        return tuple(x.shape) == (batch, collectives.shard_size(length, self.comm), width)

    def _gather_in(self, value: Any) -> Any:
        """All tokens in place of this rank's, wherever they are in a value."""
        if isinstance(value, tuple):
            return tuple(self._gather_in(item) for item in value)
        if not self._is_own_tokens(value):
            return value
        assert self.full_shape is not None
        return collectives.gather_tokens(value, self.full_shape[1], self.comm)

    def _scatter_in(self, value: Any) -> Any:
        """This rank's tokens in place of all; what is not a hidden state stays as it is."""
        if isinstance(value, tuple):
            return tuple(self._scatter_in(item) for item in value)
        if self.full_shape is None or not isinstance(value, torch.Tensor):
            return value
        batch, length, width = self.full_shape
        if value.shape == self.full_shape:
            return collectives.scatter_tokens(value, self.comm)
        if tuple(value.shape) == (batch * length, width):
            return collectives.scatter_tokens(value.view(self.full_shape), self.comm).flatten(0, 1)
        return value


def _norms_of(name: str, norms: set[str]) -> set[str]:
    """The norms that are children of a module."""
    return {norm for norm in norms if norm.rpartition(".")[0] == name}


def _returns_layer_outputs(trunk: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """True if what comes out of each layer is to be returned."""
    setting = kwargs.get("output_hidden_states")
    if setting is None:
        setting = getattr(getattr(trunk, "config", None), "output_hidden_states", None)
    return setting is not None and setting is not False
