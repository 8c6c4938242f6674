"""Hoisting of a traced or exported program from the device it was made on to this rank's own.

program = torch.export.load("model.pt2")                 # made for cuda:0
hoist(program, {"cuda:0": f"cuda:{coor.local_rank}"})    # nothing in it names cuda:0 any longer
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.node import map_aggregate

from coordinator import torch_private
from drumline.compile_once import device_mapping
from drumline.compile_once.device_check import check_devices
from drumline.compile_once.device_mapping import DeviceMapping, HoistError

IS_ENCRYPTED = 1
"""Of the flags of a file in an archive (APPNOTE.TXT of PKWARE, 4.4.4)."""
MAX_DEVICES = 128
"""torch holds the number of a device in 8 bits, with a sign."""
DEVICE_POSITIONS = {"set_default_device": (0,), "Generator": (0,)}
"""Positions of the device in Python functions that have no schema, beside `device=`."""


def hoist(
    artifact: Any,
    mapping: device_mapping.DevicePairs,
    *,
    strict: bool = False,
    indexless: str = "explicit",
    inputs: tuple[Any, ...] | None = None,
    report: device_mapping.HoistReport | None = None,
) -> Any:
    """Change a GraphModule or ExportedProgram in place to use other devices; return it.

    mapping: applied at once, so that {"cuda:0": "cuda:1", "cuda:1": "cuda:0"} swaps. cpu and meta
        stay unless named. Another explicit device stays and is reported; with strict it raises.
    indexless: treatment of "cuda" without a number: "explicit" takes the only device mapped to;
        "keep" leaves it to mean the current device.
    inputs: examples for a graph that was traced without any, so that it can be checked.

    Tensors that were shared stay shared. Raises HoistError if, propagated with fake tensors, any
    node is not on the device it should be on.
    """
    report = device_mapping.HoistReport() if report is None else report
    devices = DeviceMapping(mapping, indexless, strict, report)
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


def _hoist_program(program: ExportedProgram, devices: DeviceMapping) -> None:
    _hoist_module(program.graph_module, devices)
    for kind, table in (("state_dict", program.state_dict), ("constants", program.constants)):
        for key, value in table.items():
            table[key] = devices.value(value, kind, key)
    program.example_inputs = torch_private.tree_map(
        lambda leaf: devices.value(leaf, "example_inputs", "example_inputs"), program.example_inputs
    )
    program.validate()  # type: ignore[no-untyped-call]


def _hoist_module(root: fx.GraphModule, devices: DeviceMapping) -> None:
    for prefix, module in root.named_modules():
        _hoist_attributes(prefix, module, devices)
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                _hoist_node(node, devices)
            module.recompile()


def _hoist_attributes(prefix: str, module: torch.nn.Module, devices: DeviceMapping) -> None:
    tables = torch_private.own_tables(module)
    for kind, table in zip(("parameters", "buffers"), tables, strict=True):
        for name, tensor in table.items():
            if tensor is not None:
                table[name] = devices.tensor(tensor, kind, f"{prefix}.{name}")
    common = vars(torch.nn.Module())  # what every module has, its tables among them
    for name, value in vars(module).items():
        is_graph = isinstance(value, fx.Graph)
        if name not in common and not is_graph and not name.startswith("__"):
            module.__dict__[name] = devices.value(value, "attributes", f"{prefix}.{name}")


def _hoist_node(node: fx.Node, devices: DeviceMapping) -> None:
    where = f"node {node.name}"
    by_position, by_name = _device_arguments(node)

    def literal(value: Any) -> Any:
        if isinstance(value, torch.device):
            return devices.device(value, "literals", where)
        return value

    def text(value: Any, kind: str) -> Any:
        if isinstance(value, str) and device_mapping.is_device_name(value):
            return str(devices.device(torch.device(value), kind, where))
        if type(value) is int:  # x.to(0): a number alone is an accelerator's
            return devices.number(value, where)
        return value

    if node.target is torch.device:
        _hoist_device_call(node, devices, where)
    elif _is_device_method(node, devices):
        _hoist_device_method(node, devices, where)
    else:
        args = list(node.args)
        for position in by_position:
            if position < len(args):
                args[position] = text(args[position], "strings")
        kwargs = {k: text(v, "strings") if k in by_name else v for k, v in node.kwargs.items()}
        node.args, node.kwargs = map_aggregate(tuple(args), literal), map_aggregate(kwargs, literal)
    _hoist_current_device(node, devices, where)
    _hoist_autocast(node, devices)
    _note_strings(node, devices, where)
    _hoist_metadata(node, devices, where)


def _hoist_metadata(node: fx.Node, devices: DeviceMapping, where: str) -> None:
    """Move the traced values of a node, and everything that a user added to its metadata."""

    def moved(value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor)
        return devices.tensor(value, "metadata", where) if is_tensor else value

    for key, value in node.meta.items():
        if key in ("val", "example_value"):
            node.meta[key] = torch_private.tree_map(moved, value)
        else:
            node.meta[key] = devices.value(value, "metadata", where)


def _device_arguments(node: fx.Node) -> tuple[Iterable[int], Iterable[str]]:
    """The arguments of a call that are devices, by position and name: a string there names one.

    An operator's schema tells them. Of a function or method of Python, `device=` is one by name,
    and for `.to` every position is tried. Strings anywhere else are not looked at.
    """
    operator = _only_overload(node.target)
    if isinstance(operator, torch_private.OpOverload):
        arguments = torch_private.schema_of(operator).arguments
        positions = [
            n for n, a in enumerate(arguments) if a.name == "device" or "Device" in str(a.type)
        ]
        return positions, [arguments[n].name for n in positions]
    if isinstance(node.target, torch_private.HigherOrderOperator) or node.op == "call_module":
        return (), ()
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    by_position = DEVICE_POSITIONS.get(str(name), ())
    return (range(1, len(node.args)) if name == "to" else by_position), ("device",)


def _only_overload(target: Any) -> Any:
    """The operator of a packet that has only one overload; else `target`."""
    if not isinstance(target, torch_private.OpOverloadPacket):
        return target
    names = target.overloads()  # type: ignore[no-untyped-call]
    return getattr(target, names[0]) if len(names) == 1 else target


def _hoist_device_call(node: fx.Node, devices: DeviceMapping, where: str) -> None:
    """Hoist torch.device("cuda", 0) in the graph itself, or torch.device(0)."""
    old: Any = node.args[0] if node.args else None
    if type(old) is int:
        new = devices.number(old, where)
    else:
        old = torch.device(*node.args, **node.kwargs)  # type: ignore[arg-type]
        new = devices.device(old, "literals", where)
    if new != old:
        node.args, node.kwargs = (str(new),), {}


def _call_name(node: fx.Node) -> str:
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))


def _is_device_method(node: fx.Node, devices: DeviceMapping) -> bool:
    name = _call_name(node)
    is_method = node.op == "call_method" or node.target is getattr(torch.Tensor, name, None)
    return is_method and name in {old.type for old in devices.to}


def _hoist_device_method(node: fx.Node, devices: DeviceMapping, where: str) -> None:
    """Hoist x.cuda(0), which has its device type in its name."""
    name = _call_name(node)
    index = node.args[1] if len(node.args) > 1 else node.kwargs.get("device")
    is_number = isinstance(index, int)
    old = torch.device(name, index) if is_number else torch.device(index or name)  # type: ignore[arg-type]
    new = devices.device(old, "literals", where)
    if new != old:
        rest = {key: value for key, value in node.kwargs.items() if key != "device"}
        node.op, node.target = "call_method", "to"
        node.args, node.kwargs = (node.args[0], new), rest


def _hoist_current_device(node: fx.Node, devices: DeviceMapping, where: str) -> None:
    """Hoist torch.cuda.set_device(0), whose number belongs to the type in its module."""
    kind = str(getattr(node.target, "__module__", "")).removeprefix("torch.").partition(".")[0]
    kinds = {old.type for old in devices.to}
    if kind == "accelerator" and len(kinds - {*device_mapping.FIXED_TYPES}) == 1:
        (kind,) = kinds - {*device_mapping.FIXED_TYPES}
    value: Any = node.args[0] if node.args else None
    is_named = isinstance(value, str) and device_mapping.is_device_name(value)
    if value is None and not node.kwargs.get("device"):
        _check_synchronize(node, kind, devices, where)
    if kind not in kinds or not (type(value) is int or is_named):
        return
    old = torch.device(kind, value) if isinstance(value, int) else torch.device(value)
    new = devices.device(old, "literals", where)
    if new != old:
        if new.type != kind:
            raise _unsupported_call(node, kind, f"for {old}", new, where)
        node.args = (new.index if isinstance(value, int) else str(new), *node.args[1:])


def _check_synchronize(node: fx.Node, kind: str, devices: DeviceMapping, where: str) -> None:
    """Raise for torch.cuda.synchronize(), which names no device, if none of its type is left."""
    moved = {new for old, new in devices.to.items() if old.type == kind}
    if _call_name(node) == "synchronize" and moved and all(new.type != kind for new in moved):
        raise _unsupported_call(node, kind, "for the current device", next(iter(moved)), where)


def _unsupported_call(
    node: fx.Node, kind: str, whose: str, new: torch.device, where: str
) -> HoistError:
    return HoistError(
        f"{where} calls {kind}'s {getattr(node.target, '__name__', '')} {whose}, "
        f"which does not exist for {new}; leave it out of the program."
    )


def _hoist_autocast(node: fx.Node, devices: DeviceMapping) -> None:
    """Hoist autocast("cuda"), which takes a type: it changes only if the type does."""
    name = getattr(node.target, "__name__", "")
    if name not in torch_private.autocast_functions:
        return
    if node.args and isinstance(node.args[0], str):
        node.args = (devices.type(node.args[0]), *node.args[1:])
    elif isinstance(node.kwargs.get("device_type"), str):
        node.update_kwarg("device_type", devices.type(str(node.kwargs["device_type"])))


def _note_strings(node: fx.Node, devices: DeviceMapping, where: str) -> None:
    """Report strings deep in the arguments of a function without schema, which may name devices.

    Such as x.type("torch.cuda.FloatTensor"), which means the current device.
    """
    if torch_private.schema_of(node.target) is not None:
        return
    for value in torch_private.tree_leaves((node.args, node.kwargs)):
        if isinstance(value, str):
            devices.note_string(value, where)


def hoist_package(
    path: str | Path, out: str | Path, mapping: device_mapping.DevicePairs, *, strict: bool = False
) -> device_mapping.HoistReport:
    """Write a .pt2 file of torch.export.save with other devices; return the report.

    No rank uses the device that the file was made on. Only descriptions change: weights are stored
    as bytes. Example inputs, which are a pickle, are dropped if loading would put them on a mapped
    device. Compiled packages are refused: give aoti_load_package a device_index instead.
    """
    report = device_mapping.HoistReport()
    devices = DeviceMapping(mapping, "explicit", strict, report)
    try:
        with zipfile.ZipFile(path) as old:
            _check_package(path, old.infolist())
            _write_package(old, Path(out), devices)
    except (OSError, EOFError, UnicodeDecodeError, zipfile.BadZipFile) as error:
        raise HoistError(
            f"{path} cannot be moved to {out} ({error}), so {out} is as it was; give a file that "
            "torch.export.save has written, and a place for the other one."
        ) from error
    return report


def _check_package(path: str | Path, entries: Sequence[zipfile.ZipInfo]) -> None:
    """Raise HoistError unless torch.export.save may have written an archive of these files.

    It stores them as they are, so none is larger than the archive; one compressed may be any size.
    """
    names = [entry.filename for entry in entries]
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & IS_ENCRYPTED:
            raise HoistError(
                f"{path}: {entry.filename:.99} is compressed or encrypted, which torch.export.save "
                "never does; save the program again."
            )
    if len({*names}) < len(names):
        raise HoistError(f"{path} has a file twice; save the program again.")
    if any("/aotinductor/" in name for name in names):
        raise HoistError(
            f"{path} is compiled, and its code is for the device type it was compiled for; "
            "load it with torch._inductor.aoti_load_package(path, device_index=...)."
        )


def _write_package(old: zipfile.ZipFile, out: Path, devices: DeviceMapping) -> None:
    """Write the files of an archive with other devices; `out` stays as it was where that fails."""
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        file = Path(folder, out.name)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as new:
            for entry in old.infolist():
                data = old.read(entry)
                is_extra = entry.filename.partition("/")[2].startswith("extra/")  # of the user
                if entry.filename.endswith(".json") and not is_extra:
                    data = _hoist_json(f"{old.filename}, {entry.filename}", data, devices)
                elif "/data/sample_inputs/" in entry.filename and not is_extra:
                    data = _hoist_inputs(data, devices)
                new.writestr(entry, data)
        file.replace(out)


def _hoist_inputs(data: bytes, devices: DeviceMapping) -> bytes:
    """The example inputs, or nothing if they name a device that moves: a pickle is never opened."""
    if not any(old != new and str(old).encode() in data for old, new in devices.to.items()):
        return data
    devices.report.count("example_inputs")
    return b""


def _hoist_json(name: str, data: bytes, devices: DeviceMapping) -> bytes:
    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(item) for item in value]
        if isinstance(value, dict):
            if set(value) == {"type", "index"} and isinstance(value["type"], str):
                return _device_entry(value, name, devices)
            new = {key: walk(item) for key, item in value.items()}
            if str(value.get("target")).rpartition(".")[2] in torch_private.autocast_functions:
                first = new["inputs"][0]["arg"]
                first["as_string"] = devices.type(first["as_string"])
            if value.get("use_pickle") and new != value:
                raise HoistError(
                    f"{name} has a tensor of another class than torch.Tensor, whose device is in a "
                    "pickle; load it on a machine with that device, hoist() it, and save it again."
                )
            return new
        return value

    try:
        return json.dumps(walk(json.loads(data))).encode()
    except HoistError:
        raise
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise HoistError(
            f"{name} is not a JSON of torch.export.save ({error}), so its devices are unknown; "
            "save the program again."
        ) from error


def _device_entry(entry: dict[str, Any], where: str, devices: DeviceMapping) -> dict[str, Any]:
    kind, index = entry["type"], entry["index"]
    is_index = index is None or (type(index) is int and 0 <= index < MAX_DEVICES)
    if not is_index or ":" in kind or not device_mapping.is_device_name(kind):
        raise HoistError(
            f"{where} has the device {entry!s:.99}, which torch does not have; save the program "
            "again."
        )
    old = torch.device(kind) if index is None else torch.device(kind, index)
    new = devices.device(old, "literals", where)
    return entry if new == old else {"type": new.type, "index": new.index}
