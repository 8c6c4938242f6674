// What NCCL keeps for a communicator: registered memory, and reductions that scale.
#include "nccl/nccl_communicator.h"

namespace nccl {

namespace {

// Symmetric where the library has windows, registered where it has that, plain otherwise.
NcclResult register_window(Group& group, Window* window, size_t nbytes) {
    if (group.nccl.CommWindowRegister != nullptr)
        return group.nccl.CommWindowRegister(group.comm, window->pointer, nbytes, &window->window,
                                             NCCL_WINDOW_SYMMETRIC);
    if (group.nccl.CommRegister != nullptr)
        return group.nccl.CommRegister(group.comm, window->pointer, nbytes, &window->registration);
    return COMM_OK;
}

}  // namespace

void deregister_window(Group& group, const Window& window) {
    if (window.window != nullptr) group.nccl.CommWindowDeregister(group.comm, window.window);
    if (window.registration != nullptr) group.nccl.CommDeregister(group.comm, window.registration);
}

// Collective: every rank registers at once.
comm_result do_mem_alloc(comm_t comm, size_t nbytes, void** pointer) {
    if (comm->group->nccl.MemAlloc == nullptr)
        return fail(*comm->group, COMM_UNSUPPORTED,
                    nccl_not_supported(comm->group->nccl, "registered memory", 21901));
    auto window = std::make_unique<Window>(Window{nullptr, nullptr, nullptr});  // filled in later
    NcclResult allocated = COMM_OK;
    comm_result code = locked(comm, "ncclCommWindowRegister", [&](Group& group) {
        allocated = group.nccl.MemAlloc(&window->pointer, nbytes);
        return allocated != COMM_OK ? allocated : register_window(group, window.get(), nbytes);
    });
    if (code == COMM_OK) {
        comm->group->windows.push_back(*window);
        *pointer = window->pointer;
    } else if (allocated == COMM_OK && code != COMM_TIMEOUT && code != COMM_REMOTE_ERROR) {
        comm->group->nccl.MemFree(window->pointer);
    } else {
        window.release();  // NCCL may still write to it
    }
    return code;
}

// The work that uses it must have ended.
comm_result do_mem_free(comm_t comm, void* pointer) {
    return locked(comm, "ncclMemFree", [&](Group& group) {
        for (size_t i = 0; i < group.windows.size(); ++i) {
            if (group.windows[i].pointer != pointer) continue;
            deregister_window(group, group.windows[i]);
            group.windows.erase(group.windows.begin() + i);
            break;
        }
        return group.nccl.MemFree(pointer);
    });
}

comm_result do_premul_sum_create(comm_t comm, const void* scalar, comm_dtype dtype, comm_op* op) {
    Group& group = *comm->group;
    if (dtype == COMM_BOOL || dtype == COMM_INT16)
        return fail(group, COMM_UNSUPPORTED,
                    "a scaled sum of bool or int16 does not exist in NCCL");
    return locked(comm, "ncclRedOpCreatePreMulSum", [&](Group& mine) {
        NcclResult code = mine.nccl.RedOpCreatePreMulSum(op, const_cast<void*>(scalar), dtype,
                                                         NCCL_SCALAR_ON_HOST, mine.comm);
        if (code == COMM_OK) mine.scaled_sums.push_back({*op, dtype});
        return code;
    });
}

comm_result do_op_destroy(comm_t comm, comm_op op) {
    return locked(comm, "ncclRedOpDestroy", [&](Group& group) {
        for (size_t i = 0; i < group.scaled_sums.size(); ++i) {
            if (group.scaled_sums[i].op != op) continue;
            group.scaled_sums.erase(group.scaled_sums.begin() + i);
            return group.nccl.RedOpDestroy(op, group.comm);
        }
        return NcclResult{COMM_OK};
    });
}

}  // namespace nccl
