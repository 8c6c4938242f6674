"""The copies of a checkpoint that different ranks read: equal to the byte, or an error.

check = CopyCheck(coor, path, index, group_by_copy(identities), key)
check.compare_at_once()       # before loading: small checkpoints in full, samples of others
with check:                   # every byte, while the model is in use
    ...
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from coordinator import Coordinator, CoordinatorError, FailureReason, PeerLost
from drumline.checkpoint.safetensors_index import (
    ComputedTensor,
    FileState,
    Index,
    StoredTensor,
    TensorReader,
    check_unchanged,
    file_state,
    path_of,
)
from drumline.core.consistency import run_and_share
from drumline.core.shards import Region, split_into_blocks
from drumline.errors import CheckpointError
from drumline.timings import TIMINGS
from launcher import linux

Copies = tuple[tuple[int, ...], ...]
"""The ranks that read each copy, that of rank 0 first; ranks that read none are in none."""

AT_ONCE_NBYTES = 16 << 20
"""A rank compares so much before loading: that takes milliseconds. Of larger parts, samples."""
SAMPLE_NBYTES = 4096
MAX_SAMPLES = 4096
"""By rank; from a disk, each takes about a tenth of a millisecond."""
MAX_LASTING_SAMPLES = 256
"""Of all files together, one more for each."""
BLOCK_NBYTES = 1 << 20
DIGEST_NBYTES = 16
LOWEST_PRIORITY = 19
REPORTED = FailureReason.REPORTED
SHARED_FILE_SYSTEMS = ("nfs", "nfs4", "lustre", "ceph", "beegfs", "gpfs")
"""Those whose inode numbers are the server's, the same on every host."""


def file_identity(path: Path, index: Index, boot_id: str) -> str:
    """Equal on two ranks only if they read the very same files. boot_id: of the machine."""
    facts = []
    for name in sorted({stored.file for stored in index.values()}):
        status = path_of(path, name).stat()
        kind, source = linux.file_system(status.st_dev)
        device = source if kind in SHARED_FILE_SYSTEMS else f"{boot_id} {status.st_dev}"
        times = status.st_mtime_ns, status.st_ctime_ns
        facts.append((device, status.st_ino, status.st_size, *times))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def lasting_identity(path: Path, index: Index) -> str:
    """As file_identity, the same after the machine was started anew.

    Devices may then have each other's numbers, so it holds samples of the files. Raises
    CheckpointError if these are no longer those whose headers were read.
    """
    digest = hashlib.sha256(file_identity(path, index, "").encode())
    names = sorted({stored.file for stored in index.values()})
    for name in names:
        with path_of(path, name).open("rb") as file:
            last = max(0, file.seek(0, os.SEEK_END) - SAMPLE_NBYTES)
            step = last * len(names) // MAX_LASTING_SAMPLES
            for offset in range(last, -1, -max(SAMPLE_NBYTES, step)):
                digest.update(os.pread(file.fileno(), SAMPLE_NBYTES, offset))
    check_unchanged(path, index)
    return digest.hexdigest()


def group_by_copy(identities: Sequence[str | None]) -> Copies:
    """The ranks of each copy; None is the identity of a rank that reads no file."""
    ranks: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        if identity is not None:
            ranks.setdefault(identity, []).append(rank)
    return tuple(map(tuple, ranks.values()))


def are_equal(reader: TensorReader, one: StoredTensor, other: StoredTensor) -> bool:
    """True if two tensors are stored and the same to the byte; not where their file is a hole."""
    kinds = [(type(stored), stored.dtype, stored.shape) for stored in (one, other)]
    if kinds[0] != kinds[1] or isinstance(one, ComputedTensor) or _is_hole(reader.path, one):
        return False
    flat = [replace(stored, dtype="U8", shape=(stored.nbytes,)) for stored in (one, other)]
    blocks = split_into_blocks(flat[0].shape, BLOCK_NBYTES)
    return all(torch.equal(*(reader.box(stored, at) for stored in flat)) for at in blocks)


def _is_hole(path: Path, stored: StoredTensor) -> bool:
    """True of a tensor of which only the header was written, as of the Hub's for a plan."""
    last = stored.offset + stored.nbytes - 1
    with open(path_of(path, stored.file), "rb") as file:
        try:
            return os.lseek(file.fileno(), last, os.SEEK_DATA) != last
        except OSError as error:
            return error.errno == errno.ENXIO  # no data up to the end


