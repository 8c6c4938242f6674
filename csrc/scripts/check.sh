#!/bin/sh
# Checks that the vendor header compiles alone, as C11 and C++17, and that all CUDA code compiles for
# the architectures named below. Nothing built here is kept or run.
set -eu
cd "$(dirname "$0")/.."

for dialect in "c -std=c11" "c++ -std=c++17"; do
    # shellcheck disable=SC2086  # two words on purpose
    "${CC:-cc}" -Wall -Wextra -Werror -pedantic -fsyntax-only -x $dialect abi/communicator.h
    echo "communicator.h compiles alone (-x $dialect)"
done

if ! command -v nvcc >/dev/null; then
    echo "nvcc was not found, so the CUDA code was not compiled. Install the CUDA toolkit." >&2
    exit "${CUDA_CHECK_WITHOUT_NVCC:-0}"
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
printf '#include "abi/communicator.h"\n' >"$scratch/header.cu"
for source in "$scratch/header.cu" cuda/*.cu; do
    [ -e "$source" ] || continue
    nvcc -std=c++17 -O2 -I. --compiler-options -fPIC -c "$source" -o "$scratch/object.o" \
        -gencode arch=compute_80,code=sm_80 \
        -gencode arch=compute_90,code=sm_90 \
        -gencode arch=compute_100,code=sm_100
    echo "$(basename "$source") compiles for sm_80, sm_90, sm_100"
done
