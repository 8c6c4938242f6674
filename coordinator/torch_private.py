"""All that drumline takes from torch by private names: no other module touches one.

Where a public name serves, it is used in its place instead. tests/versions/taken_names.py has the
reason of each, and the releases that were read. For drumline's own layers, and not for users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, is_fake
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup, ProcessGroupGloo, Store
from torch.distributed.distributed_c10d import _get_process_group_store
from torch.export import ExportedProgram
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

Table = dict[str, Any]

# Tensors. What is called for every token is torch's own function, without one of ours around it.

plain_functions = torch._C.DisableTorchFunctionSubclass
"""A context, of one thread, in which subclasses of tensors are plain tensors to Python."""

version_of: Any = torch.Tensor._version.__get__  # type: ignore[attr-defined]
"""version_of(tensor): how often it was written into; RuntimeError for one of inference mode."""

no_torch_function: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass that has only a `__torch_dispatch__`."""

is_transformed: Callable[[Any], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""True for a tensor inside of vmap or grad."""


def has_tangents() -> bool:
    """True inside of forward_ad.dual_level(), where tensors may have derivatives beside them."""
    return bool(forward_ad._current_level >= 0)


make_wrapper: Any = torch.Tensor._make_wrapper_subclass
"""make_wrapper(subclass, shape, dtype=, device=): a tensor without memory."""


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside those that vmap and grad have wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def dtensor_like(dtensor: Any, shard: torch.Tensor) -> Any:
    """A DTensor laid out as another one, with this shard."""
    from torch.distributed.tensor import DTensor

    return DTensor(shard, dtensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def parse_to(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The device and dtype that `.to()` with these arguments asks for; None for neither."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype


# Operators.

below_autograd = torch._C._AutoDispatchBelowAutograd
"""A context in which autograd sees no operator, also while torch.compile traces."""

DispatchMode = TorchDispatchMode
dispatch_modes = _get_current_dispatch_mode_stack


def function_modes() -> list[Any]:
    """The contexts in which functions of torch are those of somebody else, but not a device's."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [mode for mode in modes if type(mode) is not DeviceContext]


grouped_mm: Any = getattr(torch, "_grouped_mm", nn.functional.grouped_mm)
"""What a product of groups of rows, each with a matrix of its own, comes down to."""

onednn_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
"""onednn_linear(x, weight, bias, "none", [], ""): a linear layer; None without oneDNN."""

autocast_functions = ("wrap_with_autocast", "_enter_autocast", "autocast")
"""Names of functions in a traced program whose first argument is a device type."""


def schema_of(target: Any) -> Any:
    """The schema of an operator: its name, its arguments, what it writes; None for a function."""
    return getattr(target, "_schema", None)


# Modules.


def own_tables(module: nn.Module) -> tuple[Table, Table]:
    """A module's own parameters and buffers, None for those that it does without.

    Writing into a table replaces one, without a __setattr__ of the module.
    """
    return module._parameters, module._buffers


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Names of a module's own buffers that no checkpoint has."""
    return module._non_persistent_buffers_set


def declares_parts(module: nn.Module) -> bool:
    """True if a module has, or could have, parameters or children of its own."""
    return bool(module._modules or module._parameters)


def forward_hooks(module: nn.Module) -> list[Any]:
    """The functions that are called before and after the forward of this module."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


move_method = "_apply"
"""The method by which a module is moved and converted, whoever asks for it."""

# torch.compile.

compile_marks = "_initialize_hook", "_infer_parameters"
"""The attributes that torch.compile(model) reads: the first at once, except in torch 2.14, which
only looks whether the class has it, and reads the second in the first call."""


def is_compiled(function: Any) -> bool:
    return hasattr(function, "_torchdynamo_orig_callable")


def skip_in_dynamo(codes: Iterator[CodeType]) -> None:
    """Have torch.compile run functions, and all that they call, without tracing them.

    Where torch has no such names, functions around our calls are not compiled.
    """
    with suppress(ImportError):
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )

        skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        for code in codes:
            set_code_exec_strategy(code, skip)


def compile_package(program: ExportedProgram, path: str, options: Mapping[str, Any]) -> None:
    """Compile a program into a package at path, by AOTInductor."""
    from torch._inductor import aoti_compile_and_package

    aoti_compile_and_package(program, package_path=path, inductor_configs=dict(options))


def open_package(path: str, device_index: int) -> Any:
    """The function in a package, on a device; -1 for the CPU. Compiles nothing."""
    from torch._inductor.package.package import AOTICompiledModel

    loader = torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, device_index)
    return AOTICompiledModel(loader)


def fake_store() -> Store:
    """The store of a group of the backend "fake", which this also makes known to torch."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


# torch.distributed.


def gloo_group(store: Store, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    """A gloo group that listens at address, with one thread. Collective. Raises RuntimeError.

    The caller keeps store: torch keeps only its C++ half alive.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._threads = 1
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)


def gloo_allgather(group: Any, out: torch.Tensor, tensor: torch.Tensor, *options: Any) -> Any:
    """The work of gathering equal tensors of all ranks in one."""
    return group._allgather_base(out, tensor, *options)


def store_of(group: ProcessGroup) -> Store:
    """The store over which a group of torch's met; a group without one raises KeyError."""
    return _get_process_group_store(group)


def backends_of(group: ProcessGroup) -> list[Any]:
    """The backend of a group for each kind of device."""
    return [group._get_backend(device) for device in group._device_types]


def timeout_of(options: Any) -> timedelta:
    """The time limit in the options of a group, as torch passes them to a backend."""
    return options._timeout  # type: ignore[no-any-return]


class NamedProcessGroup(ProcessGroup):
    """A process group made in Python, to which torch gives its name and description."""

    group_name = "undefined"  # type: ignore[assignment]
    group_desc = "undefined"

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, description: str) -> None:
        self.group_desc = description
