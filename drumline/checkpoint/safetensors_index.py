"""The index of a checkpoint's .safetensors files, and the bytes of any box of a tensor.

The format (https://huggingface.co/docs/safetensors): eight bytes of length, that much JSON, data.
Boxes are read with pread into memory that is there already, so that not a byte too much is read, or
are views of the mapped file, which take no memory of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import mmap
import operator
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import torch

from communicator import DTYPES
from drumline.checkpoint.headers.file_bounds import SAFETENSORS, FieldError
from drumline.checkpoint.json_files import (
    ADAPTER_FILE,
    check_regular_file,
    distinct_fields,
    json_object,
    read_json,
)
from drumline.core.shards import Region
from drumline.errors import CheckpointError
from launcher import linux

log = logging.getLogger("drumline")

TORCH_DTYPES = {info.safetensors: info.torch for info in DTYPES if info.safetensors}
SIZE = SAFETENSORS["size"]
GIT_LFS_POINTER = int.from_bytes(b"version ", "little")  # what such a file begins with
CHOSEN_FIRST = ("model.safetensors", "model.safetensors.index.json")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
LOCAL_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "overlay")
"""Those whose files are mapped: elsewhere a page that cannot be had ends the process."""
MAP_NORESERVE = 0x4000
"""As in mmap(2); Python has it from 3.13 on."""


class FileState(NamedTuple):
    """A file as it is now; another one, if somebody writes to it or puts another in its place."""

    inode: int
    nbytes: int
    mtime_ns: int


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: which file, where in it, and what it is.

    written: the state of the file when its header was read, where that was on this rank.
    """

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    written: FileState | None = field(default=None, compare=False)

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class ComputedTensor(StoredTensor):
    """A tensor that is computed from stored ones, box by box, by whoever reads it."""

    @property
    def parts(self) -> Sequence[StoredTensor]:
        """The stored tensors that suffice to compute it, where it may be kept as these."""
        return ()

    def compute(self, reader: TensorReader, region: Region, out: torch.Tensor) -> None:
        """Fill `out` with a box of it."""
        raise NotImplementedError

    @property
    def is_native(self) -> bool:
        """True if numbers are made by loops in C++ on the CPU, as many at a time as are wanted."""
        return False

    def multiply(
        self, reader: TensorReader, inputs: torch.Tensor, entry: int | None
    ) -> torch.Tensor:
        """inputs @ tensor.T, or with one entry of a stack; of native ones alone.

        inputs: [n, columns] float32, n at most 8; so is the product.
        """
        raise NotImplementedError


Index = Mapping[str, StoredTensor]


def read_index(path: str | Path, warns: bool = False) -> dict[str, StoredTensor]:
    """Every tensor of a folder of .safetensors files (or of one file), by name.

    Of several checkpoints in a folder, that which transformers takes. Of tensors that its listing
    does not name, or names in another file, nothing is read.

    warns: log how many these are.
    """
    folder = Path(path)
    chosen = _chosen_file(folder) if os.path.isdir(folder) else None
    listed: dict[str, str] = {}
    names = [] if chosen is None else [chosen.name]
    if chosen is not None and chosen.suffix == ".json":
        listed = _listing(chosen)
        names = sorted(set(listed.values()))
    names = names or [file.name for file in _files(folder)]
    pairs = [pair for name in names for pair in _header(folder, name)]
    if not listed:
        if len(names) > 1:
            _check_distinct(folder, pairs)
        return dict(pairs)
    index = {name: stored for name, stored in pairs if listed.get(name) == stored.file}
    other = [f"{name} in {s.file}" for name, s in pairs if listed.get(name) != s.file]
    if warns and other:
        text = "%s: %d tensors are ignored, as the index does not place them where they are: %s"
        log.warning(text, folder, len(other), ", ".join(other[:5]))
    absent = listed.keys() - index.keys()
    if absent:
        where = ", ".join(f"{name} in {listed[name]}" for name in sorted(absent)[:5])
        raise CheckpointError(
            f"{folder}: {len(absent)} tensors are missing from the files that the index says they "
            f"are in ({where}), so the model would be incomplete; copy the checkpoint again."
        )
    return index


