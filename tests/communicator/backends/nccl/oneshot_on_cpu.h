// As much of CUDA as csrc/cuda/oneshot.cu uses, on threads of the CPU: a thread for each of the GPU's,
// in blocks with a barrier. Slow, and its memory order is that of the CPU: it shows that the steps
// are right, not that the GPU's fences are. Named memory functions of the kernel are replaced by
// the test that includes this. A thread captures all its launches, or none.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>

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
    pthread_barrier_t barrier;  // std::barrier shares state between blocks, which hides races
    std::atomic<int> any{0};
    explicit Block(int threads) { pthread_barrier_init(&barrier, nullptr, threads); }
    ~Block() { pthread_barrier_destroy(&barrier); }
};
inline thread_local dim3 threadIdx, blockIdx, gridDim, blockDim;
inline thread_local Block* block_of_thread;

inline void __syncthreads() { pthread_barrier_wait(&block_of_thread->barrier); }
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
inline void __threadfence() {}  // the atomics below order more than those of CUDA
inline void __threadfence_system() {}
inline uint32_t atomicCAS(uint32_t* at, uint32_t expected, uint32_t value) {
    __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return expected;
}
inline uint32_t atomicExch(uint32_t* at, uint32_t value) {
    return __atomic_exchange_n(at, value, __ATOMIC_ACQ_REL);
}
inline uint32_t atomicInc(uint32_t* at, uint32_t most) {
    uint32_t value = __atomic_load_n(at, __ATOMIC_ACQUIRE);
    while (!__atomic_compare_exchange_n(at, &value, value >= most ? 0 : value + 1, false,
                                        __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    }
    return value;
}
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
enum cudaError_t {
    cudaSuccess,
    cudaErrorInvalidValue,
    cudaErrorPeerAccessAlreadyEnabled = 704,
    cudaErrorStreamCaptureUnsupported = 900
};
struct cudaIpcMemHandle_t {
    char bytes[64];
};
constexpr int cudaIpcMemLazyEnablePeerAccess = 1, cudaHostAllocMapped = 2,
              cudaHostAllocPortable = 1;
inline thread_local cudaError_t last_error = cudaSuccess;
inline cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
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
inline cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaSuccess; }
inline cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, int) {
    return last_error = cudaErrorInvalidValue;
}
inline cudaError_t cudaIpcCloseMemHandle(void*) { return cudaErrorInvalidValue; }
inline cudaError_t cudaHostAlloc(void** to, size_t size, int) {
    return *to = std::malloc(size), cudaSuccess;
}
inline cudaError_t cudaHostGetDevicePointer(void** to, void* host, int) {
    return *to = host, cudaSuccess;
}

// ---- graphs: what is launched while this thread captures, run again by each replay ----

#define CUDART_VERSION 13000
constexpr int cudaUserObjectNoDestructorSync = 1,
              cudaGraphUserObjectMove = 1, cudaStreamCaptureStatusActive = 1;
using cudaStreamCaptureStatus = int;
struct UserObject {
    void* payload;
    void (*destroy)(void*);
};
struct Graph {
    std::vector<std::function<void()>> launches;
    std::vector<UserObject> objects;
};
using cudaGraph_t = Graph*;
using cudaUserObject_t = UserObject*;
inline thread_local Graph* capturing;

inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, int* status, unsigned long long* id,
                                            cudaGraph_t* graph, void*, void*, void*) {
    *status = capturing != nullptr;
    *id = reinterpret_cast<uintptr_t>(capturing);
    *graph = capturing;
    return cudaSuccess;
}
inline cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* payload,
                                        void (*destroy)(void*), int, int) {
    *object = new UserObject{payload, destroy};
    return cudaSuccess;
}
inline cudaError_t cudaUserObjectRelease(cudaUserObject_t object, int) {
    object->destroy(object->payload);
    delete object;
    return cudaSuccess;
}
inline cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, int, int) {
    graph->objects.push_back(*object);
    delete object;
    return cudaSuccess;
}
extern "C" Graph* on_cpu_capture() { return capturing = new Graph; }
extern "C" void on_cpu_end_capture() { capturing = nullptr; }
extern "C" void on_cpu_replay(Graph* graph) {
    for (auto& launch : graph->launches) launch();
}
extern "C" void on_cpu_end_graph(Graph* graph) {
    for (UserObject object : graph->objects) object.destroy(object.payload);
    delete graph;
}

// ---- kernels: loaded by name or by their first launch, which must not be captured ----

inline std::mutex loaded_mutex;
inline std::set<const void*> loaded;
struct cudaFuncAttributes {};
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel kernel) {
    std::lock_guard<std::mutex> lock(loaded_mutex);
    loaded.insert(reinterpret_cast<const void*>(kernel));
    return cudaSuccess;
}
extern "C" void on_cpu_unload() { loaded.clear(); }

template <class Kernel>
bool is_loaded(Kernel kernel) {
    std::lock_guard<std::mutex> lock(loaded_mutex);
    return loaded.count(reinterpret_cast<const void*>(kernel)) != 0;
}

// Returns when every thread has.
template <class Kernel, class Params>
void run_on_cpu(Kernel kernel, dim3 grid, int threads, const Params& params) {
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

template <class Params>
cudaError_t cudaLaunchKernel(void (*kernel)(Params), dim3 grid, dim3 threads, void** arguments, int,
                             cudaStream_t) {
    Params params = *static_cast<Params*>(*arguments);
    if (capturing == nullptr) {
        cudaFuncAttributes attributes;
        cudaFuncGetAttributes(&attributes, kernel);
        run_on_cpu(kernel, grid, threads.x, params);
    } else if (is_loaded(kernel)) {
        capturing->launches.push_back([=] { run_on_cpu(kernel, grid, threads.x, params); });
    } else {
        return last_error = cudaErrorStreamCaptureUnsupported;
    }
    return cudaSuccess;
}
