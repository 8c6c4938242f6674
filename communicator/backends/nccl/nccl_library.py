"""Finds libnccl (or librccl), and checks the file before it is loaded.

library = find()            # torch's own copy if it has one, then the wheel's, then the system's
library.version_text        # "2.28.9"
"""

from __future__ import annotations

import ctypes
import os
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from communicator.errors import Unsupported
from coordinator import Peer
from launcher import linux

SONAMES = ("libnccl.so.2", "librccl.so.1")
WHEEL = "nvidia.nccl"
OLDEST = 21800
UNIQUE_ID_BYTES = 128
LOADABLE = 1  # PT_LOAD of elf(5)
# Of the driver, by alternatives: by these a graph that holds a call is noticed, and counted.
GRAPH_FUNCTIONS = (
    ("cuStreamGetCaptureInfo_v2", "cuStreamGetCaptureInfo_v3"),
    ("cuUserObjectCreate",),
    ("cuUserObjectRelease",),
    ("cuGraphRetainUserObject",),
)


class NcclLibrary:
    """An NCCL that is loaded, with the few of its functions that need no communicator.

    Raises Unsupported if the file is incomplete, is not NCCL, or is too old.
    """

    def __init__(self, path: str) -> None:
        if os.path.exists(path):
            check_complete(path)
        try:
            self._library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            raise Unsupported(f"{path} does not load: {error}") from error
        self.version = self._read_version(path)
        self.version_text = version_text(self.version)
        self.path = path if os.sep in path else mapped(path)

    def _read_version(self, path: str) -> int:
        version = ctypes.c_int()
        try:
            failed = self._library.ncclGetVersion(ctypes.byref(version))
        except AttributeError as error:
            raise Unsupported(
                f"{path} has no ncclGetVersion, so it is not NCCL. Give the path of libnccl.so.2."
            ) from error
        if failed or version.value < OLDEST:
            raise Unsupported(
                f"{path} is NCCL {version_text(version.value)}; needs NCCL {version_text(OLDEST)} "
                "or newer. Install a newer nvidia-nccl."
            )
        return version.value

    def unique_id(self) -> bytes:
        """128 bytes that differ each time, by which the ranks of one communicator connect."""
        unique_id = (ctypes.c_char * UNIQUE_ID_BYTES)()
        self._check("ncclGetUniqueId", self._library.ncclGetUniqueId(ctypes.byref(unique_id)))
        return bytes(unique_id.raw)

    def error_string(self, code: int) -> str:
        """NCCL's own words for a result."""
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        return str(self._library.ncclGetErrorString(code).decode())

    def try_mem_alloc(self, nbytes: int) -> None:
        """Raise Unsupported if the current device has no room for nbytes; takes none."""
        if not hasattr(self._library, "ncclMemAlloc"):
            raise Unsupported(
                f"registered memory is not supported by NCCL {self.version_text} ({self.path}); "
                "needs NCCL 2.19.1 or newer."
            )
        address, size = ctypes.c_void_p(), ctypes.c_size_t(nbytes)
        self._check("ncclMemAlloc", self._library.ncclMemAlloc(ctypes.byref(address), size))
        self.mem_free(address.value or 0)

    def mem_free(self, address: int) -> None:
        """Free what ncclMemAlloc gave and no communicator has registered any longer."""
        self._check("ncclMemFree", self._library.ncclMemFree(ctypes.c_void_p(address)))

    def _check(self, call: str, code: int) -> None:
        if code:
            raise Unsupported(
                f"{call} of NCCL {self.version_text} ({self.path}) failed: "
                f"{self.error_string(code)}. NCCL_DEBUG=INFO tells more."
            )


def find(path: str | None = None) -> NcclLibrary:
    """The library at path, or the first of candidates(). Raises Unsupported with all reasons.

    A copy that torch has loaded comes before any other: two in one process would not know of each
    other's kernels. Only what does not exist is passed over, never what fails to load.
    """
    if path is not None:
        return NcclLibrary(path)
    for candidate in candidates():
        return NcclLibrary(candidate)
    for soname in SONAMES:
        try:
            return NcclLibrary(soname)
        except Unsupported as error:
            if "cannot open shared object file" not in str(error):
                raise
    raise Unsupported(
        f"no NCCL: torch has loaded none, the package {WHEEL} is not installed, and the system has "
        f"neither {' nor '.join(SONAMES)}. Install nvidia-nccl-cu13 (or -cu12), or give its path "
        "with library=."
    )


def find_or_problem(path: str | None) -> tuple[NcclLibrary | None, str]:
    """The library, or the reason why there is none: the peers must learn it before they wait."""
    try:
        return find(path), ""
    except Unsupported as error:
        return None, str(error)


