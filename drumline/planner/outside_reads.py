"""The parts that a model reads or changes by itself, seen in a pass on meta.

names = read_outside(Gemma4ForConditionalGeneration, config, torch.bfloat16, parts)

Such a part has to be where the model's own code runs, on rank 0, as nothing but a call of it works
from there when it is on another rank. BigBird puts other modules into its layers for a short text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from coordinator import torch_private
from drumline.contact.loading.configs import without_quantization
from drumline.contact.passes import text_inputs
from drumline.core.device_map import ModelProfile
from drumline.core.meta_pass import MetaPass
from drumline.core.packed_tensor import PLAIN_FUNCTIONS
from drumline.planner.model_profile import build_on_meta, part_of_tensor

NUM_TOKENS = 8


def read_outside(
    kind: type[Any], config: Any, dtype: torch.dtype, parts: ModelProfile
) -> tuple[str, ...]:
    """The names of such parts; none where a pass fails, as what it reads is not known then."""
    try:
        model = build_on_meta(kind, without_quantization(config), dtype).eval()
        modules = dict(model.named_modules())
        tables = {part.name: modules[part.name] for part in parts.others if part.name in modules}
        owners = {id(p): name for name, module in tables.items() for p in module.parameters()}
        names = [*tables, *(part.name for part in parts.layers)]
        watch = _OutsideReads(owners)
        with contextlib.ExitStack() as stack:
            for name in names:
                watch.leave_out(modules[name], stack)
            stack.enter_context(torch.no_grad())
            stack.enter_context(watch)
            model(**text_inputs(model, 1, NUM_TOKENS))
    except Exception:  # of the model's own code, which has nothing to compute with
        return ()
    changed = [name for name, module in model.named_modules() if modules.get(name) is not module]
    watch.names.update(part_of_tensor(name, {*names}) for name in changed)
    return tuple(name for name in names if name in watch.names)


class _OutsideReads(MetaPass):
    """Notes which parameters are read while no part of the model runs.

    owners: the parts of parameters, by the id of these. Buffers are left out: those that models
    compute, as the types of a row of tokens, can be read wherever their part is.
    """

    def __init__(self, owners: Mapping[int, str]):
        super().__init__()
        self.owners, self.names, self._depth = owners, set[str](), 0

    def leave_out(self, module: torch.nn.Module, stack: contextlib.ExitStack) -> None:
        def enter(*_: Any) -> None:
            self._depth += 1

        def leave(*_: Any) -> None:
            self._depth -= 1

        stack.callback(module.register_forward_pre_hook(enter).remove)
        stack.callback(module.register_forward_hook(leave).remove)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not self._depth and func not in PLAIN_FUNCTIONS:
            leaves = torch_private.tree_leaves((args, kwargs))
            self.names |= {self.owners[id(leaf)] for leaf in leaves if id(leaf) in self.owners}
        return super().__torch_function__(func, types, args, kwargs)
