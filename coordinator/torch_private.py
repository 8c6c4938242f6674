"""All that drumline takes from torch by private names: no other module touches one.

Where a public name serves, it is used in its place instead. Each name below has its reason, and the
releases in which it was read. For drumline's own layers, and not for users.
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
from torch.distributed import ProcessGroup, ProcessGroupGloo, Store
from torch.distributed.distributed_c10d import _get_process_group_store
from torch.export import ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

READ_IN = "2.11.0, 2.13.0, 2.14.1, 2.15.0"
"""Releases whose source was read for every name below, where none is given."""

RUN_IN = "2.11.0, 2.13.0, 2.15.0"
"""Releases that were asked for a name which only their C++ has."""

NAMES: dict[str, tuple[str, str]] = {
    # Tensors.
    "_subclasses": ("the fake tensors of tracing, which have no memory to move", READ_IN),
    "_functorch": ("tensors inside of vmap and grad, which are wrappers", READ_IN),
    "_disabled_torch_function_impl": (
        "what a subclass says to have no __torch_function__",
        READ_IN,
    ),
    "_make_wrapper_subclass": ("a tensor of a shape and without memory", READ_IN),
    "_parse_to": ("how torch reads the arguments of .to(), for the devices of others too", READ_IN),
    "_nn": ("where _parse_to is", READ_IN),
    "_spec": ("layout of a DTensor, which from_local would compute anew", READ_IN),
    # Operators.
    "_AutoDispatchBelowAutograd": ("an operator of ours that autograd must not see", READ_IN),
    "_ops": ("kinds of operators, to tell them from functions in a traced program", READ_IN),
    "_schema": ("which arguments of an operator are devices, and whether it writes", READ_IN),
    "_python_dispatch": ("a mode that sees every operator; it is documented there", READ_IN),
    "_get_current_dispatch_mode_stack": ("whether such a mode of ours is on already", READ_IN),
    "_pytree": ("trees of torch.export and fx, whose kinds of nodes are registered there", READ_IN),
    "_enter_autocast": ("name of the call in a traced program, which has a device type", READ_IN),
    # Modules.
    "_parameters": ("a module's own parameters, and those that are None", READ_IN),
    "_buffers": ("a module's own buffers, and those that are None", READ_IN),
    "_modules": ("whether a module has places for children", READ_IN),
    "_non_persistent_buffers_set": ("buffers that no checkpoint has", READ_IN),
    "_forward_hooks": ("whether a script watches a module", READ_IN),
    "_forward_pre_hooks": ("whether a script watches a module", READ_IN),
    "_apply": ("the one method by which modules are moved and converted", READ_IN),
    # torch.compile.
    "_initialize_hook": ("what torch.compile(model) asks a model for, before it traces", READ_IN),
    "_torchdynamo_orig_callable": ("the mark of a function that is compiled", READ_IN),
    "_dynamo": ("torch.compiler.disable imports the compiler, which takes seconds", READ_IN),
    "_FrameAction": ("as _dynamo; where it is missing, nothing is skipped", READ_IN),
    "_FrameExecStrategy": ("as _dynamo; where it is missing, nothing is skipped", READ_IN),
    "_inductor": ("AOTInductor, documented by these names", READ_IN),
    "_aoti": ("aoti_load_package asks a compiler what this CPU can do", READ_IN),
    "_internal": ("the store of a process group whose other ranks do not exist", READ_IN),
    # torch.distributed.
    "_Options": ("a gloo group at an address of ours, with one thread", RUN_IN),
    "_devices": ("as _Options", RUN_IN),
    "_threads": ("as _Options", RUN_IN),
    "_timeout": ("as _Options, and the time limit that torch passes to a backend", READ_IN),
    "_allgather_base": ("gloo's allgather into one tensor", READ_IN),
    "_get_process_group_store": ("where ranks of a group that torch made meet", READ_IN),
    "_device_types": ("the devices of a group, to find the backend of each", READ_IN),
    "_get_backend": ("a group's backend object, which has no public getter", READ_IN),
    "_set_group_name": ("torch calls it on a group that Python made", READ_IN),
    "_set_group_desc": ("torch calls it on a group that Python made", READ_IN),
    "_C": ("torch's own C++ module, where some of these names are", READ_IN),
}
"""Each private name that is taken, as an attribute, by import or as text: why, and where read."""

__all__ = [
    "NAMES",
    "DispatchMode",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "NamedProcessGroup",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "autocast_functions",
    "backends_of",
    "below_autograd",
    "compile_mark",
    "compile_package",
    "declares_parts",
    "dispatch_modes",
    "dtensor_like",
    "fake_store",
    "forward_hooks",
    "gloo_allgather",
    "gloo_group",
    "is_compiled",
    "is_fake",
    "is_transformed",
    "make_wrapper",
    "move_method",
    "no_torch_function",
    "open_package",
    "own_tables",
    "parse_to",
    "plain_functions",
    "schema_of",
    "skip_in_dynamo",
    "store_of",
    "timeout_of",
    "tree_leaves",
    "tree_map",
    "unsaved_buffers",
    "unwrapped",
]

Table = dict[str, Any]

# Tensors. What is called for every token is torch's own function, without one of ours around it.

plain_functions = torch._C.DisableTorchFunctionSubclass
"""A context, of one thread, in which subclasses of tensors are plain tensors to Python."""

no_torch_function: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass that has only a `__torch_dispatch__`."""

is_transformed: Callable[[Any], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""True for a tensor inside of vmap or grad."""


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

compile_mark = "_initialize_hook"
"""The attribute that torch.compile(model) asks for first."""


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
    timeout: timedelta = options._timeout
    return timeout


class NamedProcessGroup(ProcessGroup):
    """A process group made in Python, to which torch gives its name and description."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._names = ["undefined", "undefined"]

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._names[0]

    @property
    def group_desc(self) -> str:
        return self._names[1]

    def _set_group_name(self, name: str) -> None:
        self._names[0] = name

    def _set_group_desc(self, description: str) -> None:
        self._names[1] = description
