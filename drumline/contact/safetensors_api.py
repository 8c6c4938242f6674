"""All that drumline takes from the package safetensors; its files are read without it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load, save, save_file


def open_tensors(files: Mapping[str, Path], maps: bool) -> dict[str, Any]:
    """By name, what reads a tensor of the CPU when it is indexed. files: that of each.

    maps: it may then be pages of the file.
    """
    backend = "mmap" if maps else "pread"
    opened: dict[Path, Any] = {
        file: safe_open(file, framework="pt", backend=backend) for file in {*files.values()}
    }
    return {name: opened[file].get_slice(name) for name, file in files.items()}


def to_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Contiguous tensors with their names, dtypes and shapes."""
    data: bytes = save(dict(tensors))
    return data


def from_bytes(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors of to_bytes, in new memory, on the CPU."""
    tensors: dict[str, torch.Tensor] = load(data)
    return tensors


def write_file(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write contiguous tensors of the CPU into a file."""
    save_file(dict(tensors), path)