class PassingReader(TensorReader):
    """Reads all of large files, and leaves the page cache as it was: weights may be mapped there.

    What is read from the disk is given back at once, and nothing is read ahead. What was in memory
    stays. A file system that does not tell the two apart keeps all, as for other readers.
    """

    def _read_bytes(self, fd: int, buffer: memoryview, offset: int) -> int:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        try:
            return os.preadv(fd, [buffer], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            count = os.preadv(fd, [buffer], offset)
            os.posix_fadvise(fd, offset, count, os.POSIX_FADV_DONTNEED)
            return count
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            return os.preadv(fd, [buffer], offset)


class CopyCheck:
    """Compares the copies of a checkpoint: each is read in full, by all the ranks that use it.

    key: distinguishes it from other checks of this Coordinator, the same on every rank.

    Where there is more to read than `compare_at_once` takes, a `with` block compares on a thread.
    If copies differ then, the group fails as if a rank was lost. The end of the block waits for the
    comparison, and raises CheckpointError on every rank; so it does, on the ranks that map it, for
    a file that somebody has written to in place.

    mapped: files whose pages are weights of this rank, as they were when they were mapped.
    """

    def __init__(self, coor: Coordinator, path: Path, index: Index, copies: Copies, key: str):
        self._coor, self._path, self._index, self._copies = coor, path, index, copies
        self._key, self._is_over = key, threading.Event()
        self._problem: str | Exception = ""
        names = index if len(copies) > 1 else ()  # those that are compared
        self._names = sorted(names, key=lambda name: (index[name].file, index[name].offset))
        nbytes = sum(stored.nbytes for stored in index.values())
        self._num_readers = min(map(len, copies), default=1)
        self._is_small = nbytes <= AT_ONCE_NBYTES * self._num_readers
        self._thread: threading.Thread | None = None
        self.mapped: dict[Path, FileState] = {}

    def compare_at_once(self) -> None:
        """Raise CheckpointError on every rank if copies differ in what is compared. Collective."""
        if len(self._copies) < 2:
            return
        names = self._names
        if not self._is_small:
            names = names[:: -(-len(names) // (MAX_SAMPLES * self._num_readers))]
        _, parts = run_and_share(
            self._coor,
            lambda: self._digests(names, self._is_small),
            lambda part: part,
            TIMINGS.load_s,
        )
        if problem := self._difference(names, dict(enumerate(parts))):
            raise CheckpointError(f"{self._coor.rank_name()}: {problem}")

    def __enter__(self) -> CopyCheck:
        if len(self._copies) > 1 and not self._is_small:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._is_over.set()
            return
        if self._thread is not None:
            self._thread.join()
        problem = self._problem or self._written_to()
        if isinstance(problem, PeerLost) and [f.reason for f in problem.failures[:1]] != [REPORTED]:
            raise problem
        if problem:
            raise CheckpointError(f"{self._coor.rank_name()}: {problem}")

    def _written_to(self) -> str:
        """The mapped file that is no longer what was loaded, in words; one that is replaced is."""
        for path, before in self.mapped.items():
            now = file_state(path) if path.exists() else before
            if now.inode == before.inode and now != before:
                return (
                    f"{path} was written to while its pages were the weights of a model, so what "
                    "that put out is of no checkpoint; write a new file and rename it, or load "
                    "with disable_mmap=True."
                )
        return ""

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        try:
            self._problem = self._compare_on_thread()
        except Exception as error:
            self._problem = error
            if not isinstance(error, CoordinatorError) and not self._is_over.is_set():
                self._coor.report_failure(self._coor.rank, str(error))

    def _compare_on_thread(self) -> str:
        """The difference, as rank 0 tells it to all; nothing if there is none."""
        readers = [rank for ranks in self._copies for rank in ranks]
        if self._coor.rank in readers:
            self._coor.put(f"{self._key} {self._coor.rank}", self._digests(self._names, True))
        if self._coor.is_master():
            problem = self._difference(self._names, {rank: self._wait(rank) for rank in readers})
            self._coor.put(f"{self._key} difference", problem.encode())
            if problem:
                self._coor.report_failure(self._copies[1][0], problem)
        return self._wait("difference").decode()

    def _wait(self, name: int | str) -> bytes:
        return self._coor.wait(f"{self._key} {name}", timeout_s=TIMINGS.load_s)

    def _digests(self, names: Sequence[str], is_full: bool) -> bytes:
        """The path, and the digests of those of the tensors that this rank reads of its copy."""
        digests = [str(self._path).encode(errors="backslashreplace")]
        ranks = next((ranks for ranks in self._copies if self._coor.rank in ranks), ())
        own = names[ranks.index(self._coor.rank) :: len(ranks)] if ranks else ()
        block = torch.empty(BLOCK_NBYTES, dtype=torch.uint8)
        with PassingReader(self._path) as reader:
            for name in own:
                digests.append(self._digest(reader, self._index[name], is_full, block))
        return b"\0".join((digests[0], b"".join(digests[1:])))

    def _digest(
        self, reader: TensorReader, stored: StoredTensor, is_full: bool, block: torch.Tensor
    ) -> bytes:
        flat = replace(stored, dtype="U8", shape=(stored.nbytes,))
        digest = hashlib.sha256()
        blocks = split_into_blocks(flat.shape, BLOCK_NBYTES)
        for region in blocks if is_full else [_middle(flat.nbytes)]:
            if self._is_over.is_set():
                raise CheckpointError("the model failed before its checkpoint was compared")
            reader.read(flat, region, block[: region.numel])
            digest.update(memoryview(block[: region.numel].numpy()))  # type: ignore[arg-type]
        return digest.digest()[:DIGEST_NBYTES]

    def _difference(self, names: Sequence[str], parts: Mapping[int, bytes]) -> str:
        """The first tensor in which a copy differs from that of rank 0, in words; "" if none."""
        digests = {rank: part.partition(b"\0")[2] for rank, part in parts.items()}
        for at, name in enumerate(names):
            for ranks in self._copies[1:]:
                if _digest_at(at, ranks, digests) != _digest_at(at, self._copies[0], digests):
                    places = [
                        f"{parts[rank].partition(bytes(1))[0].decode()} "
                        f"({self._coor.rank_name(rank)}, host {self._coor.peers[rank].host})"
                        for rank in (self._copies[0][0], ranks[0])
                    ]
                    return (
                        f"{name} in {self._index[name].file} is not the same in {places[0]} and "
                        f"in {places[1]}, so the layers would be those of two models; give every "
                        "rank the same checkpoint."
                    )
        return ""


def _digest_at(at: int, ranks: Sequence[int], digests: Mapping[int, bytes]) -> bytes:
    start = at // len(ranks) * DIGEST_NBYTES
    return digests[ranks[at % len(ranks)]][start : start + DIGEST_NBYTES]


def _middle(nbytes: int) -> Region:
    size = min(nbytes, SAMPLE_NBYTES)
    return Region(((nbytes - size) // 2,), (size,))
