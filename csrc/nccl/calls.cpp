// The collectives, sends and receives: each is one call of NCCL on a stream.
#include "nccl/nccl_communicator.h"

namespace nccl {

namespace {

constexpr int FLOAT8_SM_MAJOR = 9;  // sm_90 on

const char* name_of(Operation operation) {
    static const char* const names[] = {"allreduce",      "broadcast", "reduce", "allgather",
                                        "reduce_scatter", "alltoall",  "send",   "recv"};
    return names[static_cast<int>(operation)];
}

uint64_t size_of(NcclDtype dtype) {
    static const uint8_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[dtype];
}

bool is_float8(comm_dtype dtype) { return dtype == COMM_FLOAT8_E4M3 || dtype == COMM_FLOAT8_E5M2; }

bool is_complex(comm_dtype dtype) { return dtype == COMM_COMPLEX64 || dtype == COMM_COMPLEX128; }

// Complex numbers as pairs, whose sums are right.
Payload pairs(comm_dtype dtype, uint64_t count) {
    return {dtype == COMM_COMPLEX64 ? COMM_FLOAT32 : COMM_FLOAT64, 2 * count};
}

// What NCCL does not know is moved as bytes, and so are the 8-bit floats, for which some libraries
// and GPUs lack kernels that copies do not need.
Payload payload_of_move(comm_dtype dtype, uint64_t count) {
    if (dtype == COMM_INT16 || dtype == COMM_UINT16) return {COMM_UINT8, 2 * count};
    if (is_complex(dtype)) return pairs(dtype, count);
    bool as_bytes = dtype == COMM_BOOL || is_float8(dtype) || dtype >= COMM_FLOAT8_E4M3FNUZ;
    return {as_bytes ? NcclDtype{COMM_UINT8} : dtype, count};
}

// A bool is a byte of 0 or 1: max is "any", min and prod are "all".
NcclOp op_of_bool(comm_op op) { return op == COMM_PROD ? COMM_MIN : op; }

// NCCL needs its kernels for 8-bit floats, and a GPU that can run them.
void check_float8(const NcclCommunicator& communicator, const std::string& subject) {
    if (communicator.nccl.version < NCCL_FIRST_FLOAT8)
        throw communicator.failure(
            COMM_UNSUPPORTED,
            nccl_not_supported(communicator.nccl, (subject + "8-bit floats").c_str(),
                               NCCL_FIRST_FLOAT8));
    if (communicator.sm_major != 0 && communicator.sm_major < FLOAT8_SM_MAJOR)
        throw communicator.failure(
            COMM_UNSUPPORTED,
            subject + "8-bit floats needs a GPU of sm_90 or newer, this one is sm_" +
                std::to_string(communicator.sm_major) + "x. Convert to bfloat16 and back");
}

void check_scaled_sum(const NcclCommunicator& communicator, const std::string& subject,
                      comm_dtype dtype, comm_op op) {
    for (const ScaledSum& sum : communicator.scaled_sums)
        if (sum.op == op && sum.dtype == dtype) return;
    throw communicator.failure(COMM_INVALID_ARGUMENT,
                               subject +
                                   "this dtype with a scaled sum that was made for another dtype "
                                   "or communicator, or freed. Make one with scaled_sum()");
}

// One rank has nothing to average. NCCL would scale by 1 then, with a kernel that it lacks for
// 8-bit floats, and its refusal would end the communicator.
NcclOp op_of_one_rank(const NcclCommunicator& communicator, const std::string& subject,
                      comm_dtype dtype, NcclOp op) {
    if (op == COMM_AVG) return COMM_SUM;
    if (op <= COMM_AVG || !is_float8(dtype)) return op;
    throw communicator.failure(
        COMM_UNSUPPORTED,
        subject + "8-bit floats with a scaled sum needs two ranks in NCCL. Multiply the tensor");
}

// The op for NCCL. Throws if it cannot reduce this dtype so, before anything is enqueued: an error
// of NCCL itself would end the communicator.
NcclOp resolve_op(const NcclCommunicator& communicator, Operation operation, comm_dtype dtype,
                  comm_op op) {
    std::string subject = std::string(name_of(operation)) + " of ";
    if (dtype == COMM_INT16 || dtype == COMM_UINT16)
        throw communicator.failure(COMM_UNSUPPORTED,
                                   subject + (dtype == COMM_INT16 ? "int16" : "uint16") +
                                       " does not exist in NCCL. Convert to int32 and back");
    if (dtype >= COMM_FLOAT8_E4M3FNUZ)
        throw communicator.failure(COMM_UNSUPPORTED,
                                   subject + "such 8-bit floats does not exist in NCCL. Convert");
    if (is_complex(dtype) && op != COMM_SUM)
        throw communicator.failure(COMM_UNSUPPORTED,
                                   subject + "complex numbers is defined for sums alone");
    if (is_float8(dtype)) check_float8(communicator, subject);
    if (op > COMM_AVG) check_scaled_sum(communicator, subject, dtype, op);
    if (dtype == COMM_BOOL) op = op_of_bool(op);
    return communicator.nranks == 1 ? op_of_one_rank(communicator, subject, dtype, op) : op;
}

// As sends and receives of one group, before NCCL 2.28.3.
NcclResult grouped_alltoall(NcclCommunicator& communicator, const char* send, char* recv,
                            Payload payload, NcclStream stream) {
    const NcclLibrary& nccl = communicator.nccl;
    uint64_t stride = payload.nbytes();
    NcclResult code = nccl.GroupStart();
    for (int peer = 0; peer < communicator.nranks && code == COMM_OK; ++peer) {
        code = nccl.Send(send + peer * stride, payload.count, payload.dtype, peer,
                         communicator.comm, stream);
        if (code == COMM_OK || code == COMM_IN_PROGRESS)
            code = nccl.Recv(recv + peer * stride, payload.count, payload.dtype, peer,
                             communicator.comm, stream);
        if (code == COMM_IN_PROGRESS) code = COMM_OK;
    }
    NcclResult end = nccl.GroupEnd();
    return code != COMM_OK ? code : end;
}

}  // namespace

uint64_t Payload::nbytes() const { return count * size_of(dtype); }

// NCCL connects an algorithm at its first use, which allocates memory; inside a capture that fails
// and invalidates the capture. So the first use must be outside. `variant` is the op or the peer.
void NcclCommunicator::check_capture(Operation operation, int variant, const Payload& payload,
                                     NcclStream stream) {
    bool is_capturing = false;
    check_device("counting the graph that captures this call",
                 graphs.note_capture(device, stream, &is_capturing));
    if (nranks == 1) return;
    int size_class = 64 - __builtin_clzll(payload.nbytes() | 1);
    ConnectionKey key(operation, variant, payload.dtype, size_class);
    if (!is_capturing) {
        connected.insert(key);
    } else if (connected.count(key) == 0) {
        throw failure(COMM_INVALID_USAGE,
                      std::string(name_of(operation)) + " of " + std::to_string(payload.nbytes()) +
                          " bytes would run for the first time inside the capture of a graph, "
                          "where its connections cannot be made. Run the same call once before "
                          "the capture");
    }
}

template <class Run>
void NcclCommunicator::enqueue(Operation operation, int variant, const Payload& payload,
                               comm_stream stream, Run run) {
    locked(name_of(operation), [&] {
        NcclStream chosen = fixed_stream != nullptr ? fixed_stream : stream;
        check_capture(operation, variant, payload, chosen);
        return run(chosen);
    });
}

template <class Run>
void NcclCommunicator::reduction(Operation operation, uint64_t count, comm_dtype dtype, comm_op op,
                                 comm_stream stream, Run run) {
    NcclOp nccl_op = resolve_op(*this, operation, dtype, op);
    Payload payload{dtype == COMM_BOOL ? NcclDtype{COMM_UINT8} : dtype, count};
    if (is_complex(dtype)) payload = pairs(dtype, count);
    enqueue(operation, nccl_op, payload, stream,
            [&](NcclStream chosen) { return run(payload, nccl_op, chosen); });
}

template <class Run>
void NcclCommunicator::movement(Operation operation, int peer, uint64_t count, comm_dtype dtype,
                                comm_stream stream, Run run) {
    Payload payload = payload_of_move(dtype, count);
    enqueue(operation, peer, payload, stream,
            [&](NcclStream chosen) { return run(payload, chosen); });
}

void NcclCommunicator::allreduce(const void* send, void* recv, uint64_t count, comm_dtype dtype,
                                 comm_op op, comm_stream stream) {
    reduction(Operation::allreduce, count, dtype, op, stream,
              [&](Payload payload, NcclOp nccl_op, NcclStream chosen) {
                  return nccl.AllReduce(send, recv, payload.count, payload.dtype, nccl_op, comm,
                                        chosen);
              });
}

void NcclCommunicator::reduce(const void* send, void* recv, uint64_t count, comm_dtype dtype,
                              comm_op op, int32_t dst, comm_stream stream) {
    reduction(Operation::reduce, count, dtype, op, stream,
              [&](Payload payload, NcclOp nccl_op, NcclStream chosen) {
                  return nccl.Reduce(send, recv, payload.count, payload.dtype, nccl_op, dst, comm,
                                     chosen);
              });
}

void NcclCommunicator::reduce_scatter(const void* send, void* recv, uint64_t count,
                                      comm_dtype dtype, comm_op op, comm_stream stream) {
    reduction(Operation::reduce_scatter, count, dtype, op, stream,
              [&](Payload payload, NcclOp nccl_op, NcclStream chosen) {
                  return nccl.ReduceScatter(send, recv, payload.count, payload.dtype, nccl_op, comm,
                                            chosen);
              });
}

void NcclCommunicator::broadcast(void* buffer, uint64_t count, comm_dtype dtype, int32_t src,
                                 comm_stream stream) {
    movement(
        Operation::broadcast, 0, count, dtype, stream, [&](Payload payload, NcclStream chosen) {
            return nccl.Broadcast(buffer, buffer, payload.count, payload.dtype, src, comm, chosen);
        });
}

void NcclCommunicator::allgather(const void* send, void* recv, uint64_t count, comm_dtype dtype,
                                 comm_stream stream) {
    movement(Operation::allgather, 0, count, dtype, stream,
             [&](Payload payload, NcclStream chosen) {
                 return nccl.AllGather(send, recv, payload.count, payload.dtype, comm, chosen);
             });
}

void NcclCommunicator::alltoall(const void* send, void* recv, uint64_t count, comm_dtype dtype,
                                comm_stream stream) {
    movement(Operation::alltoall, 0, count, dtype, stream, [&](Payload payload, NcclStream chosen) {
        if (nccl.AlltoAll != nullptr)
            return nccl.AlltoAll(send, recv, payload.count, payload.dtype, comm, chosen);
        return grouped_alltoall(*this, static_cast<const char*>(send), static_cast<char*>(recv),
                                payload, chosen);
    });
}

void NcclCommunicator::send(const void* buffer, uint64_t count, comm_dtype dtype, int32_t dst,
                            comm_stream stream) {
    movement(Operation::send, dst, count, dtype, stream, [&](Payload payload, NcclStream chosen) {
        return nccl.Send(buffer, payload.count, payload.dtype, dst, comm, chosen);
    });
}

void NcclCommunicator::recv(void* buffer, uint64_t count, comm_dtype dtype, int32_t src,
                            comm_stream stream) {
    movement(Operation::recv, src, count, dtype, stream, [&](Payload payload, NcclStream chosen) {
        return nccl.Recv(buffer, payload.count, payload.dtype, src, comm, chosen);
    });
}

// NCCL has no barrier: an allreduce of four bytes of our own that nobody reads.
void NcclCommunicator::barrier(comm_stream stream) {
    if (barrier_word == nullptr)
        throw failure(COMM_UNSUPPORTED,
                      "barrier needs a CUDA runtime, and none is loaded in this process. Import "
                      "torch built with CUDA first");
    allreduce(barrier_word, barrier_word, 1, COMM_INT32, COMM_MAX, stream);
}

void NcclCommunicator::group_start() {
    locked("ncclGroupStart", [&] { return nccl.GroupStart(); });
}

void NcclCommunicator::group_end() {
    locked("ncclGroupEnd", [&] { return nccl.GroupEnd(); });
}

// Never waits: a call that holds the mutex reports its errors itself.
void NcclCommunicator::async_error() {
    std::unique_lock<std::timed_mutex> lock(mutex, std::try_to_lock);
    if (!lock.owns_lock() || finalized) return;
    if (aborting.load(std::memory_order_acquire)) throw aborted_failure();
    NcclResult state = COMM_OK;
    NcclResult code = nccl.CommGetAsyncError(comm, &state);
    if (code == COMM_OK && state != COMM_IN_PROGRESS) code = state;
    if (code != COMM_OK) throw nccl_failure("ncclCommGetAsyncError", code);
}

}  // namespace nccl