def check_same(me: str, peers: Sequence[Peer], proposals: list[dict[str, Any]]) -> None:
    """Raise Unsupported on every rank unless all have the same library. By rank, as proposed."""
    for peer, proposal in zip(peers, proposals, strict=True):
        if proposal["problem"]:
            raise Unsupported(f"{me}: {peer}: {proposal['problem']}")
    if len({tuple(proposal["build"]) for proposal in proposals}) > 1:
        builds = "; ".join(
            f"rank {peer.rank} has NCCL {version_text(proposal['build'][0])} at {proposal['path']} "
            f"({proposal['build'][1]} bytes)"
            for peer, proposal in zip(peers, proposals, strict=True)
        )
        raise Unsupported(
            f"{me}: the ranks have different NCCL libraries, whose messages may differ: {builds}. "
            "Install the same one everywhere, or name it with library=."
        )


def check_gpus(me: str, rank_name: Callable[[int], str], gpus: Sequence[str | None]) -> None:
    """Raise Unsupported on every rank if two have one GPU, which nobody named. By rank."""
    for gpu, count in Counter(gpus).items():
        if gpu is not None and count > 1:
            sharing = [rank_name(rank) for rank, other in enumerate(gpus) if other == gpu]
            raise Unsupported(
                f"{me}: {', '.join(sharing)} have one GPU together, "
                f"{gpu}, for CUDA_VISIBLE_DEVICES names fewer than there are ranks. Let it "
                "name one for each rank, start fewer, or name the GPU with device=."
            )


def candidates() -> Iterator[str]:
    """Files in order of preference: loaded ones, then those of installed packages."""
    for soname in SONAMES:
        if path := mapped(soname):
            yield path
    yield from _of_packages()


def _of_packages() -> Iterator[str]:
    try:
        spec = find_spec(WHEEL)
    except ModuleNotFoundError:
        return
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(place, "lib", SONAMES[0])).exists():
            yield str(path)


def mapped(soname: str) -> str:
    """The path of the library that this process has loaded under a name like soname, or ""."""
    stem = soname.rpartition(".")[0]  # the file may be called librccl.so, or libnccl.so.2.28.9
    for line in linux.read_proc("self/maps").splitlines():
        path = line.partition("/")
        if os.path.basename(path[2]).startswith(stem):
            return "/" + path[2]
    return ""


def missing_graph_functions(driver: str = "libcuda.so.1") -> list[str]:
    """The functions that the driver lacks; without them graphs with calls are not noticed."""
    try:
        library = ctypes.CDLL(driver)
    except OSError:
        library = None
    return [
        " or ".join(names)
        for names in GRAPH_FUNCTIONS
        if not any(hasattr(library, name) for name in names)
    ]


def warn_of_driver() -> None:
    """Warn if the CUDA driver lacks functions by which graphs with calls are noticed."""
    if missing := missing_graph_functions():
        warnings.warn(
            f"this CUDA driver has no {', no '.join(missing)}: close() cannot notice CUDA graphs "
            "that hold calls, and NCCL would wait for them for ever. Reset them before, and run "
            "each call once before it is captured; or install a newer driver.",
            RuntimeWarning,
            stacklevel=6,
        )


def version_text(version: int) -> str:
    """22809 as 2.28.9; before 2.9 there were four digits."""
    major, rest = divmod(version, 10_000 if version >= 10_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def check_complete(path: str) -> None:
    """Raise Unsupported if an ELF file ends before its segments do: loading it would crash."""
    try:
        with open(path, "rb") as file:
            header = file.read(64)
            start, size, count = _segments_of(header, path)
            file.seek(start)
            table = file.read(size * count)
            length = os.fstat(file.fileno()).st_size
    except OSError as error:  # a folder, or one that others keep to themselves
        raise Unsupported(f"{path} cannot be read: {error.strerror}") from error
    for offset in range(0, len(table) - 55, size):
        kind, _, begin, _, _, nbytes = struct.unpack_from("<IIQQQQ", table, offset)
        if kind == LOADABLE and begin + nbytes > length:
            break
    else:
        if len(table) == size * count:
            return
    raise Unsupported(
        f"{path} is cut off: it ends after {length} bytes, in the middle of what is to be loaded. "
        "Install it again."
    )


def _segments_of(header: bytes, path: str) -> tuple[int, int, int]:
    """Offset, row size and number of rows of the program header table."""
    is_elf = len(header) == 64 and header[:6] == b"\x7fELF\x02\x01"
    start, size, count = struct.unpack_from("<Q14xHH", header, 32) if is_elf else (0, 0, 0)
    if size < 56:  # 0 in an object file, which has no segments
        raise Unsupported(f"{path} is no 64-bit shared library. Give the path of libnccl.so.2.")
    return start, size, count
