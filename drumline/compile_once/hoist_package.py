"""Hoisting of a .pt2 file of torch.export.save without loading it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import torch

from drumline.compile_once.device_mapping import (
    FIXED_TYPES,
    DeviceMapping,
    DevicePairs,
    HoistError,
    HoistReport,
)


def hoist_package(
    path: str | Path, out: str | Path, mapping: DevicePairs, *, strict: bool = False
) -> HoistReport:
    """Write a .pt2 file of torch.export.save with other devices; return the report.

    No rank uses the device that the file was made on. Only descriptions change: weights are stored
    as bytes. Example inputs, which are a pickle, are dropped if loading would put them on a mapped
    device. Compiled packages are refused: give aoti_load_package a device_index instead.
    """
    report = HoistReport()
    devices = DeviceMapping(mapping, "explicit", strict, report)
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


def _hoist_inputs(data: bytes, devices: DeviceMapping) -> bytes:
    """The example inputs, or nothing if they name a device that moves: a pickle is never opened."""
    names = [str(old).encode() for old in devices.moving if old.type not in FIXED_TYPES]
    if not any(name in data for name in names):
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
            return {key: walk(item) for key, item in value.items()}
        return value

    return json.dumps(walk(json.loads(data))).encode()


def _device_entry(entry: dict[str, Any], where: str, devices: DeviceMapping) -> dict[str, Any]:
    old = torch.device(entry["type"]) if entry["index"] is None else None
    old = old or torch.device(entry["type"], entry["index"])
    new = devices.device(old, "literals", where)
    return entry if new == old else {"type": new.type, "index": new.index}
