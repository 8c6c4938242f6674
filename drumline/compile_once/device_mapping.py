"""The mapping of a hoist: devices, tensors and containers of them, moved to other devices."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from coordinator import torch_private
from drumline.errors import DrumlineError

DevicePairs = Mapping[str, str] | Mapping[torch.device, torch.device]


FIXED_TYPES = ("cpu", "meta")
"""Device types that a program names on purpose; they move only if the mapping names them."""


class HoistError(DrumlineError, ValueError):
    """The program would not run on the device it was moved to; it must not be used."""


class UnmappedDevice(HoistError):
    """The program names a device that the mapping does not, and strict=True was asked for."""


@dataclass
class HoistReport:
    """Result of a hoist: changes by kind, unmapped devices by place, nodes not checked."""

    changed: dict[str, int] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    unchecked: list[str] = field(default_factory=list)

    def count(self, kind: str) -> None:
        self.changed[kind] = self.changed.get(kind, 0) + 1


class DeviceMapping:
    """A mapping of devices applied to devices, tensors and containers; counts into the report."""

    def __init__(self, mapping: DevicePairs, indexless: str, strict: bool, report: HoistReport):
        self.to = {normalize_device(old): normalize_device(new) for old, new in mapping.items()}
        if indexless not in ("explicit", "keep"):
            raise HoistError(f'indexless={indexless!r} is neither "explicit" nor "keep"')
        self.explicit, self.strict, self.report = indexless == "explicit", strict, report
        self.memo: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.moved: dict[Any, torch.Tensor] = {}
        self.first: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}  # over each memory
        self.inside: set[int] = set()

    def device(self, device: torch.device, kind: str, where: str) -> torch.device:
        new = self._find(device)
        if new is None:
            if device.type not in FIXED_TYPES and device not in self.to.values():
                self.keep(device, where)
            return device
        if new != device:
            self.report.count(kind)
        return new

    def _find(self, device: torch.device) -> torch.device | None:
        if device in self.to:
            return self.to[device]
        index: int | None = device.index
        if index is None and self.explicit and device.type not in FIXED_TYPES:
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

    def note_string(self, text: str, where: str) -> None:
        """Report a string that may name a device that moves; no schema tells."""
        head, _, rest = text.partition(".")
        if is_device_name(text) and normalize_device(text) in self.moving:
            self.keep(normalize_device(text), where)
        elif head == "torch" and rest.partition(".")[0] in {old.type for old in self.moving}:
            self.keep(torch.device(rest.partition(".")[0]), where)

    @property
    def moving(self) -> set[torch.device]:
        """The devices that the hoisted program may not use any longer."""
        return self.to.keys() - self.to.values()

    def number(self, index: int, where: str) -> Any:
        """The device of a bare number, if the mapping has one type only."""
        kinds = {old.type for old in self.to} - {*FIXED_TYPES}
        if len(kinds) != 1:
            return index
        old = torch.device(kinds.pop(), index)
        new = self.device(old, "literals", where)
        return index if new == old else new

    def type(self, name: str) -> str:
        """The mapped device type, for calls that take a type, such as autocast."""
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
        """Move a tensor; two that share memory share memory afterwards."""
        if isinstance(torch_private.unwrapped(tensor), torch_private.FakeTensor):
            return _fake_like(tensor, device)
        data = self._data(tensor, device)
        if isinstance(tensor, torch.nn.Parameter):
            new: torch.Tensor = torch.nn.Parameter(data, requires_grad=tensor.requires_grad)
        else:
            new = data.requires_grad_(tensor.requires_grad)
        self.first.setdefault(tensor.untyped_storage(), (tensor, new))
        return new

    def _data(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor's values on a device; its memory moves as a whole for the second tensor."""
        memory = tensor.untyped_storage()
        first, new = self.first.get(memory, (tensor, tensor))
        if first is tensor or not (_is_plain(first) and _is_plain(tensor)):
            place = tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()
            key = memory, *place, tensor.is_conj(), tensor.is_neg()
            if key not in self.moved:
                self.moved[key] = tensor.detach().to(device)
            return self.moved[key].detach()
        if memory not in self.moved:
            whole = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
            self.moved[memory] = whole.to(device)
            new.data = _view_like(first, self.moved[memory])
        return _view_like(tensor, self.moved[memory])

    def value(self, value: Any, kind: str, where: str) -> Any:
        """Move the tensors and devices in nested containers; leave everything else."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value, kind, where)
        if isinstance(value, torch.device):
            return self.device(value, kind, where)
        if isinstance(value, str):
            self.note_string(value, where)
        if isinstance(value, (list, tuple, set, frozenset)):
            new = [self.value(item, kind, where) for item in value]
            if all(item is old for item, old in zip(new, value, strict=True)):
                return value
            return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
        if isinstance(value, dict):
            moved = {key: self.value(item, kind, where) for key, item in value.items()}
            changed = {key: item for key, item in moved.items() if item is not value[key]}
            new_dict = copy.copy(value) if changed else value
            new_dict.update(changed)
            return new_dict
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._fields(value, kind, where)
        return value

    def _fields(self, value: Any, kind: str, where: str) -> Any:
        """Move the fields of a dataclass, unless it is inside itself."""
        if id(value) in self.inside:
            return value
        self.inside.add(id(value))
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        old = {name: getattr(value, name) for name in names}
        moved = {key: self.value(item, kind, where) for key, item in old.items()}
        self.inside.remove(id(value))
        changed = {key: item for key, item in moved.items() if item is not old[key]}
        new = copy.copy(value) if changed else value
        for key, item in changed.items():
            object.__setattr__(new, key, item)  # whether or not it is frozen
        return new


def normalize_device(device: str | torch.device) -> torch.device:
    """The device as tensors report it: there is one CPU, and it has no number."""
    device = torch.device(device)
    return torch.device("cpu") if device.type == "cpu" else device


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if the tensor is its place in its memory, and nothing else."""
    is_other = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not is_other


def _view_like(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """A tensor over the same place in another memory."""
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    view = torch.empty(0, dtype=tensor.dtype, device=whole.device)
    return view.set_(whole.untyped_storage(), *place)


def _fake_like(fake: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor like this one on a device; moving would initialize the device."""
    inner = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device="meta")
    mode = torch_private.unwrapped(fake).fake_mode  # type: ignore[attr-defined]
    moved = torch_private.FakeTensor(mode, inner, device)
    if isinstance(fake, torch.nn.Parameter):
        return torch.nn.Parameter(moved, requires_grad=fake.requires_grad)
    return moved


def is_device_name(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True
