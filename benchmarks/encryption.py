"""The cost of encryption: the same calls on connections that encrypt, and that do not; and TLS.

python -m benchmarks.encryption [--save] [--repeats 200]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import launcher
from benchmarks.libraries import Ours
from benchmarks.table import Table, alternate, spread
from communicator import Communicator
from coordinator import Coordinator

KINDS = ("plain", "encrypted")
SIZES = {"8 B": 8, "8 KB": 8 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "64 MB": 64 << 20}
NOTE = (
    "Two ranks, each a node of its own, over TCP on loopback: the processor is the wire, so that "
    "all of the cost is seen. Median and middle half of a call on rank 0, in turns, warm, each "
    "after barriers of both ranks. `there and back`: a message and its answer. right: as without "
    "encryption. ratio: encrypted divided by plain."
)
ROOT = Path(__file__).parents[1]
TLS_SOURCES = (
    "benchmarks/tls_records.cpp",
    "csrc/encryption/encrypted_stream.cpp",
    "csrc/encryption/libcrypto.cpp",
)
TLS_NOTE = (
    "A message and its answer between two processes over loopback, in turns: the records of "
    "drumline, and TLS 1.3 of OpenSSL's libssl with a key that both ends have, both by "
    "AES-256-GCM. Median and middle half. ratio: drumline divided by TLS."
)
Case = tuple[str, int, dict[str, Callable[[], Any]]]


def work(port: int, repeats: int) -> list[list[Any]]:
    """Of every case its name, whether the results are equal, and the times by kind (us)."""
    info = replace(launcher.current(), local_world_size=1, local_rank=0)
    extras = {name: text for name, text in info.extras.items() if name != "master_fd"}
    other = replace(info, launch_id=f"{info.launch_id}-encrypted", master_port=port, extras=extras)
    with (
        Coordinator(info, timeout_s=120) as plain,
        Coordinator(other, timeout_s=120, encrypt=True) as encrypted,
        Communicator(plain, "tcp") as comm,
        Communicator(encrypted, "tcp") as encrypted_comm,
    ):
        coordinators = dict(zip(KINDS, (plain, encrypted), strict=True))
        libraries = {
            kind: Ours(kind, one, one.rank, 2)
            for kind, one in zip(KINDS, (comm, encrypted_comm), strict=True)
        }
        rows = []
        for name, nbytes, calls in (*_coordinator(coordinators), *_communicator(libraries)):
            count = repeats if nbytes <= 64 << 10 else max(3, repeats // 10)
            results: dict[str, Any] = {}
            timed = {kind: _timed(plain, call, results, kind) for kind, call in calls.items()}
            for _ in range(3):
                alternate(timed, 1)
            times = alternate(timed, count)
            is_right = _equal(*(results[kind] for kind in KINDS))
            rows.append([name, is_right, times])
    return rows


def _timed(
    coor: Coordinator, call: Callable[[], Any], results: dict[str, Any], kind: str
) -> Callable[[], float]:
    def measure() -> float:
        for _ in range(3):  # the first may have to wake the other rank
            coor.barrier()
        start = time.perf_counter()
        results[kind] = call()
        return (time.perf_counter() - start) * 1e6

    return measure


def _equal(plain: Any, encrypted: Any) -> bool:
    if isinstance(plain, torch.Tensor):
        return torch.equal(plain, encrypted)
    return bool(plain == encrypted)


def _coordinator(coordinators: dict[str, Coordinator]) -> Iterator[Case]:
    yield "barrier", 0, {kind: coor.barrier for kind, coor in coordinators.items()}
    yield "put and get 1 KB", 1 << 10, {k: _put_and_get(c) for k, c in coordinators.items()}
    for label in ("64 KB", "64 MB"):
        data = bytes(range(256)) * (SIZES[label] // 256)
        yield (
            f"broadcast {label}",
            len(data),
            {kind: _broadcast(coor, data) for kind, coor in coordinators.items()},
        )


def _put_and_get(coor: Coordinator) -> Callable[[], bytes | None]:
    key = f"key{coor.rank}"
    return lambda: (coor.put(key, b"x" * 1024), coor.get(key))[1]


def _broadcast(coor: Coordinator, data: bytes) -> Callable[[], bytes]:
    return lambda: coor.broadcast(data if coor.rank == 0 else None)


def _communicator(libraries: dict[str, Ours]) -> Iterator[Case]:
    for operation in ("there and back", "allreduce"):
        for label, nbytes in SIZES.items():
            yield (
                f"{operation} {label}",
                nbytes,
                {kind: _call(library, operation, nbytes) for kind, library in libraries.items()},
            )


def _call(library: Ours, operation: str, nbytes: int) -> Callable[[], torch.Tensor]:
    tensor = torch.zeros(nbytes // 4)
    call = library.call(operation, tensor, tensor)
    return lambda: (call(), tensor)[1]


def measure_tls(rounds: int, is_kept: bool) -> None:
    """The table of our records beside those of TLS, where the headers of OpenSSL are installed."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "tls_records"
        command = ["c++", "-O3", "-std=c++17", "-Icsrc", *TLS_SOURCES, "-o", program]
        built = subprocess.run(
            [*command, "-lssl", "-lcrypto", "-ldl"], cwd=ROOT, capture_output=True, text=True
        )
        if built.returncode:
            why = "(apt install libssl-dev)" if "openssl/ssl.h" in built.stderr else built.stderr
            print(f"TLS is left out: its program cannot be built {why}", file=sys.stderr)
            return
        ran = subprocess.run([program, str(rounds)], check=True, capture_output=True, text=True)
    times = {}
    for line in ran.stdout.splitlines():
        nbytes, kind, *measured = line.split()
        times[int(nbytes), kind] = spread([float(time_us) for time_us in measured])
    table = Table("tls-records", ("bytes", "drumline (us)", "TLS (us)", "ratio"), TLS_NOTE, is_kept)
    for nbytes in SIZES.values():
        ours, tls = times[nbytes, "own"], times[nbytes, "tls"]
        table.add(nbytes, ours, tls, ours.median / tls.median)
    table.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    columns = ("operation", "right", "plain (us)", "encrypted (us)", "ratio")
    table = Table("encryption", columns, NOTE, keep=arguments.save)
    with launcher.listen("encryption", "127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    for name, is_right, times in launcher.launch(work, 2, args=(port, arguments.repeats))[0]:
        plain, encrypted = (spread(times[kind]) for kind in KINDS)
        right = "yes" if is_right else "NO"
        table.add(name, right, plain, encrypted, encrypted.median / plain.median)
    table.end()
    measure_tls(arguments.repeats, arguments.save)


if __name__ == "__main__":
    main()
