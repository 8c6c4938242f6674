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
// - Launches of one rank must follow each other. The arena has an owner while one runs, so that one
//   on another stream is noticed.
// - All blocks that wait for each other run at once: two fit on a multiprocessor, so that eight
//   ranks of one launch fit on a GPU of 96.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>

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
    uint32_t failed;    // a wait ended in vain, so later results would be wrong
    uint32_t owner;     // the tag of the launch that runs, or 0
    uint32_t finished;  // blocks of it
    alignas(128) Flag arrived[STAGES][ONESHOT_MAX_BLOCKS][ONESHOT_MAX_RANKS];  // [][][peer]
    alignas(128) Raw staged[2][ONESHOT_MAX_BYTES / sizeof(Raw)];
    alignas(128) Raw reduced[2][ONESHOT_MAX_BYTES / sizeof(Raw)];
};

enum Word { PROBLEM, ABORT, NUM_WORDS };

struct Params {
    const Raw* in[ONESHOT_MAX_RANKS];
    Raw* out[ONESHOT_MAX_RANKS];
    Arena* arena[ONESHOT_MAX_RANKS];
    uint32_t* words;  // of host memory, by Word
    uint64_t timeout_ns;
    uint32_t tag;  // differs between launches
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

enum Outcome { ARRIVED, ABORTED, TIMED_OUT };

// Waits until *flag is `generation`, or one more.
__device__ Outcome wait_for(const uint32_t* flag, uint32_t generation, const Params& params) {
    uint64_t start = now_ns();
    for (uint32_t spin = 1;; ++spin) {
        if (load_acquire(flag) - generation <= 1) return ARRIVED;
        if (spin % SPINS_BETWEEN_CLOCKS != 0) continue;
        if (load_acquire(&params.words[ABORT]) != 0) return ABORTED;
        if (now_ns() - start > params.timeout_ns) return TIMED_OUT;
    }
}

__device__ void report(const Params& params, int rank, int missing, int stage) {
    params.arena[rank]->failed = 1;
    params.words[PROBLEM] = 1 + rank + 16 * missing + 256 * stage;
    __threadfence_system();
}

// A barrier of the same block of all ranks. Called by all threads; false, for all of them, if a
// rank did not arrive in time.
template <int WORLD>
__device__ bool barrier(const Params& params, int rank, int stage, uint32_t generation) {
    __syncthreads();  // what the block wrote happens before the release below
    Outcome outcome = ARRIVED;
    int peer = threadIdx.x;
    if (peer < WORLD) {
        store_release(&params.arena[peer]->arrived[stage][blockIdx.x][rank].generation, generation);
        const Flag& flag = params.arena[rank]->arrived[stage][blockIdx.x][peer];
        outcome = wait_for(&flag.generation, generation, params);
        if (outcome == ABORTED) params.arena[rank]->failed = 1;
        if (outcome == TIMED_OUT) report(params, rank, peer, stage);
    }
    return __syncthreads_and(outcome == ARRIVED) != 0;
}

// False, for all threads of a block, if an earlier launch failed or still runs. Threads of two
// warps ask for the two, at the same time.
__device__ bool may_start(const Params& params, int rank) {
    Arena& arena = *params.arena[rank];
    bool refused = threadIdx.x == 0 && arena.failed != 0;
    if (threadIdx.x == blockDim.x - 1) {
        uint32_t owner = atomicCAS(&arena.owner, 0, params.tag);
        refused = owner != 0 && owner != params.tag;
        if (refused && arena.failed == 0) report(params, rank, rank, ONESHOT_OVERLAP);
    }
    return __syncthreads_or(refused) == 0;
}

__device__ uint32_t next_generation(const Params& params, int rank) {
    return params.arena[rank]->generation[blockIdx.x] + 1;
}

// The last block of a launch releases the arena.
__device__ void finish(const Params& params, int rank, uint32_t generation) {
    Arena& arena = *params.arena[rank];
    __syncthreads();  // every thread has read the counter, and the buffers
    for (int i = blockIdx.x + gridDim.x * threadIdx.x; i < ONESHOT_MAX_BLOCKS;
         i += gridDim.x * blockDim.x)
        arena.generation[i] = generation;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && atomicInc(&arena.finished, gridDim.x - 1) == gridDim.x - 1) {
        __threadfence();
        atomicExch(&arena.owner, 0);
    }
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
    if (!may_start(params, rank)) return;
    uint32_t generation = next_generation(params, rank);
    int buffer = generation & 1;
    uint32_t begin = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
    for (uint32_t at = begin; at < params.num_vectors; at += step)
        params.arena[rank]->staged[buffer][at] = params.in[rank][at];
    if (!barrier<WORLD>(params, rank, 0, generation)) return;
    for (uint32_t at = begin; at < params.num_vectors; at += step)
        params.out[rank][at] = gather_and_add<T, WORLD>(params, buffer, at);
    finish(params, rank, generation);
}