def _chosen_file(folder: Path) -> Path | None:
    """The file of weights, or the listing of several, which transformers takes; None for all."""
    config = folder / "config.json"
    named: Any = read_json(config).get("transformers_weights") if config.is_file() else None
    if named is not None:
        file = folder / str(named)
        if not _is_inside(named) or "/" in named or not file.exists():
            raise CheckpointError(
                f"{config} has transformers_weights={named!r:.99}, which is not a file beside it, "
                "so it is unknown where the weights are; copy the checkpoint again."
            )
        return file
    return next((folder / name for name in CHOSEN_FIRST if (folder / name).exists()), None)


def _check_distinct(folder: Path, pairs: Sequence[tuple[str, StoredTensor]]) -> None:
    """Raise CheckpointError if a tensor is in several files, of which no listing names one."""
    files: dict[str, str] = {}
    for name, stored in pairs:
        if files.setdefault(name, stored.file) != stored.file:
            raise CheckpointError(
                f"{folder}: {name} is in {files[name]} and in {stored.file}, so it is unknown "
                "which of them is meant; leave the files of one checkpoint there."
            )


def _listing(listing: Path) -> dict[str, str]:
    """The file of each tensor as the index of a sharded checkpoint has it."""
    files: Any = read_json(listing).get("weight_map")
    is_map = isinstance(files, dict) and {*map(type, files.values())} <= {str}
    names = {*files.values()} if is_map else {""}
    if not all(map(_is_inside, names)):
        raise CheckpointError(
            f"{listing} has no weight_map from names of tensors to names of files in its folder, "
            "so the files are unknown; copy it again."
        )
    try:
        SAFETENSORS["number of files"].check(len(names), "weight_map")
    except FieldError as error:
        raise CheckpointError(f"{listing}: {error}; copy it again.") from error
    return dict(files)


def _is_inside(name: Any) -> bool:
    """True for the name of a file in a folder, or in one within, which leads to no other place."""
    return isinstance(name, str) and {*name.split("/")}.isdisjoint(("", ".", ".."))


def _files(folder: Path) -> list[Path]:
    """All the files that are there."""
    if os.path.isfile(folder):
        if folder.suffix in PICKLES:
            raise CheckpointError(
                f"{folder} is a pickle, which would run whatever code is in it; save the weights "
                "as .safetensors where you trust it: safetensors.torch.save_file(torch.load(path), "
                "...)."
            )
        return [folder]
    entries = folder.glob("*.safetensors") if os.path.isdir(folder) else ()
    files = sorted(file for file in entries if file.name != ADAPTER_FILE)
    if not files:
        raise CheckpointError(
            f"{folder} holds no .safetensors file, so there is nothing to load; check the path."
        )
    return files


def _header(path: Path, file_name: str) -> Iterator[tuple[str, StoredTensor]]:
    file = path_of(path, file_name)
    try:
        check_regular_file(file)
        with file.open("rb") as stream:
            written = file_state(stream.fileno())
            size = written.nbytes
            (length,) = struct.unpack("<Q", stream.read(8))
            if length == GIT_LFS_POINTER:
                raise ValueError("a pointer of git-lfs stands in its place: `git lfs pull`")
            SAFETENSORS["header length"].check(length, most=size - 8)
            header = json_object(stream.read(length), SAFETENSORS["number of values"], _entry)
        notes = header.pop("__metadata__", {})
        if not isinstance(notes, dict) or not all(isinstance(v, str) for v in notes.values()):
            raise ValueError(f"__metadata__ is {notes!r:.99} and not texts by name")
        last = 0
        for begin, end, name, dtype, shape in sorted(starmap(_checked, header.items())):
            if begin != last:
                raise ValueError(f"{name} does not begin where the one before it ends")
            last = end
            stored = StoredTensor(file_name, 8 + length + begin, dtype, shape, written)
            if end - begin != stored.nbytes or 8 + length + end > size:
                raise ValueError(f"{name} does not fit into the file of {size} bytes")
            yield name, stored
        if 8 + length + last != size:
            raise ValueError(f"{size - 8 - length - last} bytes follow its last tensor")
    except (OSError, FieldError, ValueError, RecursionError, struct.error) as error:
        raise CheckpointError(
            f"{file} is not a whole .safetensors file ({error}), so what it holds is unknown; "
            "copy it again."
        ) from error


