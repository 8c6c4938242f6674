"""Moves a traced or exported program from the device it was made on to this rank's own.

program = torch.export.load("model.pt2")                 # made for cuda:0
hoist(program, {"cuda:0": f"cuda:{coor.local_rank}"})    # nothing in it names cuda:0 any more
"""

from __future__ import annotations

import copy
import dataclasses
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves, tree_map

from drumline.errors import DrumlineError

Devices = Mapping[str, str] | Mapping[torch.device, torch.device]

STAYING = ("cpu", "meta")
"""Types that a program names on purpose; they move only if the mapping names them."""


POSITIONS = {"set_default_device": (0,), "Generator": (0,)}
"""Where functions of Python that torch has no schema for take a device, beside `device=`."""


class HoistError(DrumlineError, ValueError):
    """The program would not run on the device it was moved to; it must not be used."""


class UnmappedDevice(HoistError):
    """The program names a device that the mapping does not, and strict=True was asked for."""


@dataclass
class HoistReport:
    """What hoisting found: places changed, by kind; devices left, by place; nodes not checked."""

    changed: dict[str, int] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    unchecked: list[str] = field(default_factory=list)

    def count(self, kind: str) -> None:
        self.changed[kind] = self.changed.get(kind, 0) + 1


def hoist(
    artifact: Any,
    mapping: Devices,
    *,
    strict: bool = False,
    indexless: str = "explicit",
    inputs: tuple[Any, ...] | None = None,
    report: HoistReport | None = None,
) -> Any:
    """`artifact`, a GraphModule or ExportedProgram, changed in place to use other devices.

    mapping: all at once, so that {"cuda:0": "cuda:1", "cuda:1": "cuda:0"} swaps. cpu and meta stay
        unless named. Another explicit device stays and is reported; with strict it is an error.
    indexless: what "cuda" without a number becomes: "explicit" the device mapped to, if there is
        one only; "keep" leaves it to mean the current device.
    inputs: examples for a graph that was traced without any, so that it can be checked.

    Tensors that were shared stay shared. Raises HoistError if, propagated with fake tensors, any
    node is not on the device it should be on.
    """
    report = HoistReport() if report is None else report
    devices = _Map(mapping, indexless, strict, report)
    if isinstance(artifact, ExportedProgram):
        _hoist_program(artifact, devices)
    elif isinstance(artifact, fx.GraphModule):
        _hoist_module(artifact, devices)
    else:
        raise HoistError(
            f"a {type(artifact).__name__} cannot be hoisted, so it would run where it was made; "
            "give a GraphModule or an ExportedProgram (hoist_package for a .pt2 file)."
        )
    check_devices(artifact, inputs=inputs, report=report)
    return artifact


