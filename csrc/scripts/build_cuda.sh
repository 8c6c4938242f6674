#!/bin/sh
# Builds the optional CUDA kernels into communicator/backends/nccl/_oneshot.so: for the GPU of this machine, or
# where there is none for sm_80, sm_90 and sm_100. Without nvcc there is nothing to build.
set -eu
cd "$(dirname "$0")/.."
nvcc=$(command -v nvcc || ls "${CUDA_HOME:-/usr/local/cuda}"/bin/nvcc /usr/local/cuda*/bin/nvcc \
    2>/dev/null | head -n 1)
if [ -z "$nvcc" ]; then
    echo "nvcc is not here: communicator/backends/nccl/_oneshot.so was not built" >&2
    exit 0
fi
architectures="-gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90
    -gencode arch=compute_100,code=sm_100"
if nvidia-smi >/dev/null 2>&1; then architectures="-arch=native"; fi
# shellcheck disable=SC2086  # several words on purpose
"$nvcc" -std=c++17 -O3 $architectures -shared -Xcompiler -fPIC -cudart static \
    cuda/oneshot.cu -o ../communicator/backends/nccl/_oneshot.so
echo "built communicator/backends/nccl/_oneshot.so ($architectures)"
