"""Halves by the processor's own instructions have the bits of the plain code, which any may run."""

import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[3] / "csrc"
PROGRAM = """
#include <cstdio>
#include <vector>
#include "reduce/codec.h"
#include "reduce/half.h"
using shm::Float16;

// 65536 is a multiple of every vector, and 65535 of none.
template <class Widen, class Narrow>
long differences(Widen widen, Narrow narrow, size_t count) {
    std::vector<uint16_t> halves(count), found(count);
    std::vector<float> wide(count);
    long wrong = 0;
    for (size_t i = 0; i < count; ++i) halves[i] = i;
    widen(wide.data(), halves.data(), count);
    for (size_t i = 0; i < count; ++i)
        wrong += wide[i] == wide[i] && shm::bits_of(wide[i]) != shm::bits_of(Float16::widen(i));
    for (uint32_t offset = 0; offset < 64; ++offset) {
        for (size_t i = 0; i < count; ++i) wide[i] = shm::float_of((i << 16) + offset * 1021);
        narrow(found.data(), wide.data(), count);
        for (size_t i = 0; i < count; ++i)
            wrong += wide[i] == wide[i] && found[i] != Float16::narrow(wide[i]);
    }
    return wrong;
}

int main() {
    long wrong = 0;
    for (size_t count : {65536, 65535}) {
        if (__builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx2"))
            wrong += differences(shm::widen_halves_avx2, shm::narrow_halves_avx2, count);
        if (__builtin_cpu_supports("avx512f"))
            wrong += differences(shm::widen_halves_avx512, shm::narrow_halves_avx512, count);
    }
    std::printf("%ld", wrong);
}
"""


def test_every_half_and_every_rounding_is_the_same(tmp_path):
    (tmp_path / "main.cpp").write_text(PROGRAM)
    sources = [tmp_path / "main.cpp", CSRC / "reduce" / "half.cpp"]
    command = ["c++", "-std=c++17", "-O1", f"-I{CSRC}", *sources, "-o", tmp_path / "halves"]
    if (
        "x86_64"
        not in subprocess.run(["c++", "-dumpmachine"], capture_output=True, text=True).stdout
    ):
        pytest.skip("the units are those of x86-64; a machine with one compiles them")
    subprocess.run(command, check=True)
    assert subprocess.run([tmp_path / "halves"], capture_output=True, text=True).stdout == "0"