def file_state(file: int | Path) -> FileState:
    status = os.stat(file)
    return FileState(status.st_ino, status.st_size, status.st_mtime_ns)


def is_local(file: int | Path) -> bool:
    return linux.file_system(os.stat(file).st_dev)[0] in LOCAL_FILE_SYSTEMS


def written_files(path: Path, index: Index) -> dict[Path, FileState]:
    """The files as they were when their headers were read here."""
    written = {stored.file: stored.written for stored in index.values() if stored.written}
    return {path_of(path, name): state for name, state in written.items()}


def check_unchanged(path: Path, index: Index) -> None:
    """Raise CheckpointError if a file is not as it was when its header was read here.

    For files that a library reads by itself, from its own look at their headers.
    """
    for file, state in written_files(path, index).items():
        if not file.exists() or file_state(file) != state:
            raise _changed(file)


def _changed(file: Path) -> CheckpointError:
    return CheckpointError(
        f"{file} changed while it was read, so the model would be a mixture; load it again once "
        "nobody writes to it."
    )


def _entry(pairs: list[tuple[str, Any]]) -> Any:
    """One tensor of a header, and whatever else is an object there.

    A tuple of tuples costs the garbage collector nothing; it would go over each list, many times.
    """
    fields = distinct_fields(pairs)
    offsets, shape, dtype = map(fields.get, ("data_offsets", "shape", "dtype"))
    if isinstance(offsets, list) and isinstance(shape, list):
        return tuple(offsets), tuple(shape), dtype
    return fields


def _checked(name: str, entry: Any) -> tuple[int, int, str, str, tuple[int, ...]]:
    """Begin, end, name, dtype and shape of one tensor of a header."""
    if not isinstance(entry, tuple):
        raise ValueError(f"{name} is {entry!r:.99} and not a tensor, with lists of sizes")
    offsets, shape, dtype = entry
    if not all(map(SIZE.holds, offsets + shape)):
        for number in offsets + shape:
            SIZE.check(number, f"{name}, in data_offsets or shape,")
    SAFETENSORS["dimensions"].check(len(shape), name)
    begin, end = offsets if len(offsets) == 2 else (1, 0)
    if begin > end:
        raise ValueError(f"{name} has data_offsets={offsets!r:.99}, not a begin and an end")
    if not isinstance(dtype, str) or dtype not in TORCH_DTYPES:
        raise ValueError(f"{name} is of dtype {dtype!r:.99}, which torch does not have")
    if dtype == "F4":  # two of them are one element for torch
        if not shape or shape[-1] % 2:
            raise ValueError(f"{name} has the shape {shape}, and F4 comes in pairs")
        shape = (*shape[:-1], shape[-1] // 2)
    return begin, end, name, dtype, shape


def index_to_json(index: Index) -> bytes:
    return json.dumps({k: (s.file, s.offset, s.dtype, s.shape) for k, s in index.items()}).encode()


def index_from_json(data: bytes) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(file, offset, dtype, tuple(shape))
        for name, (file, offset, dtype, shape) in json.loads(data).items()
    }