class _Map:
    """The mapping as a function of a device, noting what it meets."""

    def __init__(self, mapping: Devices, indexless: str, strict: bool, report: HoistReport):
        self.to = {_device(old): _device(new) for old, new in mapping.items()}
        if indexless not in ("explicit", "keep"):
            raise HoistError(f'indexless={indexless!r} is neither "explicit" nor "keep"')
        self.explicit, self.strict, self.report = indexless == "explicit", strict, report
        self.memo: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.moved: dict[Any, torch.Tensor] = {}
        self.inside: set[int] = set()

    def device(self, device: torch.device, kind: str, where: str) -> torch.device:
        new = self._find(device)
        if new is None:
            if device.type not in STAYING and device not in self.to.values():
                self.keep(device, where)
            return device
        if new != device:
            self.report.count(kind)
        return new

    def _find(self, device: torch.device) -> torch.device | None:
        if device in self.to:
            return self.to[device]
        index: int | None = device.index
        if index is None and self.explicit and device.type not in STAYING:
            targets = {new for old, new in self.to.items() if old.type == device.type}
            return targets.pop() if len(targets) == 1 else None
        return None

    def keep(self, device: torch.device, where: str) -> None:
        self.report.kept[where] = str(device)
        if self.strict:
            raise UnmappedDevice(
                f"{where} is on {device}, and the mapping names only "
                f"{', '.join(map(str, self.to))}, so the program spans devices; map {device} "
                "too, or leave out strict."
            )

    def tell_of_string(self, text: str, where: str) -> None:
        """Note a string that may mean a device that is moving; nothing says whether it does."""
        head, _, rest = text.partition(".")
        if _is_device(text) and _device(text) in self.moving:
            self.keep(_device(text), where)
        elif head == "torch" and rest.partition(".")[0] in {old.type for old in self.moving}:
            self.keep(torch.device(rest.partition(".")[0]), where)

    @property
    def moving(self) -> set[torch.device]:
        """The devices that nothing should be on any more."""
        return self.to.keys() - self.to.values()

    def number(self, index: int, where: str) -> Any:
        """A device that is said by its number alone, if the mapping leaves no doubt of its type."""
        kinds = {old.type for old in self.to} - {*STAYING}
        if len(kinds) != 1:
            return index
        old = torch.device(kinds.pop(), index)
        new = self.device(old, "literals", where)
        return index if new == old else new

    def type(self, name: str) -> str:
        """A device type where a type is meant, as autocast takes it."""
        types = {new.type for old, new in self.to.items() if old.type == name}
        return types.pop() if len(types) == 1 else name

    def tensor(self, tensor: torch.Tensor, kind: str, where: str) -> torch.Tensor:
        """The tensor on its new device; the same object for the same object."""
        if id(tensor) in self.memo:
            return self.memo[id(tensor)][1]
        new = self.device(tensor.device, kind, where)
        moved = tensor if new == tensor.device else self._move(tensor, new)
        self.memo[id(tensor)] = (tensor, moved)  # holding it keeps its id from being used again
        return moved

    def _move(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Moved; two tensors over the same memory are over the same memory afterwards."""
        if isinstance(_innermost(tensor), FakeTensor):
            return _fake_on(tensor, device)
        memory = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype)
        key = (*memory, tensor.shape, tensor.stride())
        if key not in self.moved:
            self.moved[key] = tensor.detach().to(device)
        data = self.moved[key].detach()
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(data, requires_grad=tensor.requires_grad)
        return data.requires_grad_(tensor.requires_grad)

    def value(self, value: Any, kind: str, where: str) -> Any:
        """Tensors and devices in nested containers; everything else as it is."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value, kind, where)
        if isinstance(value, torch.device):
            return self.device(value, kind, where)
        if isinstance(value, str):
            self.tell_of_string(value, where)
        if isinstance(value, (list, tuple, set, frozenset)):
            new = [self.value(item, kind, where) for item in value]
            if all(one is other for one, other in zip(new, value, strict=True)):
                return value
            return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
        if isinstance(value, dict):
            moved = {key: self.value(item, kind, where) for key, item in value.items()}
            changed = {key: item for key, item in moved.items() if item is not value[key]}
            return _with(value, changed) if changed else value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._fields(value, kind, where)
        return value

    def _fields(self, value: Any, kind: str, where: str) -> Any:
        """A dataclass with its fields moved, unless it holds itself."""
        if id(value) in self.inside:
            return value
        self.inside.add(id(value))
        names = [one.name for one in dataclasses.fields(value) if hasattr(value, one.name)]
        old = {name: getattr(value, name) for name in names}
        moved = {key: self.value(item, kind, where) for key, item in old.items()}
        self.inside.remove(id(value))
        changed = {key: item for key, item in moved.items() if item is not old[key]}
        new = copy.copy(value) if changed else value
        for key, item in changed.items():
            object.__setattr__(new, key, item)  # whether or not it is frozen
        return new


def _with(old: dict[Any, Any], changed: dict[Any, Any]) -> dict[Any, Any]:
    new = copy.copy(old)
    new.update(changed)
    return new


def _device(device: str | torch.device) -> torch.device:
    """As tensors have it: there is one CPU, and it has no number."""
    found = torch.device(device)
    return torch.device("cpu") if found.type == "cpu" else found


def _innermost(tensor: torch.Tensor) -> torch.Tensor:
    """What is in a tensor that vmap has wrapped: associative_scan and flex_attention trace so."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _fake_on(fake: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor like this one elsewhere, made and not moved: moving would start the device."""
    inner = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device="meta")
    moved = FakeTensor(_innermost(fake).fake_mode, inner, device)  # type: ignore[attr-defined]
    if isinstance(fake, torch.nn.Parameter):
        return torch.nn.Parameter(moved, requires_grad=fake.requires_grad)
    return moved


