// One communicator over NCCL, and what every file about it needs: its errors, and how to wait.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "abi/communicator.h"
#include "nccl/bounded.h"
#include "nccl/device.h"
#include "nccl/library.h"

namespace nccl {

enum Call { ALLREDUCE, BROADCAST, REDUCE, ALLGATHER, REDUCE_SCATTER, ALLTOALL, SEND, RECV };

struct Window {
    void* pointer;
    NcclWindow window;
    void* registration;
};

struct ScaledSum {
    NcclOp op;
    comm_dtype dtype;
};

struct Group {
    NcclLibrary nccl;
    DeviceLibrary device;
    NcclComm comm = nullptr;
    int rank = 0, nranks = 1, ordinal = 0, chip = 0;
    std::chrono::milliseconds timeout{0};
    bool blocking = false;
    NcclStream stream = nullptr;  // NULL: the caller's
    int max_ctas = INT_MIN;
    std::timed_mutex inside;  // held while NCCL works for this communicator
    std::atomic<bool> aborting{false};
    std::atomic<bool> ended{false};
    GraphCount graphs;
    std::vector<Window> windows;
    std::vector<ScaledSum> scaled_sums;
    std::unordered_set<uint64_t> connected;  // what has run outside a capture
    void* word = nullptr;                    // for the barrier
    std::string error;
};

}  // namespace nccl

struct comm_s {
    std::shared_ptr<nccl::Group> group;  // shared with what was left behind by run_bounded
};

namespace nccl {

using Shared = std::shared_ptr<Group>;

comm_result fail(Group& group, comm_result code, const std::string& text);
comm_result fail_aborted(Group& group);
comm_result fail_nccl(Group& group, const char* call, NcclResult code);

// Waits until NCCL has done what `code` answered: at once, unless it was put off. The state is
// asked for even after a success, for registration answers so before it is done.
comm_result settle(Group& group, const char* call, NcclResult code);
// Ends a communicator by force, aside if that takes long.
void abort_aside(const Shared& group);
NcclConfig config_of(const Group& group);
void deregister_window(Group& group, const Window& window);

// Runs `body` under the communicator's lock.
template <class Body>
comm_result locked(comm_t comm, const char* call, Body body) {
    Group& group = *comm->group;
    std::lock_guard<std::timed_mutex> lock(group.inside);
    if (group.aborting.load(std::memory_order_acquire)) return fail_aborted(group);
    CurrentDevice device(group.device, group.ordinal);
    return settle(group, call, body(group));
}

// The entries of the table, by file.
// nccl/init.cpp
comm_result do_probe(int32_t* score);
comm_result do_get_unique_id(void* id);
comm_result do_init(comm_t* comm, const comm_init_args* args);
const char* do_last_error(comm_t comm);
// nccl/calls.cpp
comm_result do_allreduce(comm_t comm, const void* send, void* recv, uint64_t count,
                         comm_dtype dtype, comm_op op, comm_stream stream);
comm_result do_reduce(comm_t comm, const void* send, void* recv, uint64_t count, comm_dtype dtype,
                      comm_op op, int32_t dst, comm_stream stream);
comm_result do_reduce_scatter(comm_t comm, const void* send, void* recv, uint64_t count,
                              comm_dtype dtype, comm_op op, comm_stream stream);
comm_result do_broadcast(comm_t comm, void* buffer, uint64_t count, comm_dtype dtype, int32_t src,
                         comm_stream stream);
comm_result do_allgather(comm_t comm, const void* send, void* recv, uint64_t count,
                         comm_dtype dtype, comm_stream stream);
comm_result do_alltoall(comm_t comm, const void* send, void* recv, uint64_t count, comm_dtype dtype,
                        comm_stream stream);
comm_result do_send(comm_t comm, const void* buffer, uint64_t count, comm_dtype dtype, int32_t dst,
                    comm_stream stream);
comm_result do_recv(comm_t comm, void* buffer, uint64_t count, comm_dtype dtype, int32_t src,
                    comm_stream stream);
comm_result do_barrier(comm_t comm, comm_stream stream);
comm_result do_group_start(comm_t comm);
comm_result do_group_end(comm_t comm);
comm_result do_async_error(comm_t comm);
// nccl/memory.cpp
comm_result do_mem_alloc(comm_t comm, size_t nbytes, void** pointer);
comm_result do_mem_free(comm_t comm, void* pointer);
comm_result do_premul_sum_create(comm_t comm, const void* scalar, comm_dtype dtype, comm_op* op);
comm_result do_op_destroy(comm_t comm, comm_op op);
// nccl/finalize.cpp
comm_result do_split(comm_t comm, int32_t color, int32_t key, comm_t* child);
comm_result do_finalize(comm_t comm);
comm_result do_abort(comm_t comm);
comm_result do_destroy(comm_t comm);

}  // namespace nccl