class TensorReader:
    """Reads boxes of stored tensors; counts every byte. Use in a `with` block."""

    def __init__(self, path: str | Path):
        self.path, self.nbytes = Path(path), 0
        self.computed: dict[str, torch.Tensor] = {}  # the last one, for tensors that keep theirs
        self._open: dict[str, int] = {}
        self._written: dict[str, FileState] = {}  # by file, when its header was read
        self._maps: dict[str, mmap.mmap | None] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        changed = [n for n, fd in self._open.items() if file_state(fd) != self._written[n]]
        while self._open:
            os.close(self._open.popitem()[1])
        if changed and kind is None:
            raise _changed(self._path_of(changed[0]))

    def read(self, stored: StoredTensor, region: Region, out: torch.Tensor) -> None:
        """Fill `out` (contiguous, on the CPU, of the stored dtype) with a box of the tensor."""
        assert out.is_contiguous() and out.dtype == stored.torch_dtype, (out.dtype, stored)
        if isinstance(stored, ComputedTensor):
            stored.compute(self, region, out)
            return
        buffer = memoryview(out.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        item = stored.torch_dtype.itemsize
        filled = 0
        for start, count in _runs(stored.shape, region):
            end = filled + count * item
            self._fill(stored, buffer[filled:end], stored.offset + start * item)
            filled = end

    def box(self, stored: StoredTensor, region: Region) -> torch.Tensor:
        """A box of the tensor, in memory of its own."""
        out = torch.empty(region.size, dtype=stored.torch_dtype)
        self.read(stored, region, out)
        return out

    def map(self, stored: StoredTensor, region: Region) -> torch.Tensor | None:
        """A box of the tensor as a view of its file; None if it has to be read.

        It keeps the file mapped. A page that is written to becomes a copy, and the file stays.
        """
        itemsize = stored.torch_dtype.itemsize
        runs = list(itertools.islice(_runs(stored.shape, region), 2))
        is_one = len(runs) == 1 and runs[0][1] > 0 and stored.offset % itemsize == 0
        memory = self._map(stored) if is_one and not isinstance(stored, ComputedTensor) else None
        if memory is None:
            return None
        ((start, count),) = runs
        offset = stored.offset + start * itemsize
        data = torch.frombuffer(memory, dtype=stored.torch_dtype, count=count, offset=offset)
        self.nbytes += data.nbytes
        return data.view(region.size)

    def _map(self, stored: StoredTensor) -> mmap.mmap | None:
        """The whole file, if it is on a local file system."""
        if stored.file not in self._maps:
            fd, memory = self._file(stored), None
            if file_state(fd) != self._written[stored.file]:  # perhaps shorter than its tensors
                raise _changed(self._path_of(stored.file))
            if is_local(fd):
                with contextlib.suppress(OSError, ValueError):  # the reader names the cause
                    memory = mmap.mmap(fd, 0, mmap.MAP_PRIVATE | MAP_NORESERVE)
                    memory.madvise(mmap.MADV_HUGEPAGE)  # fewer faults, and products read faster
            self._maps[stored.file] = memory
        return self._maps[stored.file]

    def mapped_files(self) -> dict[Path, FileState]:
        return {self._path_of(name): self._written[name] for name, m in self._maps.items() if m}

    def _fill(self, stored: StoredTensor, buffer: memoryview, offset: int) -> None:
        while buffer:
            try:
                count = self._read_bytes(self._file(stored), buffer, offset)
                if count == 0:
                    raise EOFError("it ends inside a tensor")
            except (OSError, EOFError) as error:
                raise CheckpointError(
                    f"{self._path_of(stored.file)} cannot be read at byte {offset} ({error}); "
                    "did it change while it was read? Copy it again."
                ) from error
            self.nbytes += count
            buffer, offset = buffer[count:], offset + count

    def _read_bytes(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(fd, [buffer], offset)

    def _file(self, stored: StoredTensor) -> int:
        name = stored.file
        if name not in self._open:
            path = self._path_of(name)
            try:
                check_regular_file(path)
                self._open[name] = fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(
                    f"{path} cannot be opened ({error}); see that it is there, that this user may "
                    "read it, and that `ulimit -n` is more than the files of the checkpoint."
                ) from error
            self._written[name] = stored.written or file_state(fd)
        return self._open[name]

    def _path_of(self, name: str) -> Path:
        return path_of(self.path, name)


def path_of(path: Path, name: str) -> Path:
    """A file of the checkpoint that is at `path`, or of an adapter, which has an absolute name."""
    return path if path.is_file() and not Path(name).is_absolute() else path / name


def _runs(shape: tuple[int, ...], region: Region) -> Iterator[tuple[int, int]]:
    """The contiguous stretches of a box in a tensor: first element and length of each."""
    split = len(shape)
    run = 1
    while split and run == math.prod(shape[split:]):
        split -= 1
        run *= region.size[split]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    base = sum(at * stride for at, stride in zip(region.start, strides, strict=True))
    for row in itertools.product(*map(range, region.size[:split])):
        yield base + sum(map(operator.mul, row, strides)), run
