#!/bin/sh
# Builds the optional CUDA kernels into communicator/backends/nccl/_oneshot.so for sm_80, sm_90,
# sm_100, and what comes after. Without nvcc it builds nothing.
set -eu
cd "$(dirname "$0")/.."
output=../communicator/backends/nccl/_oneshot.so
nvcc=$(command -v nvcc || ls "${CUDA_HOME:-/usr/local/cuda}"/bin/nvcc /usr/local/cuda*/bin/nvcc \
    2>/dev/null | head -n 1)
if [ -z "$nvcc" ]; then
    echo "nvcc was not found, so _oneshot.so was not built. Install the CUDA toolkit." >&2
    exit 0
fi
"$nvcc" -std=c++17 -O3 -I. --threads 0 -gencode arch=compute_80,code=sm_80 \
    -gencode arch=compute_90,code=sm_90 -gencode 'arch=compute_100,code=[sm_100,compute_100]' \
    -shared -Xcompiler -fPIC -cudart static cuda/oneshot.cu -o "$output"
echo "built communicator/backends/nccl/_oneshot.so"