def _hoist_program(program: ExportedProgram, devices: _Map) -> None:
    _hoist_module(program.graph_module, devices)
    for name in ("_state_dict", "_constants"):
        table = getattr(program, name)
        for key, value in table.items():
            table[key] = devices.value(value, name.strip("_"), key)
    program._example_inputs = tree_map(
        lambda leaf: devices.value(leaf, "example_inputs", "example_inputs"),
        program._example_inputs,
    )
    program.validate()  # type: ignore[no-untyped-call]


def _hoist_module(root: fx.GraphModule, devices: _Map) -> None:
    for prefix, module in root.named_modules():
        _hoist_attributes(prefix, module, devices)
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                _hoist_node(node, devices)
            module.recompile()


def _hoist_attributes(prefix: str, module: torch.nn.Module, devices: _Map) -> None:
    own: dict[str, Any] = {"parameters": module._parameters, "buffers": module._buffers}
    for kind, table in own.items():
        for name, tensor in table.items():
            if tensor is not None:
                table[name] = devices.tensor(tensor, kind, f"{prefix}.{name}")
    skipped = ("_parameters", "_buffers", "_modules", "_graph")
    for name, value in vars(module).items():
        if name not in skipped and not name.startswith("__"):
            module.__dict__[name] = devices.value(value, "attributes", f"{prefix}.{name}")


def _hoist_node(node: fx.Node, devices: _Map) -> None:
    where = f"node {node.name}"
    by_position, by_name = _device_places(node)

    def literal(value: Any) -> Any:
        if isinstance(value, torch.device):
            return devices.device(value, "literals", where)
        return value

    def text(value: Any, kind: str) -> Any:
        if isinstance(value, str) and _is_device(value):
            return str(devices.device(torch.device(value), kind, where))
        if type(value) is int:  # x.to(0): a number alone is an accelerator's
            return devices.number(value, where)
        return value

    if node.target is torch.device:
        _hoist_device_call(node, devices, where)
    elif _is_cuda_call(node, devices):
        _hoist_cuda_call(node, devices, where)
    else:
        args = list(node.args)
        for position in by_position:
            if position < len(args):
                args[position] = text(args[position], "strings")
        kwargs = {k: text(v, "strings") if k in by_name else v for k, v in node.kwargs.items()}
        node.args, node.kwargs = map_aggregate(tuple(args), literal), map_aggregate(kwargs, literal)
    _hoist_current_device(node, devices, where)
    _hoist_autocast(node, devices)
    _tell_of_strings(node, devices, where)
    _hoist_metadata(node, devices, where)


