"""What of the one-shot sum needs no GPU: the choice, the layout, and the steps of the kernel."""

import ctypes
import os
import subprocess
import types
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from communicator import CommunicatorError, Unsupported
from communicator.backends.nccl import oneshot
from communicator.backends.nccl.oneshot import (
    Algorithm,
    KernelCall,
    Kernels,
    num_blocks,
    select_algorithm,
)

CSRC = Path(oneshot.__file__).parents[3] / "csrc"
KIB = 1024
SIZES = st.integers(0, 2**21)
WORLDS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 16])


@pytest.mark.parametrize(
    ("world_size", "nbytes", "dtype", "expected"),
    [
        (2, 512 * KIB, torch.float32, Algorithm.ONE_SHOT),
        (4, 256 * KIB, torch.bfloat16, Algorithm.ONE_SHOT),
        (4, 256 * KIB + 16, torch.bfloat16, Algorithm.TWO_SHOT),
        (8, 64 * KIB, torch.float16, Algorithm.ONE_SHOT),
        (8, 256 * KIB, torch.float16, Algorithm.TWO_SHOT),
        (8, 256 * KIB + 16, torch.float16, None),
        (3, 1024, torch.float32, None),
        (8, 1000, torch.float32, None),
        (8, 0, torch.float32, None),
        (8, 1024, torch.int32, None),
        (8, 1024, torch.float64, None),
    ],
)
def test_size_world_and_dtype_choose_the_way(world_size, nbytes, dtype, expected):
    assert select_algorithm(world_size, nbytes, dtype) == expected


@given(WORLDS, SIZES, st.sampled_from(list(oneshot.DTYPES)))
def test_whatever_is_chosen_fits_the_arena_and_the_grid(world_size, nbytes, dtype):
    way = select_algorithm(world_size, nbytes, dtype)
    if way is not None:
        assert world_size in (2, 4, 6, 8)
        assert nbytes % 16 == 0 and 0 < nbytes <= 512 * KIB
        assert 1 <= num_blocks(world_size, nbytes, way) <= oneshot.MAX_BLOCKS


HERE_OR_NOT = [(True, 0), (False, 0), (True, 1)]  # is it visible, and how far is its number


def test_a_process_of_another_container_with_the_same_pid_is_another_process():
    """What a pid means depends on who asks: an address of this process is none of the other's."""
    pid = os.getpid()
    peers = [types.SimpleNamespace(is_visible=seen, pid=pid + i) for seen, i in HERE_OR_NOT]
    group = object.__new__(oneshot.Oneshot)
    group.coor, group._call, group._imported = types.SimpleNamespace(peers=peers), KernelCall(), []
    reached, imported = [], []
    group._kernels = types.SimpleNamespace(
        reach=reached.append, import_=lambda handle, arena: imported.append(handle)
    )
    group._map_arenas([{"device": i, "pointer": 64, "handle": bytes([i])} for i in range(3)])
    assert (reached, imported) == ([0], [b"\x01", b"\x02"])


HEADER_PROBE = """
#include <stdio.h>
#include "abi/oneshot.h"
#define SHOW(field) printf("%s %zu\\n", #field, offsetof(oneshot_call, field))
int main(void) {
    SHOW(struct_size); SHOW(algorithm); SHOW(dtype); SHOW(world); SHOW(first); SHOW(num_here);
    SHOW(blocks); SHOW(nbytes); SHOW(timeout_ns); SHOW(in); SHOW(out); SHOW(arena); SHOW(state);
    SHOW(stream);
    printf("size %zu\\nranks %d\\nblocks_at_most %d\\nbytes %u\\nabi %u\\n", sizeof(oneshot_call),
           ONESHOT_MAX_RANKS, ONESHOT_MAX_BLOCKS, ONESHOT_MAX_BYTES, ONESHOT_ABI);
}
"""


def test_python_and_the_header_agree_on_the_layout_of_a_call(tmp_path):
    (tmp_path / "probe.c").write_text(HEADER_PROBE)
    program = tmp_path / "probe"
    subprocess.run(["gcc", f"-I{CSRC}", tmp_path / "probe.c", "-o", program], check=True)
    shown = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in (line.split() for line in shown.splitlines())}
    for name, _ in KernelCall._fields_:
        assert found[name.rstrip("_")] == getattr(KernelCall, name).offset, name
    assert found["size"] == ctypes.sizeof(KernelCall)
    assert (found["ranks"], found["blocks_at_most"], found["abi"]) == (
        oneshot.MAX_RANKS,
        oneshot.MAX_BLOCKS,
        oneshot.ABI,
    )
    assert found["bytes"] == max(oneshot.TWO_SHOT_BYTES.values())


def test_a_kernel_that_was_not_built_says_how_to_build_it(tmp_path):
    with pytest.raises(Unsupported, match=r"csrc/scripts/build_cuda\.sh"):
        Kernels(str(tmp_path / "_oneshot.so"))


@pytest.mark.skipif(
    not os.path.exists(oneshot.LIBRARY),
    reason="needs nvcc and csrc/scripts/build_cuda.sh run before",
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_oneshot.py has a GPU")
def test_without_a_gpu_the_kernels_load_and_say_what_cuda_says():
    with pytest.raises(CommunicatorError, match=r"one-shot create failed in CUDA: .*driver"):
        Kernels().create(ctypes.byref(ctypes.c_void_p()))
