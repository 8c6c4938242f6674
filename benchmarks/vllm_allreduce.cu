// vLLM's custom allreduce behind a C interface, for the table `peers` of benchmarks/gpu.py.
// `make gpu-parts` compiles it with the header of vLLM's source distribution, which it fetches.
#include "custom_all_reduce.cuh"

extern "C" {

size_t vllm_signal_bytes(void) { return sizeof(vllm::Signal); }

// signals: by rank, zeroed memory that this process has mapped. rank_data: of the device.
void* vllm_create(void** signals, void* rank_data, size_t nbytes, int rank, int world) {
    return new vllm::CustomAllreduce(reinterpret_cast<vllm::Signal**>(signals), rank_data, nbytes,
                                     rank, world);
}

// by rank: the same buffer of each.
void vllm_register(void* allreduce, void** buffers) {
    static_cast<vllm::CustomAllreduce*>(allreduce)->register_buffer(buffers);
}

// In place. Eagerly through the registered buffer, as vLLM does.
void vllm_sum(void* allreduce, void* buffer, void* tensor, int count, void* stream) {
    cudaStream_t on = static_cast<cudaStream_t>(stream);
    cudaStreamCaptureStatus status;
    cudaStreamIsCapturing(on, &status);
    nv_bfloat16* data = static_cast<nv_bfloat16*>(tensor);
    nv_bfloat16* source = data;
    if (status == cudaStreamCaptureStatusNone) {
        source = static_cast<nv_bfloat16*>(buffer);
        cudaMemcpyAsync(source, data, sizeof(nv_bfloat16) * count, cudaMemcpyDeviceToDevice, on);
    }
    static_cast<vllm::CustomAllreduce*>(allreduce)->allreduce<nv_bfloat16>(on, source, data, count);
}

}  // extern "C"