def _hoist_metadata(node: fx.Node, devices: _Map, where: str) -> None:
    """What the tracer knew of the values, and whatever else a user noted."""

    def moved(value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor)
        return devices.tensor(value, "metadata", where) if is_tensor else value

    for key, noted in node.meta.items():
        if key in ("val", "example_value"):
            node.meta[key] = tree_map(moved, noted)
        else:
            node.meta[key] = devices.value(noted, "metadata", where)


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def _device_places(node: fx.Node) -> tuple[Iterable[int], Iterable[str]]:
    """Which arguments of a call are devices, so that a string there names one.

    An operator's schema says; of a function or method of Python, `device=` is one by name, and for
    `.to` every position is tried. Strings anywhere else are not looked at, whatever they say.
    """
    operator = _only_overload(node.target)
    if isinstance(operator, torch._ops.OpOverload):
        arguments = operator._schema.arguments
        found = [n for n, one in enumerate(arguments) if _is_place(one)]
        return found, [arguments[n].name for n in found]
    if isinstance(node.target, torch._ops.HigherOrderOperator) or node.op == "call_module":
        return (), ()
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    by_position = POSITIONS.get(str(name), ())
    return (range(1, len(node.args)) if name == "to" else by_position), ("device",)


def _is_place(argument: Any) -> bool:
    """Does an operator's schema say that the argument is a device, by its type or its name?"""
    return "Device" in str(argument.type) or argument.name == "device"


def _only_overload(target: Any) -> Any:
    """What torch.ops.library.name means where there is one operator of that name; else `target`."""
    if not isinstance(target, torch._ops.OpOverloadPacket):
        return target
    names = target.overloads()  # type: ignore[no-untyped-call]
    return getattr(target, names[0]) if len(names) == 1 else target


def _hoist_device_call(node: fx.Node, devices: _Map, where: str) -> None:
    """torch.device("cuda", 0) in the graph itself, or torch.device(0)."""
    old: Any = node.args[0] if node.args else None
    if type(old) is int:
        new = devices.number(old, where)
    else:
        old = torch.device(*node.args, **node.kwargs)  # type: ignore[arg-type]
        new = devices.device(old, "literals", where)
    if new != old:
        node.args, node.kwargs = (str(new),), {}


def _name_of(node: fx.Node) -> str:
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))


def _is_cuda_call(node: fx.Node, devices: _Map) -> bool:
    name = _name_of(node)
    is_method = node.op == "call_method" or node.target is getattr(torch.Tensor, name, None)
    return is_method and name in {old.type for old in devices.to}


def _hoist_cuda_call(node: fx.Node, devices: _Map, where: str) -> None:
    """x.cuda(0), which has its device in its name."""
    name = _name_of(node)
    index = node.args[1] if len(node.args) > 1 else node.kwargs.get("device")
    old = torch.device(name, index) if isinstance(index, int) else None
    if old is None:
        old = torch.device(index or name)  # type: ignore[arg-type]
    new = devices.device(old, "literals", where)
    if new != old:
        rest = {key: value for key, value in node.kwargs.items() if key != "device"}
        node.op, node.target, node.args, node.kwargs = (
            "call_method",
            "to",
            (node.args[0], new),
            rest,
        )


def _hoist_current_device(node: fx.Node, devices: _Map, where: str) -> None:
    """torch.cuda.set_device(0), whose number belongs to the type it is a function of."""
    kind = str(getattr(node.target, "__module__", "")).removeprefix("torch.").partition(".")[0]
    kinds = {old.type for old in devices.to}
    if kind == "accelerator" and len(kinds - {*STAYING}) == 1:
        (kind,) = kinds - {*STAYING}
    value: Any = node.args[0] if node.args else None
    is_named = isinstance(value, str) and _is_device(value)
    if value is None and not node.kwargs.get("device"):
        _refuse_waiting(node, kind, devices, where)
    if kind not in kinds or not (type(value) is int or is_named):
        return
    old = torch.device(kind, value) if isinstance(value, int) else torch.device(value)
    new = devices.device(old, "literals", where)
    if new != old:
        if new.type != kind:
            raise _no_such_thing(node, kind, f"for {old}", new, where)
        node.args = (new.index if isinstance(value, int) else str(new), *node.args[1:])


