// SGLang's one-shot push allreduce behind a C interface, for the table `vllm` of benchmarks/gpu.py.
// `make gpu-parts` compiles it with the sources in SGLang's wheel, which it fetches.
#include "custom_all_reduce.cuh"

extern "C" {

// Two ranks, of bfloat16. arenas: by rank, memory that this process has mapped, zeroed before the
// first call, with room for four times the tensor. counters: of this rank, a word for each block.
int sglang_sum(void* const* arenas, void* counters, void* in, void* out, int count, int rank,
               void* stream) {
    constexpr uint32_t WORLD = 2;
    sglang::AllReducePushParams<WORLD> params = {};
    params.input = in;
    params.output = out;
    params.num_vecs = count / 8;
    params.rank = rank;
    for (uint32_t peer = 0; peer < WORLD; ++peer)
        params.ws.workspaces[peer] = static_cast<uint8_t*>(arenas[peer]);
    params.ws.counter = static_cast<sglang::device::distributed::Counter*>(counters);
    params.ws.slot_bytes = count * 2;
    uint32_t blocks = (params.num_vecs + 127) / 128;
    sglang::all_reduce_1shot_push_kernel<sglang::bf16_t, WORLD, false>
        <<<blocks, 128, 0, static_cast<cudaStream_t>(stream)>>>(params);
    return cudaGetLastError();
}

int sglang_clear(void* memory, size_t nbytes) {
    cudaError_t code = cudaMemset(memory, 0, nbytes);
    return code == cudaSuccess ? cudaDeviceSynchronize() : code;
}

}  // extern "C"
