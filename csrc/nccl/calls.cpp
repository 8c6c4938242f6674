// The collectives, sends and receives, each one call of NCCL on a stream.
#include "nccl/dtype.h"
#include "nccl/nccl_communicator.h"

namespace nccl {

namespace {

constexpr int FLOAT8_CHIP = 9;  // sm_90 on

const char* const CALL_NAMES[] = {"allreduce",      "broadcast", "reduce", "allgather",
                                  "reduce_scatter", "alltoall",  "send",   "recv"};

// One name for what NCCL may connect apart: the call, its peer or op, its dtype, its size class.
uint64_t connection(Call call, int other, NcclDtype dtype, uint64_t nbytes) {
    uint64_t size_class = 64 - __builtin_clzll(nbytes | 1);
    return static_cast<uint64_t>(call) << 56 | size_class << 48 |
           static_cast<uint64_t>(dtype & 0xff) << 40 | static_cast<uint32_t>(other);
}

// NCCL connects an algorithm at its first use, which allocates; inside a capture that fails, and
// takes the capture with it. So the first use must be outside.
bool may_run(Group& group, Call call, int other, NcclDtype dtype, uint64_t nbytes,
             NcclStream stream) {
    bool capturing = group.graphs.is_capturing(group.device, stream);
    if (group.nranks == 1) return true;
    uint64_t name = connection(call, other, dtype, nbytes);
    if (!capturing) return group.connected.insert(name), true;
    if (group.connected.count(name) != 0) return true;
    fail(group, COMM_INVALID_USAGE,
         std::string(CALL_NAMES[call]) + " of " + std::to_string(nbytes) +
             " bytes would run for the first time inside the capture of a graph, where its "
             "connections cannot be made. Run the same call once before the capture");
    return false;
}

// Runs `body` under the communicator's lock, on its stream, if it may be run there.
template <class Body>
comm_result enqueue(comm_t comm, Call call, int other, Carried carried, uint64_t size,
                    NcclStream stream, Body body) {
    Group& group = *comm->group;
    std::lock_guard<std::timed_mutex> lock(group.inside);
    if (group.aborting.load(std::memory_order_acquire)) return fail_aborted(group);
    if (group.stream != nullptr) stream = group.stream;
    if (!may_run(group, call, other, carried.dtype, size, stream)) return COMM_INVALID_USAGE;
    CurrentDevice device(group.device, group.ordinal);
    return settle(group, CALL_NAMES[call], body(group, stream));
}

const ScaledSum* find_scaled_sum(const Group& group, comm_op op) {
    for (const ScaledSum& sum : group.scaled_sums)
        if (sum.op == op) return &sum;
    return nullptr;
}

// One rank has nothing to average. NCCL would scale by 1 then, with a kernel that it lacks for
// 8-bit floats; its refusal would be the end of the communicator.
comm_result as_reduced_alone(Group& group, const std::string& what, comm_dtype dtype, NcclOp* op) {
    if (*op == COMM_AVG) *op = COMM_SUM;
    if (*op <= COMM_AVG || !is_float8(dtype)) return COMM_OK;
    return fail(
        group, COMM_UNSUPPORTED,
        what + "8-bit floats with a scaled sum needs two ranks in NCCL. Multiply the tensor");
}

// Can NCCL reduce this dtype with this op? Asked before anything is enqueued.
comm_result as_reduced(comm_t comm, Call call, comm_dtype dtype, comm_op op, uint64_t count,
                       Carried* carried, NcclOp* nccl_op) {
    Group& group = *comm->group;
    std::string what = std::string(CALL_NAMES[call]) + " of ";
    *carried = {dtype, count};
    *nccl_op = op;
    if (dtype == COMM_INT16)
        return fail(group, COMM_UNSUPPORTED,
                    what + "int16 does not exist in NCCL. Convert to int32 and back");
    if (is_float8(dtype) && group.nccl.version < NCCL_FIRST_FLOAT8)
        return fail(
            group, COMM_UNSUPPORTED,
            nccl_not_supported(group.nccl, (what + "8-bit floats").c_str(), NCCL_FIRST_FLOAT8));
    if (is_float8(dtype) && group.chip != 0 && group.chip < FLOAT8_CHIP)
        return fail(group, COMM_UNSUPPORTED,
                    what + "8-bit floats needs a GPU of sm_90 or newer, this one is of sm_" +
                        std::to_string(group.chip) + "x. Convert to bfloat16 and back");
    if (op > COMM_AVG) {
        const ScaledSum* sum = find_scaled_sum(group, op);
        if (sum == nullptr || sum->dtype != dtype)
            return fail(group, COMM_INVALID_ARGUMENT,
                        what +
                            "this dtype with a scaled sum that was made for another dtype or "
                            "communicator, or freed. Make one with scaled_sum()");
    }
    if (dtype == COMM_BOOL) {
        carried->dtype = COMM_UINT8;
        *nccl_op = bool_op(op);
    }
    return group.nranks == 1 ? as_reduced_alone(group, what, dtype, nccl_op) : COMM_OK;
}

// As sends and receives of one group, before 2.28.3.
NcclResult grouped_alltoall(Group& group, const char* send, char* recv, Carried carried,
                            NcclStream stream) {
    uint64_t stride = carried.count * size_of(carried.dtype);
    NcclResult code = group.nccl.GroupStart();
    for (int peer = 0; peer < group.nranks && code == COMM_OK; ++peer) {
        code = group.nccl.Send(send + peer * stride, carried.count, carried.dtype, peer, group.comm,
                               stream);
        if (code == COMM_OK || code == COMM_IN_PROGRESS)
            code = group.nccl.Recv(recv + peer * stride, carried.count, carried.dtype, peer,
                                   group.comm, stream);
        if (code == COMM_IN_PROGRESS) code = COMM_OK;
    }
    NcclResult end = group.nccl.GroupEnd();
    return code != COMM_OK ? code : end;
}

}  // namespace

comm_result do_allreduce(comm_t comm, const void* send, void* recv, uint64_t count,
                         comm_dtype dtype, comm_op op, comm_stream stream) {
    Carried carried;
    NcclOp nccl_op;
    comm_result code = as_reduced(comm, ALLREDUCE, dtype, op, count, &carried, &nccl_op);
    if (code != COMM_OK) return code;
    return enqueue(comm, ALLREDUCE, nccl_op, carried, count * size_of(dtype), stream,
                   [&](Group& group, NcclStream on) {
                       return group.nccl.AllReduce(send, recv, count, carried.dtype, nccl_op,
                                                   group.comm, on);
                   });
}

comm_result do_reduce(comm_t comm, const void* send, void* recv, uint64_t count, comm_dtype dtype,
                      comm_op op, int32_t dst, comm_stream stream) {
    Carried carried;
    NcclOp nccl_op;
    comm_result code = as_reduced(comm, REDUCE, dtype, op, count, &carried, &nccl_op);
    if (code != COMM_OK) return code;
    return enqueue(comm, REDUCE, nccl_op, carried, count * size_of(dtype), stream,
                   [&](Group& group, NcclStream on) {
                       return group.nccl.Reduce(send, recv, count, carried.dtype, nccl_op, dst,
                                                group.comm, on);
                   });
}

comm_result do_reduce_scatter(comm_t comm, const void* send, void* recv, uint64_t count,
                              comm_dtype dtype, comm_op op, comm_stream stream) {
    Carried carried;
    NcclOp nccl_op;
    comm_result code = as_reduced(comm, REDUCE_SCATTER, dtype, op, count, &carried, &nccl_op);
    if (code != COMM_OK) return code;
    return enqueue(comm, REDUCE_SCATTER, nccl_op, carried, count * size_of(dtype), stream,
                   [&](Group& group, NcclStream on) {
                       return group.nccl.ReduceScatter(send, recv, count, carried.dtype, nccl_op,
                                                       group.comm, on);
                   });
}

comm_result do_broadcast(comm_t comm, void* buffer, uint64_t count, comm_dtype dtype, int32_t src,
                         comm_stream stream) {
    Carried carried = as_moved(dtype, count);
    return enqueue(comm, BROADCAST, 0, carried, count * size_of(dtype), stream,
                   [&](Group& group, NcclStream on) {
                       return group.nccl.Broadcast(buffer, buffer, carried.count, carried.dtype,
                                                   src, group.comm, on);
                   });
}

comm_result do_allgather(comm_t comm, const void* send, void* recv, uint64_t count,
                         comm_dtype dtype, comm_stream stream) {
    Carried carried = as_moved(dtype, count);
    return enqueue(comm, ALLGATHER, 0, carried, count * size_of(dtype), stream,
                   [&](Group& group, NcclStream on) {
                       return group.nccl.AllGather(send, recv, carried.count, carried.dtype,
                                                   group.comm, on);
                   });
}

comm_result do_alltoall(comm_t comm, const void* send, void* recv, uint64_t count, comm_dtype dtype,
                        comm_stream stream) {
    Carried carried = as_moved(dtype, count);
    return enqueue(comm, ALLTOALL, 0, carried, count * size_of(dtype), stream,
                   [&](Group& group, NcclStream on) {
                       if (group.nccl.AlltoAll != nullptr)
                           return group.nccl.AlltoAll(send, recv, carried.count, carried.dtype,
                                                      group.comm, on);
                       return grouped_alltoall(group, static_cast<const char*>(send),
                                               static_cast<char*>(recv), carried, on);
                   });
}

comm_result do_send(comm_t comm, const void* buffer, uint64_t count, comm_dtype dtype, int32_t dst,
                    comm_stream stream) {
    Carried carried = as_moved(dtype, count);
    return enqueue(
        comm, SEND, dst, carried, count * size_of(dtype), stream, [&](Group& group, NcclStream on) {
            return group.nccl.Send(buffer, carried.count, carried.dtype, dst, group.comm, on);
        });
}

comm_result do_recv(comm_t comm, void* buffer, uint64_t count, comm_dtype dtype, int32_t src,
                    comm_stream stream) {
    Carried carried = as_moved(dtype, count);
    return enqueue(
        comm, RECV, src, carried, count * size_of(dtype), stream, [&](Group& group, NcclStream on) {
            return group.nccl.Recv(buffer, carried.count, carried.dtype, src, group.comm, on);
        });
}

// NCCL has no barrier: an allreduce of a word of our own that nobody reads.
comm_result do_barrier(comm_t comm, comm_stream stream) {
    void* word = comm->group->word;
    if (word == nullptr)
        return fail(*comm->group, COMM_UNSUPPORTED, "no CUDA runtime is loaded for the barrier");
    return do_allreduce(comm, word, word, 1, COMM_INT32, COMM_MAX, stream);
}

comm_result do_group_start(comm_t comm) {
    return locked(comm, "ncclGroupStart", [](Group& group) { return group.nccl.GroupStart(); });
}

comm_result do_group_end(comm_t comm) {
    return locked(comm, "ncclGroupEnd", [](Group& group) { return group.nccl.GroupEnd(); });
}

comm_result do_async_error(comm_t comm) {
    Group& group = *comm->group;
    std::unique_lock<std::timed_mutex> lock(group.inside, std::try_to_lock);
    if (!lock.owns_lock() || group.ended) return COMM_OK;  // whoever holds it learns of errors
    if (group.aborting.load(std::memory_order_acquire)) return fail_aborted(group);
    NcclResult state = COMM_OK;
    NcclResult code = group.nccl.CommGetAsyncError(group.comm, &state);
    if (code == COMM_OK) code = state == COMM_IN_PROGRESS ? COMM_OK : state;
    return code == COMM_OK ? COMM_OK : fail_nccl(group, "ncclCommGetAsyncError", code);
}

}  // namespace nccl
