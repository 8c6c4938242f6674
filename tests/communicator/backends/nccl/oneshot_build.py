"""The kernels of csrc/cuda/oneshot.cu, compiled for threads of the CPU (oneshot_on_cpu.h)."""

import ctypes
import re
import subprocess
from pathlib import Path

from communicator.backends.nccl import oneshot

CSRC = Path(oneshot.__file__).parents[3] / "csrc"
HERE = Path(__file__).parent
THREADS = 8  # of a block; the GPU has 512

# What is CUDA's own in the source, and what stands for it here.
ON_CPU = {
    r"#include <cuda\w+\.h>": "",
    r"constexpr int THREADS = \d+;": f"constexpr int THREADS = {THREADS};",
    r'asm volatile\("st\.release.*?\);': "__atomic_store_n(address, value, __ATOMIC_RELEASE);",
    r'asm volatile\("ld\.acquire.*?\);': (
        "value = __atomic_load_n(address, __ATOMIC_ACQUIRE); std::this_thread::yield();"
    ),
    r'asm volatile\("mov\.u64.*?\);': (
        "value = std::chrono::steady_clock::now().time_since_epoch().count();"
    ),
}
# Faults that a test must notice, chosen when the program runs.
PLANTED = {
    r"__ATOMIC_RELEASE\);": "planted == RELAXED_FLAGS ? __ATOMIC_RELAXED : __ATOMIC_RELEASE);",
    r"__ATOMIC_ACQUIRE\); std": (
        "planted == RELAXED_FLAGS ? __ATOMIC_RELAXED : __ATOMIC_ACQUIRE); std"
    ),
    r"int buffer = generation & 1;": "int buffer = planted == ONE_BUFFER ? 0 : generation & 1;",
}


def replace(source: str, replacements: dict[str, str]) -> str:
    for pattern, replacement in replacements.items():
        source, count = re.subn(pattern, replacement, source, flags=re.S)
        assert count, f"{pattern} is no longer in oneshot.cu"
    return source


def source_for_cpu() -> str:
    source = (CSRC / "cuda" / "oneshot.cu").read_text()
    return '#include "oneshot_on_cpu.h"\n' + replace(source, ON_CPU)


def compile_source(source: str, target: Path, *flags: str) -> Path:
    path = target.with_suffix(".cpp")
    path.write_text(source)
    options = ["-std=c++20", "-O1", "-pthread", f"-I{CSRC}", f"-I{HERE}", *flags]
    subprocess.run(["g++", *options, path, "-o", target], check=True)
    return target


def is_in_kernel(arena: int) -> bool:
    """True while a launch of the rank of this arena runs: the arena has an owner."""
    generations_and_failed = oneshot.MAX_BLOCKS + 1
    return bool(ctypes.cast(arena, ctypes.POINTER(ctypes.c_uint32))[generations_and_failed])


def compile_kernels(folder: Path) -> Path:
    """The kernels as they are, but for the lines that only nvcc knows."""
    return compile_source(source_for_cpu(), folder / "libsteps.so", "-shared", "-fPIC")