template <class T, int WORLD>
__global__ void __launch_bounds__(THREADS, BLOCKS_AT_ONCE) two_shot(Params params) {
    int rank = params.first + blockIdx.y;
    if (!may_start(params, rank)) return;
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
    finish(params, rank, generation);
}

// ---- launching ----

template <class T, int WORLD>
struct Kernels {
    static cudaError_t load() {
        cudaFuncAttributes attributes;
        cudaError_t code = cudaFuncGetAttributes(&attributes, one_shot<T, WORLD>);
        return code != cudaSuccess ? code : cudaFuncGetAttributes(&attributes, two_shot<T, WORLD>);
    }

    static cudaError_t launch(const oneshot_call& call, Params params) {
        dim3 grid(call.blocks, call.num_here);
        auto kernel = call.algorithm == ONESHOT_TWO ? two_shot<T, WORLD> : one_shot<T, WORLD>;
        void* arguments[] = {&params};
        // cudaGetLastError would also tell what failed before, of a launch that did not.
        return cudaLaunchKernel(kernel, grid, dim3(THREADS), arguments, 0,
                                static_cast<cudaStream_t>(call.stream));
    }
};

// action(Kernels<T, world>())
template <class T, class Action>
cudaError_t for_world(int world, Action action) {
    switch (world) {
        case 2:
            return action(Kernels<T, 2>());
        case 4:
            return action(Kernels<T, 4>());
        case 6:
            return action(Kernels<T, 6>());
        case 8:
            return action(Kernels<T, 8>());
        default:
            return cudaErrorInvalidValue;
    }
}

template <class Action>
cudaError_t for_dtype(int dtype, int world, Action action) {
    switch (dtype) {
        case ONESHOT_FLOAT32:
            return for_world<float>(world, action);
        case ONESHOT_FLOAT16:
            return for_world<__half>(world, action);
        case ONESHOT_BFLOAT16:
            return for_world<__nv_bfloat16>(world, action);
        default:
            return cudaErrorInvalidValue;
    }
}

void release_graph(void* live) {
    static_cast<std::atomic<int>*>(live)->fetch_sub(1, std::memory_order_acq_rel);
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

bool is_valid(const oneshot_call& call) {
    bool valid = call.struct_size >= sizeof(oneshot_call) && call.first >= 0 && call.num_here > 0 &&
                 call.first + call.num_here <= call.world && call.world <= ONESHOT_MAX_RANKS &&
                 call.state != nullptr && call.blocks > 0 && call.blocks <= ONESHOT_MAX_BLOCKS &&
                 call.nbytes > 0 && call.nbytes % sizeof(Raw) == 0 &&
                 call.nbytes <= ONESHOT_MAX_BYTES;
    for (int rank = call.first; valid && rank < call.first + call.num_here; ++rank)
        valid = is_aligned(call.in[rank]) && is_aligned(call.out[rank]);
    return valid;
}

}  // namespace

struct oneshot_state {
    uint32_t* words;            // as this process sees them
    uint32_t* words_on_device;  // as the kernels do
    uint32_t num_launches = 0;
    std::atomic<int> live_graphs{0};
    unsigned long long last_capture = 0;  // its id
};

