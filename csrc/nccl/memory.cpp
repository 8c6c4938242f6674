// What NCCL keeps for a communicator: registered memory, and sums that scale.
#include "nccl/nccl_communicator.h"

namespace nccl {

// As a symmetric window where the library has those, registered where it has that, else plain.
NcclResult NcclCommunicator::register_memory(RegisteredMemory* memory, size_t nbytes) {
    if (nccl.CommWindowRegister != nullptr)
        return nccl.CommWindowRegister(comm, memory->pointer, nbytes, &memory->window,
                                       NCCL_WINDOW_SYMMETRIC);
    if (nccl.CommRegister != nullptr)
        return nccl.CommRegister(comm, memory->pointer, nbytes, &memory->registration);
    return COMM_OK;
}

void NcclCommunicator::deregister(const RegisteredMemory& memory) {
    if (memory.window != nullptr) nccl.CommWindowDeregister(comm, memory.window);
    if (memory.registration != nullptr) nccl.CommDeregister(comm, memory.registration);
}

// Collective: every rank registers at the same time.
void NcclCommunicator::mem_alloc(size_t nbytes, void** pointer) {
    if (nccl.MemAlloc == nullptr)
        throw failure(COMM_UNSUPPORTED, nccl_not_supported(nccl, "registered memory", 21901));
    auto memory = std::make_unique<RegisteredMemory>();
    bool is_allocated = false;
    try {
        locked("ncclCommWindowRegister", [&] {
            NcclResult code = nccl.MemAlloc(&memory->pointer, nbytes);
            is_allocated = code == COMM_OK;
            return is_allocated ? register_memory(memory.get(), nbytes) : code;
        });
    } catch (const PluginError& failure) {
        bool is_registering = failure.code == COMM_TIMEOUT || failure.code == COMM_REMOTE_ERROR;
        if (is_registering)
            memory.release();  // leaked: NCCL may still write to it
        else if (is_allocated)
            nccl.MemFree(memory->pointer);
        throw;
    }
    registered.push_back(*memory);
    *pointer = memory->pointer;
}

// The work that uses it must have ended.
void NcclCommunicator::mem_free(void* pointer) {
    locked("ncclMemFree", [&] {
        for (size_t i = 0; i < registered.size(); ++i) {
            if (registered[i].pointer != pointer) continue;
            deregister(registered[i]);
            registered.erase(registered.begin() + i);
            break;
        }
        return nccl.MemFree(pointer);
    });
}

void NcclCommunicator::premul_sum_create(const void* scalar, comm_dtype dtype, comm_op* op) {
    if (dtype >= COMM_BOOL)
        throw failure(COMM_UNSUPPORTED,
                      "a scaled sum of this dtype does not exist in NCCL. Convert it");
    locked("ncclRedOpCreatePreMulSum", [&] {
        NcclResult code = nccl.RedOpCreatePreMulSum(op, const_cast<void*>(scalar), dtype,
                                                    NCCL_SCALAR_ON_HOST, comm);
        if (code == COMM_OK) scaled_sums.push_back({*op, dtype});
        return code;
    });
}

void NcclCommunicator::op_destroy(comm_op op) {
    locked("ncclRedOpDestroy", [&] {
        for (size_t i = 0; i < scaled_sums.size(); ++i) {
            if (scaled_sums[i].op != op) continue;
            scaled_sums.erase(scaled_sums.begin() + i);
            return nccl.RedOpDestroy(op, comm);
        }
        return NcclResult{COMM_OK};
    });
}

}  // namespace nccl