def _refuse_waiting(node: fx.Node, kind: str, devices: _Map, where: str) -> None:
    """torch.cuda.synchronize() names no device, and raises where there is none of its type."""
    moved = {new for old, new in devices.to.items() if old.type == kind}
    if _name_of(node) == "synchronize" and moved and all(new.type != kind for new in moved):
        raise _no_such_thing(node, kind, "for the current device", next(iter(moved)), where)


def _no_such_thing(
    node: fx.Node, kind: str, whose: str, new: torch.device, where: str
) -> HoistError:
    return HoistError(
        f"{where} calls {kind}'s {getattr(node.target, '__name__', '')} {whose}, "
        f"which {new} has no such thing for; leave it out of the program."
    )


def _hoist_autocast(node: fx.Node, devices: _Map) -> None:
    """autocast("cuda"): a type and no device; it changes only if the type does."""
    name = getattr(node.target, "__name__", "")
    if name not in ("wrap_with_autocast", "_enter_autocast", "autocast"):
        return
    if node.args and isinstance(node.args[0], str):
        node.args = (devices.type(node.args[0]), *node.args[1:])
    elif isinstance(node.kwargs.get("device_type"), str):
        node.update_kwarg("device_type", devices.type(str(node.kwargs["device_type"])))


def _tell_of_strings(node: fx.Node, devices: _Map, where: str) -> None:
    """A string deep in the arguments of a function without schema may be a device, or may not.

    x.type("torch.cuda.FloatTensor") is one of these: it means the current device.
    """
    if hasattr(node.target, "_schema"):
        return
    for value in tree_leaves((node.args, node.kwargs)):
        if isinstance(value, str):
            devices.tell_of_string(value, where)


def check_devices(
    artifact: Any, *, inputs: tuple[Any, ...] | None = None, report: HoistReport | None = None
) -> None:
    """Raise HoistError unless every node computes where its metadata says, with no data moved.

    Needs what the graph was traced with, or `inputs`. Operators that this build of torch cannot
    propagate (for a device it was not built for) are listed in report.unchecked.
    """
    report = HoistReport() if report is None else report
    if isinstance(artifact, ExportedProgram):
        _check_state(artifact)
        artifact = artifact.graph_module
    for name, inner in artifact.named_modules():
        if name and isinstance(inner, fx.GraphModule):
            _check_graph(inner, None, report)
    _check_graph(artifact, inputs, report)


def _check_graph(
    artifact: fx.GraphModule, inputs: tuple[Any, ...] | None, report: HoistReport
) -> None:
    """One graph by itself; those of control flow are, as propagation does not enter them all."""
    fakes = [_noted(node) for node in artifact.graph.nodes if node.op == "placeholder"]
    known = [one for one in tree_leaves(fakes) if isinstance(one, FakeTensor)]
    mode = known[0].fake_mode if known else FakeTensorMode(allow_non_fake_inputs=True)
    if inputs is not None:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in inputs]
    elif any(fake is None for fake in fakes):
        report.unchecked.append("graph without metadata: pass inputs=")
        return
    allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode, torch.no_grad():
            _Checker(artifact, report).run(*fakes)
    finally:
        mode.allow_non_fake_inputs = allowed


def _noted(node: fx.Node) -> Any:
    """The value that was traced: torch.export keeps it under one name and Dynamo under another."""
    return node.meta.get("val", node.meta.get("example_value"))


