// One communicator over NCCL: its state, its entries in the table, and what several files need.
#pragma once

#include <atomic>
#include <climits>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "abi/communicator.h"
#include "nccl/device.h"
#include "nccl/library.h"
#include "nccl/run_bounded.h"
#include "plugin/failure.h"

namespace nccl {

using plugin::PluginError;

enum class Operation {
    allreduce,
    broadcast,
    reduce,
    allgather,
    reduce_scatter,
    alltoall,
    send,
    recv
};

// What NCCL is given for a tensor: some dtypes travel as another.
struct Payload {
    NcclDtype dtype;
    uint64_t count;
    uint64_t nbytes() const;
};

// What NCCL connects separately: operation, its op or peer, dtype, class of size.
using ConnectionKey = std::tuple<Operation, int, NcclDtype, int>;

// Memory that was registered with NCCL.
struct RegisteredMemory {
    void* pointer = nullptr;
    NcclWindow window = nullptr;
    void* registration = nullptr;
};

struct ScaledSum {
    NcclOp op;
    comm_dtype dtype;
};

// To abort or revoke; then that goes on in the background.
constexpr std::chrono::milliseconds ABORT_WAIT(5000);

struct NcclCommunicator : std::enable_shared_from_this<NcclCommunicator> {
    struct CallScope {
        NcclCommunicator& communicator;
    };

    // ---- entries of the table, and the files they are in ----
    // init.cpp
    static int32_t probe();
    static void get_unique_id(void* id);
    static std::shared_ptr<NcclCommunicator> init(const comm_init_args& args);
    // calls.cpp
    void allreduce(const void* send, void* recv, uint64_t count, comm_dtype dtype, comm_op op,
                   comm_stream stream);
    void reduce(const void* send, void* recv, uint64_t count, comm_dtype dtype, comm_op op,
                int32_t dst, comm_stream stream);
    void reduce_scatter(const void* send, void* recv, uint64_t count, comm_dtype dtype, comm_op op,
                        comm_stream stream);
    void broadcast(void* buffer, uint64_t count, comm_dtype dtype, int32_t src, comm_stream stream);
    void allgather(const void* send, void* recv, uint64_t count, comm_dtype dtype,
                   comm_stream stream);
    void alltoall(const void* send, void* recv, uint64_t count, comm_dtype dtype,
                  comm_stream stream);
    void send(const void* buffer, uint64_t count, comm_dtype dtype, int32_t dst,
              comm_stream stream);
    void recv(void* buffer, uint64_t count, comm_dtype dtype, int32_t src, comm_stream stream);
    void barrier(comm_stream stream);
    void group_start();
    void group_end();
    void async_error();
    // memory.cpp
    void mem_alloc(size_t nbytes, void** pointer);
    void mem_free(void* pointer);
    void premul_sum_create(const void* scalar, comm_dtype dtype, comm_op* op);
    void op_destroy(comm_op op);
    // finalize.cpp
    void split(int32_t color, int32_t key, comm_t* child);
    void finalize();
    void abort();

    // ---- errors and waiting ----
    const char* last_error() const { return error.c_str(); }
    comm_result fail(const PluginError& failure);
    PluginError failure(comm_result code, const std::string& text) const;
    PluginError aborted_failure() const;
    PluginError nccl_failure(const char* call, NcclResult code) const;
    // Throws unless a function of CUDA answered success.
    void check_device(const char* call, int code) const;
    // Waits until NCCL has done what `code` is the answer to: at once, unless it was put off.
    void wait_for_nccl(const char* call, NcclResult code);
    // The same for a call whose progress NCCL reports with `reporter`.
    void wait_for_nccl(const char* call, NcclResult code, NcclComm reporter);
    // Ends what runs, in the background if that takes long; the communicator can then be shrunk.
    void revoke_in_background();
    // Waits for the thread that revokes this communicator; throws the child's failure if it cannot.
    void check_revoked(const NcclCommunicator& child);
    // Ends the communicator by force, in the background if that takes long.
    void abort_in_background();

    NcclConfig config() const;
    void deregister(const RegisteredMemory& memory);

    // Runs `body`, which calls NCCL, under the mutex and on the device, and waits for its end.
    template <class Body>
    void locked(const char* call, Body body) {
        std::lock_guard<std::timed_mutex> lock(mutex);
        if (aborting.load(std::memory_order_acquire)) throw aborted_failure();
        CurrentDevice current(device, ordinal);
        check_device("cudaSetDevice", current.code());
        wait_for_nccl(call, body());
    }

    NcclLibrary nccl;
    DeviceLibrary device;
    NcclComm comm = nullptr;
    int rank = 0, nranks = 1, ordinal = 0;
    int sm_major = 0;  // 9 of sm_90; 0 if not known
    std::atomic<std::chrono::milliseconds> timeout{std::chrono::milliseconds(0)};
    bool blocking = false;
    NcclStream fixed_stream = nullptr;  // NULL: the caller's
    int max_ctas = INT_MIN;
    bool revokes = false;  // when it ends before its time, so that it can be shrunk
    std::atomic<NcclResult> revoke_code{COMM_IN_PROGRESS};
    std::shared_ptr<NcclCommunicator> parent;  // a revoked one, of which this is what is left
    std::vector<int> excluded;                 // its ranks that are not in this one
    std::timed_mutex mutex;                    // held while NCCL works for this communicator
    std::atomic<bool> aborting{false};
    std::atomic<bool> finalized{false};
    GraphCount graphs;
    std::vector<RegisteredMemory> registered;
    std::vector<ScaledSum> scaled_sums;
    std::set<ConnectionKey> connected;  // what has run outside a capture
    void* barrier_word = nullptr;       // four bytes of device memory
    std::string error;

  private:
    void apply_options(const comm_init_args& args, std::string* path);
    void open_library(const comm_init_args& args);
    void find_device(const comm_init_args& args);
    void connect(const comm_init_args& args);
    void shrink_parent(NcclConfig* config);
    void check_capture(Operation operation, int variant, const Payload& payload, NcclStream stream);
    NcclResult register_memory(RegisteredMemory* memory, size_t nbytes);
    std::shared_ptr<NcclCommunicator> make_child(NcclComm child);
    bool wait_for_graphs();
    void finalize_and_destroy();

    template <class Run>
    void enqueue(Operation operation, int variant, const Payload& payload, comm_stream stream,
                 Run run);
    template <class Run>
    void reduction(Operation operation, uint64_t count, comm_dtype dtype, comm_op op,
                   comm_stream stream, Run run);
    template <class Run>
    void movement(Operation operation, int peer, uint64_t count, comm_dtype dtype,
                  comm_stream stream, Run run);
};

}  // namespace nccl
