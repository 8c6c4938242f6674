// Allreduce of small tensors in one launch, for ranks that can access each other's device memory.
//
// One shot: every rank reads everything and adds it itself; one wait. Two shots: every rank adds
// its own part and the peers read it; two waits, but less is read. Sums are computed in 32 bits, in
// order of rank, and rounded once, so that all ranks have the same bits.
//
// Why it may be called again and again, eagerly or from a graph:
// - The generation number lies in the arena, and the kernel itself counts it. Every call advances
//   every counter, also those of blocks that were not launched, so the next call may have another
//   grid.
// - Two staging buffers alternate. A rank may be one call ahead of a peer, never two: its next wait
//   needs the peer's flag, which the peer raises after its previous kernel has ended.
// - Block b of one rank waits only for blocks b of its peers, and reads only what those wrote.
// - A flag counts if it is at the awaited generation or the next, so that generations may wrap, and
//   flags that were not used for long are not mistaken.
// - All blocks that wait for each other run at once: two fit on a multiprocessor, so that eight
//   ranks of one launch fit on a GPU of 96.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "abi/oneshot.h"

namespace {

constexpr int THREADS = 512;
constexpr int BLOCKS_AT_ONCE = 2;  // on a multiprocessor, at the least: bounds the registers
constexpr int LINE_WORDS = 32;     // 128 bytes: flags of different writers share no cache line
constexpr int STAGES = 2;
constexpr unsigned SPINS_BETWEEN_CLOCKS = 64;

using Raw = uint4;  // 16 bytes

struct Flag {
    uint32_t generation;
    uint32_t padding[LINE_WORDS - 1];
};

struct Arena {
    uint32_t generation[ONESHOT_MAX_BLOCKS];
    uint32_t failed;  // a wait timed out, so later results would be wrong
    alignas(128) Flag arrived[STAGES][ONESHOT_MAX_BLOCKS][ONESHOT_MAX_RANKS];  // [][][peer]
    alignas(128) Raw staged[2][ONESHOT_MAX_BYTES / sizeof(Raw)];
    alignas(128) Raw reduced[2][ONESHOT_MAX_BYTES / sizeof(Raw)];
};

struct Params {
    const Raw* in[ONESHOT_MAX_RANKS];
    Raw* out[ONESHOT_MAX_RANKS];
    Arena* arena[ONESHOT_MAX_RANKS];
    uint32_t* error;
    uint64_t timeout_ns;
    uint32_t num_vectors;
    int first;
};

// ---- memory order ----

__device__ void store_release(uint32_t* address, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ uint32_t load_acquire(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ uint64_t now_ns() {
    uint64_t value;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
    return value;
}

// ---- waiting ----

// Waits until *flag is `generation`, or one more. False after the timeout.
__device__ bool wait_for(const uint32_t* flag, uint32_t generation, uint64_t timeout_ns) {
    uint64_t start = now_ns();
    for (uint32_t spin = 1;; ++spin) {
        if (load_acquire(flag) - generation <= 1) return true;
        if (spin % SPINS_BETWEEN_CLOCKS == 0 && now_ns() - start > timeout_ns) return false;
    }
}

__device__ void report(const Params& params, int rank, int missing, int stage) {
    params.arena[rank]->failed = 1;
    *params.error = 1 + rank + 16 * missing + 256 * stage;
    __threadfence_system();
}

// A barrier of the same block of all ranks. Called by all threads; false, for all of them, if a
// rank did not arrive in time.
template <int WORLD>
__device__ bool barrier(const Params& params, int rank, int stage, uint32_t generation) {
    __syncthreads();  // what the block wrote happens before the release below
    bool arrived = true;
    int peer = threadIdx.x;
    if (peer < WORLD) {
        store_release(&params.arena[peer]->arrived[stage][blockIdx.x][rank].generation, generation);
        const Flag& flag = params.arena[rank]->arrived[stage][blockIdx.x][peer];
        arrived = wait_for(&flag.generation, generation, params.timeout_ns);
        if (!arrived) report(params, rank, peer, stage);
    }
    return __syncthreads_and(arrived) != 0;
}

// Once a wait has timed out, later calls return at once. The same for all threads of a block.
__device__ bool has_failed(const Params& params, int rank) {
    return __syncthreads_or(threadIdx.x == 0 && params.arena[rank]->failed != 0) != 0;
}

__device__ uint32_t next_generation(const Params& params, int rank) {
    return params.arena[rank]->generation[blockIdx.x] + 1;
}

__device__ void advance_generation(const Params& params, int rank, uint32_t generation) {
    __syncthreads();  // every thread has read the counter
    for (int i = blockIdx.x + gridDim.x * threadIdx.x; i < ONESHOT_MAX_BLOCKS;
         i += gridDim.x * blockDim.x)
        params.arena[rank]->generation[i] = generation;
}

// ---- adding ----

__device__ float widen(float value) { return value; }
__device__ float widen(__half value) { return __half2float(value); }
__device__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ void narrow(float value, float* to) { *to = value; }
__device__ void narrow(float value, __half* to) { *to = __float2half_rn(value); }
__device__ void narrow(float value, __nv_bfloat16* to) { *to = __float2bfloat16_rn(value); }

template <class T, int WORLD>
__device__ Raw add_in_order(const Raw (&parts)[WORLD]) {
    constexpr int LANES = sizeof(Raw) / sizeof(T);
    Raw total;
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) {
        float sum = widen(reinterpret_cast<const T*>(&parts[0])[lane]);
#pragma unroll
        for (int rank = 1; rank < WORLD; ++rank)
            sum += widen(reinterpret_cast<const T*>(&parts[rank])[lane]);
        narrow(sum, &reinterpret_cast<T*>(&total)[lane]);
    }
    return total;
}

// The sum of vector `at` of every rank's staging buffer.
template <class T, int WORLD>
__device__ Raw gather_and_add(const Params& params, int buffer, uint32_t at) {
    Raw parts[WORLD];
#pragma unroll
    for (int peer = 0; peer < WORLD; ++peer) parts[peer] = params.arena[peer]->staged[buffer][at];
    return add_in_order<T, WORLD>(parts);
}

// ---- the two kernels; blockIdx.y is the rank, counted from `first` ----

template <class T, int WORLD>
__global__ void __launch_bounds__(THREADS, BLOCKS_AT_ONCE) one_shot(Params params) {
    int rank = params.first + blockIdx.y;
    if (has_failed(params, rank)) return;
    uint32_t generation = next_generation(params, rank);
    int buffer = generation & 1;
    uint32_t begin = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
    for (uint32_t at = begin; at < params.num_vectors; at += step)
        params.arena[rank]->staged[buffer][at] = params.in[rank][at];
    if (!barrier<WORLD>(params, rank, 0, generation)) return;
    for (uint32_t at = begin; at < params.num_vectors; at += step)
        params.out[rank][at] = gather_and_add<T, WORLD>(params, buffer, at);
    advance_generation(params, rank, generation);
}

template <class T, int WORLD>
__global__ void __launch_bounds__(THREADS, BLOCKS_AT_ONCE) two_shot(Params params) {
    int rank = params.first + blockIdx.y;
    if (has_failed(params, rank)) return;
    uint32_t generation = next_generation(params, rank);
    int buffer = generation & 1;
    uint32_t begin = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
    uint32_t part = (params.num_vectors + WORLD - 1) / WORLD;  // the last may be shorter
    auto end_of = [&](int owner) { return min((owner + 1) * part, params.num_vectors); };
    for (int owner = 0; owner < WORLD; ++owner)
        for (uint32_t at = owner * part + begin; at < end_of(owner); at += step)
            params.arena[rank]->staged[buffer][at] = params.in[rank][at];
    if (!barrier<WORLD>(params, rank, 0, generation)) return;
    for (uint32_t at = rank * part + begin; at < end_of(rank); at += step)
        params.arena[rank]->reduced[buffer][at] = gather_and_add<T, WORLD>(params, buffer, at);
    if (!barrier<WORLD>(params, rank, 1, generation)) return;
    for (int owner = 0; owner < WORLD; ++owner)
        for (uint32_t at = owner * part + begin; at < end_of(owner); at += step)
            params.out[rank][at] = params.arena[owner]->reduced[buffer][at];
    advance_generation(params, rank, generation);
}

// ---- launching ----

template <class T, int WORLD>
cudaError_t launch_kernel(const oneshot_call& call, const Params& params) {
    dim3 grid(call.blocks, call.num_here);
    cudaStream_t stream = static_cast<cudaStream_t>(call.stream);
    if (call.algorithm == ONESHOT_TWO)
        two_shot<T, WORLD><<<grid, THREADS, 0, stream>>>(params);
    else
        one_shot<T, WORLD><<<grid, THREADS, 0, stream>>>(params);
    return cudaGetLastError();
}

template <class T>
cudaError_t launch_for_world(const oneshot_call& call, const Params& params) {
    switch (call.world) {
        case 2:
            return launch_kernel<T, 2>(call, params);
        case 4:
            return launch_kernel<T, 4>(call, params);
        case 6:
            return launch_kernel<T, 6>(call, params);
        case 8:
            return launch_kernel<T, 8>(call, params);
        default:
            return cudaErrorInvalidValue;
    }
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

bool is_valid(const oneshot_call& call) {
    bool valid = call.struct_size >= sizeof(oneshot_call) && call.first >= 0 && call.num_here > 0 &&
                 call.first + call.num_here <= call.world && call.world <= ONESHOT_MAX_RANKS &&
                 call.blocks > 0 && call.blocks <= ONESHOT_MAX_BLOCKS && call.nbytes > 0 &&
                 call.nbytes % sizeof(Raw) == 0 && call.nbytes <= ONESHOT_MAX_BYTES;
    for (int rank = call.first; valid && rank < call.first + call.num_here; ++rank)
        valid = is_aligned(call.in[rank]) && is_aligned(call.out[rank]);
    return valid;
}

Params params_of(const oneshot_call& call) {
    Params params = {};
    for (int rank = 0; rank < call.world; ++rank) {
        params.in[rank] = static_cast<const Raw*>(call.in[rank]);
        params.out[rank] = static_cast<Raw*>(call.out[rank]);
        params.arena[rank] = static_cast<Arena*>(call.arena[rank]);
    }
    params.error = call.error;
    params.timeout_ns = call.timeout_ns;
    params.num_vectors = static_cast<uint32_t>(call.nbytes / sizeof(Raw));
    params.first = call.first;
    return params;
}

}  // namespace

extern "C" {

uint32_t oneshot_abi(void) { return ONESHOT_ABI; }

const char* oneshot_error_text(int code) {
    return cudaGetErrorString(static_cast<cudaError_t>(code));
}

int oneshot_create(void** arena) {
    cudaError_t code = cudaMalloc(arena, sizeof(Arena));
    return code == cudaSuccess ? oneshot_reset(*arena, 0) : code;
}

int oneshot_destroy(void* arena) { return cudaFree(arena); }

int oneshot_reset(void* arena, int byte) {
    cudaError_t code = cudaMemset(arena, byte, offsetof(Arena, staged));
    if (code == cudaSuccess)
        code = cudaMemset(&static_cast<Arena*>(arena)->failed, 0, sizeof(uint32_t));
    return code == cudaSuccess ? cudaDeviceSynchronize() : code;
}

int oneshot_export(void* arena, void* handle) {
    static_assert(sizeof(cudaIpcMemHandle_t) == ONESHOT_HANDLE_BYTES, "the size peers expect");
    return cudaIpcGetMemHandle(static_cast<cudaIpcMemHandle_t*>(handle), arena);
}

int oneshot_import(const void* handle, void** arena) {
    return cudaIpcOpenMemHandle(arena, *static_cast<const cudaIpcMemHandle_t*>(handle),
                                cudaIpcMemLazyEnablePeerAccess);
}

int oneshot_close(void* arena) { return cudaIpcCloseMemHandle(arena); }

int oneshot_reach(int device) {
    int here = 0;
    cudaError_t code = cudaGetDevice(&here);
    if (code != cudaSuccess || here == device) return code;
    code = cudaDeviceEnablePeerAccess(device, 0);
    if (code != cudaErrorPeerAccessAlreadyEnabled) return code;
    cudaGetLastError();  // clears it: access that is enabled already is not an error
    return cudaSuccess;
}

int oneshot_error_create(uint32_t** host, uint32_t** device) {
    cudaError_t code = cudaHostAlloc(reinterpret_cast<void**>(host), sizeof(uint32_t),
                                     cudaHostAllocMapped | cudaHostAllocPortable);
    if (code != cudaSuccess) return code;
    **host = 0;
    return cudaHostGetDevicePointer(reinterpret_cast<void**>(device), *host, 0);
}

int oneshot_error_destroy(uint32_t* host) { return cudaFreeHost(host); }

int oneshot_launch(const oneshot_call* call) {
    if (!is_valid(*call)) return cudaErrorInvalidValue;
    Params params = params_of(*call);
    switch (call->dtype) {
        case ONESHOT_FLOAT32:
            return launch_for_world<float>(*call, params);
        case ONESHOT_FLOAT16:
            return launch_for_world<__half>(*call, params);
        case ONESHOT_BFLOAT16:
            return launch_for_world<__nv_bfloat16>(*call, params);
        default:
            return cudaErrorInvalidValue;
    }
}

}  // extern "C"