class _Checker(fx.Interpreter):
    """Runs a graph on fake tensors, and compares each node's device with its metadata."""

    def __init__(self, module: fx.GraphModule, report: HoistReport):
        super().__init__(module)
        self.report = report

    def run_node(self, node: fx.Node) -> Any:
        expected = _noted(node)
        try:
            result = super().run_node(node)
        except Exception as error:
            if "device" in type(error).__name__.lower() or "device" in str(error).split("\n")[0]:
                raise HoistError(
                    f"node {node.name} mixes devices ({error}), so only a part of the program was "
                    "moved; do not use it, and report the operator."
                ) from error
            if expected is None:
                raise
            self.report.unchecked.append(node.name)
            return expected
        for found, wanted in zip(_tensors(result), _tensors(expected), strict=False):
            if found.device != wanted.device:
                raise HoistError(
                    f"node {node.name} computes on {found.device} and should on {wanted.device}, "
                    "so only a part of the program was moved; do not use it."
                )
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _check_state(program: ExportedProgram) -> None:
    """Parameters, buffers and constants are where the graph believes them to be."""
    values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    stored = {**program.constants, **program.state_dict}
    for spec in program.graph_signature.input_specs:
        tensor, value = stored.get(spec.target or ""), values.get(spec.arg.name)
        if (
            isinstance(tensor, torch.Tensor)
            and isinstance(value, torch.Tensor)
            and tensor.device != value.device
        ):
            raise HoistError(
                f"{spec.target} is on {tensor.device} and the graph expects it on "
                f"{value.device}, so only a part of the program was moved; do not use it."
            )


def hoist_package(
    path: str | Path, out: str | Path, mapping: Devices, *, strict: bool = False
) -> HoistReport:
    """Write a .pt2 file of torch.export.save with other devices, without loading it.

    So no rank touches the device that the file was made on. Only descriptions change: weights are
    stored as bytes. Example inputs are left out if loading would put them on a device that is
    mapped: they are a pickle. Compiled packages are refused: give aoti_load_package a device_index
    instead.
    """
    report = HoistReport()
    devices = _Map(mapping, "explicit", strict, report)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
        names = old.namelist()
        if any("/aotinductor/" in name for name in names):
            raise HoistError(
                f"{path} is compiled, and its code is for the device type it was compiled for; "
                "load it with torch._inductor.aoti_load_package(path, device_index=...)."
            )
        for name in names:
            data = old.read(name)
            if name.endswith(".json"):
                data = _hoist_json(name, data, devices)
            elif "/data/sample_inputs/" in name:
                data = _hoist_inputs(data, devices)
            new.writestr(old.getinfo(name), data)
    return report


def _hoist_inputs(data: bytes, devices: _Map) -> bytes:
    """Example inputs, if loading them would touch no device that moves; else none, as torch leaves
    them out: they are a pickle, which nothing here opens."""
    old = [str(one).encode() for one in devices.moving if one.type not in STAYING]
    if not any(one in data for one in old):
        return data
    devices.report.count("example_inputs")
    return b""


def _hoist_json(name: str, data: bytes, devices: _Map) -> bytes:
    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(item) for item in value]
        if isinstance(value, dict):
            if set(value) == {"type", "index"} and isinstance(value["type"], str):
                return _device_entry(value, name, devices)
            return {key: walk(item) for key, item in value.items()}
        return value

    return json.dumps(walk(json.loads(data))).encode()


def _device_entry(entry: dict[str, Any], where: str, devices: _Map) -> dict[str, Any]:
    old = torch.device(entry["type"]) if entry["index"] is None else None
    old = old or torch.device(entry["type"], entry["index"])
    new = devices.device(old, "literals", where)
    return entry if new == old else {"type": new.type, "index": new.index}


def assert_device(device: str | torch.device) -> Callable[[Any], Any]:
    """A check: assert_device("cuda:3")(values) returns values if all tensors are there."""
    wanted = _device(device)
    if wanted.type not in STAYING and wanted == torch.device(wanted.type):
        raise HoistError(
            f"{device} is any of several devices, so a tensor on another rank's would pass; say "
            f"which one: assert_device(f'{wanted.type}:{{coor.local_rank}}')."
        )

    def check(values: Any) -> Any:
        for number, tensor in enumerate(_tensors(values)):
            if tensor.device != wanted:
                raise HoistError(
                    f"tensor {number} of shape {tuple(tensor.shape)} is on {tensor.device}, and "
                    f"this rank computes on {wanted}; the first such tensor of the step."
                )
        return values

    return check