namespace {

// Counts the graph that captures the stream, once. It carries an object that dies with it.
cudaError_t note_capture(oneshot_state& state, cudaStream_t stream) {
    cudaStreamCaptureStatus status;
    unsigned long long id = 0;
    cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
    cudaError_t code =
        cudaStreamGetCaptureInfo(stream, &status, &id, &graph, nullptr, nullptr, nullptr);
#else
    cudaError_t code = cudaStreamGetCaptureInfo_v2(stream, &status, &id, &graph, nullptr, nullptr);
#endif
    if (code != cudaSuccess || status != cudaStreamCaptureStatusActive || id == state.last_capture)
        return code;
    cudaUserObject_t object = nullptr;
    code = cudaUserObjectCreate(&object, &state.live_graphs, release_graph, 1,
                                cudaUserObjectNoDestructorSync);
    if (code != cudaSuccess) return code;
    state.live_graphs.fetch_add(1, std::memory_order_acq_rel);
    code = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
    if (code != cudaSuccess) return cudaUserObjectRelease(object, 1), code;
    state.last_capture = id;
    return cudaSuccess;
}

Params params_of(const oneshot_call& call) {
    Params params = {};
    for (int rank = 0; rank < call.world; ++rank) {
        params.in[rank] = static_cast<const Raw*>(call.in[rank]);
        params.out[rank] = static_cast<Raw*>(call.out[rank]);
        params.arena[rank] = static_cast<Arena*>(call.arena[rank]);
    }
    params.words = call.state->words_on_device;
    params.tag = ++call.state->num_launches;
    if (params.tag == 0) params.tag = ++call.state->num_launches;
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
    if (cudaError_t code = cudaMalloc(arena, sizeof(Arena))) return code;
    int code = oneshot_reset(*arena, 0);
    if (code != cudaSuccess) cudaFree(*arena);
    return code;
}

int oneshot_destroy(void* arena) { return cudaFree(arena); }

int oneshot_reset(void* arena, int byte) {
    cudaError_t code = cudaMemset(arena, byte, offsetof(Arena, staged));
    if (code == cudaSuccess)  // and the two after it
        code = cudaMemset(&static_cast<Arena*>(arena)->failed, 0, 3 * sizeof(uint32_t));
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

int oneshot_state_create(oneshot_state** state) {
    void *words = nullptr, *words_on_device = nullptr;
    cudaError_t code = cudaHostAlloc(&words, NUM_WORDS * sizeof(uint32_t),
                                     cudaHostAllocMapped | cudaHostAllocPortable);
    if (code != cudaSuccess) return code;
    code = cudaHostGetDevicePointer(&words_on_device, words, 0);
    if (code != cudaSuccess) return cudaFreeHost(words), code;
    *state =
        new oneshot_state{static_cast<uint32_t*>(words), static_cast<uint32_t*>(words_on_device)};
    (*state)->words[PROBLEM] = (*state)->words[ABORT] = 0;
    return cudaSuccess;
}

int oneshot_state_destroy(oneshot_state* state) {
    cudaError_t code = cudaFreeHost(state->words);
    delete state;
    return code;
}

uint32_t oneshot_state_problem(const oneshot_state* state) {
    return __atomic_load_n(&state->words[PROBLEM], __ATOMIC_ACQUIRE);
}

void oneshot_state_abort(oneshot_state* state) {
    __atomic_store_n(&state->words[ABORT], 1, __ATOMIC_RELEASE);
}

int oneshot_state_graphs(const oneshot_state* state) {
    return state->live_graphs.load(std::memory_order_acquire);
}

int oneshot_load(int world) {
    auto load = [](auto kernels) { return kernels.load(); };
    for (int dtype : {ONESHOT_FLOAT16, ONESHOT_FLOAT32, ONESHOT_BFLOAT16})
        if (cudaError_t code = for_dtype(dtype, world, load)) return code;
    return cudaSuccess;
}

int oneshot_launch(const oneshot_call* call) {
    if (!is_valid(*call)) return cudaErrorInvalidValue;
    cudaError_t code = note_capture(*call->state, static_cast<cudaStream_t>(call->stream));
    if (code != cudaSuccess) return code;
    Params params = params_of(*call);
    return for_dtype(call->dtype, call->world,
                     [&](auto kernels) { return kernels.launch(*call, params); });
}

}  // extern "C"
