// As much of CUDA as csrc/cuda/oneshot.cu uses, on threads of the CPU: a thread for each of the GPU's,
// in blocks with a barrier. Slow, and its memory order is that of the CPU: it shows that the steps
// are right, not that the GPU's fences are. Named memory functions of the kernel are replaced by
// the test that includes this.
#pragma once

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)

struct uint4 {
    uint32_t x, y, z, w;
};
struct dim3 {
    unsigned x, y;
    dim3(unsigned x = 0, unsigned y = 0) : x(x), y(y) {}
};
struct Block {
    std::barrier<> barrier;
    std::atomic<int> any{0};
    explicit Block(int threads) : barrier(threads) {}
};
inline thread_local dim3 threadIdx, blockIdx, gridDim, blockDim;
inline thread_local Block* block_of_thread;

inline void __syncthreads() { block_of_thread->barrier.arrive_and_wait(); }
inline int __syncthreads_or(int mine) {
    if (mine) block_of_thread->any = 1;
    __syncthreads();
    int found = block_of_thread->any;
    __syncthreads();
    block_of_thread->any = 0;
    __syncthreads();
    return found;
}
inline int __syncthreads_and(int mine) { return !__syncthreads_or(!mine); }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }

using __half = _Float16;
inline float __half2float(__half value) { return value; }
inline __half __float2half_rn(float value) { return static_cast<__half>(value); }
struct __nv_bfloat16 {
    uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 value) {
    uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float found;
    std::memcpy(&found, &bits, sizeof found);
    return found;
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorPeerAccessAlreadyEnabled = 704 };
struct cudaIpcMemHandle_t {
    char bytes[64];
};
constexpr int cudaIpcMemLazyEnablePeerAccess = 1, cudaHostAllocMapped = 2,
              cudaHostAllocPortable = 1;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "of the CPU"; }
inline cudaError_t cudaMalloc(void** to, size_t size) {
    *to = std::aligned_alloc(128, (size + 127) / 128 * 128);
    return cudaSuccess;
}
inline cudaError_t cudaFree(void* at) { return std::free(at), cudaSuccess; }
inline cudaError_t cudaFreeHost(void* at) { return std::free(at), cudaSuccess; }
inline cudaError_t cudaMemset(void* at, int byte, size_t size) {
    return std::memset(at, byte, size), cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceEnablePeerAccess(int, int) { return cudaSuccess; }
inline cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaErrorInvalidValue; }
inline cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, int) {
    return cudaErrorInvalidValue;
}
inline cudaError_t cudaIpcCloseMemHandle(void*) { return cudaErrorInvalidValue; }
inline cudaError_t cudaHostAlloc(void** to, size_t size, int) {
    return *to = std::malloc(size), cudaSuccess;
}
inline cudaError_t cudaHostGetDevicePointer(void** to, void* host, int) {
    return *to = host, cudaSuccess;
}

// Returns when every thread has.
template <class Kernel, class Params>
void launch_on_cpu(Kernel kernel, dim3 grid, int threads, const Params& params) {
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::thread> running;
    for (unsigned i = 0; i < grid.x * grid.y; ++i) {
        blocks.push_back(std::make_unique<Block>(threads));
        for (int thread = 0; thread < threads; ++thread)
            running.emplace_back([=, block = blocks.back().get()] {
                block_of_thread = block;
                threadIdx = dim3(thread);
                blockIdx = dim3(i % grid.x, i / grid.x);
                gridDim = grid;
                blockDim = dim3(threads);
                kernel(params);
            });
    }
    for (std::thread& thread : running) thread.join();
}
