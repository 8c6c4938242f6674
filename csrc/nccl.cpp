// NCCL (or RCCL) behind communicator.h, opened at run time and never linked.
//
// Options: library=PATH, blocking=0|1 (0), stream=ADDRESS (the caller's), max_ctas=N.
//
// A communicator is non-blocking unless asked otherwise: a call that NCCL puts off is waited for
// here, against the deadline and against abort(). NCCL's own ends spin for ever while a CUDA graph
// that captured a call lives, so finalize refuses then, and whatever may not end runs aside.

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "communicator.h"
#include "nccl_bounded.h"
#include "nccl_device.h"
#include "nccl_dtype.h"
#include "nccl_library.h"

namespace {

constexpr std::chrono::milliseconds ABORT_WAIT(5000);  // then it goes on aside
constexpr std::chrono::milliseconds GRAPH_WAIT(1000);  // a graph's end is told late
constexpr int SPINS = 2000;                            // before a wait sleeps
constexpr int CAPABILITY_MAJOR = 75;                   // cudaDevAttrComputeCapabilityMajor
constexpr int FLOAT8_CHIP = 9;                         // sm_90 on

thread_local std::string setup_error;

enum Call { ALLREDUCE, BROADCAST, REDUCE, ALLGATHER, REDUCE_SCATTER, ALLTOALL, SEND, RECV };
const char* const CALL_NAMES[] = {"allreduce",      "broadcast", "reduce", "allgather",
                                  "reduce_scatter", "alltoall",  "send",   "recv"};

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

}  // namespace

struct comm_s {
    std::shared_ptr<Group> group;  // shared with what was left behind by run_bounded
};

namespace {

using Shared = std::shared_ptr<Group>;

std::string rank_of(const Group& group) { return "rank " + std::to_string(group.rank) + ": "; }

comm_result fail(Group& group, comm_result code, const std::string& text) {
    group.error = rank_of(group) + text;
    return code;
}

comm_result fail_aborted(Group& group) {
    return fail(group, COMM_REMOTE_ERROR,
                "this communicator was aborted, for a peer is gone or abort() was called. Close it "
                "and make a new one");
}

comm_result fail_nccl(Group& group, const char* call, NcclResult code) {
    const char* said = group.nccl.GetErrorString(code);
    const char* detail = group.nccl.GetLastError(group.comm);
    std::string text = std::string(call) + " failed in NCCL " +
                       nccl_version_text(group.nccl.version) + ": " + (said ? said : "?");
    if (detail != nullptr && detail[0] != '\0') text += ". " + std::string(detail);
    bool known = code > COMM_OK && code <= COMM_TIMEOUT && code != COMM_IN_PROGRESS;
    comm_result mapped = known ? code : COMM_INTERNAL_ERROR;
    if (mapped == COMM_INVALID_ARGUMENT) mapped = COMM_INVALID_USAGE;  // ours were checked before
    return fail(group, mapped, text);
}

void pause(int turn) {
    if (turn < SPINS)
        std::this_thread::yield();
    else
        std::this_thread::sleep_for(std::chrono::microseconds(100));
}

// Waits until NCCL has done what `code` answered: at once, unless it was put off. The state is
// asked for even after a success, for registration answers so before it is done.
comm_result settle(Group& group, const char* call, NcclResult code) {
    if (group.blocking) return code == COMM_OK ? COMM_OK : fail_nccl(group, call, code);
    auto deadline = Clock::now() + group.timeout;
    for (int turn = 0; code == COMM_OK || code == COMM_IN_PROGRESS; ++turn) {
        NcclResult state = COMM_OK;
        code = group.nccl.CommGetAsyncError(group.comm, &state);
        if (code == COMM_OK && state == COMM_OK) return COMM_OK;
        if (code == COMM_OK) code = state;
        if (code != COMM_IN_PROGRESS) break;
        if (group.aborting.load(std::memory_order_acquire)) return fail_aborted(group);
        if (Clock::now() > deadline)
            return fail(group, COMM_TIMEOUT,
                        std::string(call) + " was not done after " +
                            std::to_string(group.timeout.count()) +
                            " ms: some rank did not make the same call, or cannot be reached. "
                            "NCCL_DEBUG=INFO and NCCL_SOCKET_IFNAME may help");
        pause(turn);
    }
    return fail_nccl(group, call, code);
}

// ---- start ----

comm_result refuse_setup(comm_result code, const comm_init_args* args, const std::string& text) {
    setup_error = "rank " + std::to_string(args->rank) + ": " + text;
    return code;
}

// Applies "key=value"; false if the key is not known.
bool apply_option(Group& group, const std::string& key, const char* value, std::string* path) {
    if (key == "library")
        *path = value;
    else if (key == "blocking")
        group.blocking = std::strcmp(value, "1") == 0;
    else if (key == "stream")
        group.stream = reinterpret_cast<NcclStream>(std::strtoull(value, nullptr, 0));
    else if (key == "max_ctas")
        group.max_ctas = std::atoi(value);
    else
        return false;
    return true;
}

comm_result apply_options(Group& group, const comm_init_args* args, std::string* path) {
    for (const char* const* option = args->options; option && *option; ++option) {
        const char* equals = std::strchr(*option, '=');
        std::string key = equals != nullptr ? std::string(*option, equals - *option) : *option;
        if (equals == nullptr || !apply_option(group, key, equals + 1, path))
            return refuse_setup(COMM_INVALID_ARGUMENT, args,
                                std::string(*option) +
                                    " is no option of nccl. There are: "
                                    "library, blocking, stream, max_ctas");
    }
    return COMM_OK;
}

void take_places(Group& group, const comm_init_args* args) {
    group.rank = args->rank;
    group.nranks = args->nranks;
    group.ordinal = args->device < 0 ? 0 : args->device;
    group.timeout = std::chrono::milliseconds(args->timeout_ms);
    group.device = find_device_library();
    if (group.device.attribute != nullptr)
        group.device.attribute(&group.chip, CAPABILITY_MAJOR, group.ordinal);
}

NcclConfig config_of(const Group& group) {
    NcclConfig config;
    config.blocking = group.blocking;
    config.max_ctas = group.max_ctas;
    return config;
}

// Ends a communicator by force, aside if that takes long.
void abort_aside(const Shared& group) {
    NcclComm comm = group->comm;
    if (comm == nullptr) return;
    group->comm = nullptr;
    auto abort = [group, comm] { group->nccl.CommAbort(comm); };
    run_bounded(Clock::now() + ABORT_WAIT, abort);
}

// Everything a rank can check alone.
comm_result prepare(Group& group, const comm_init_args* args) {
    std::string path, problem;
    comm_result code = apply_options(group, args, &path);
    if (code != COMM_OK) return code;
    if (args->unique_id == nullptr || args->unique_id_bytes != sizeof(NcclId))
        return refuse_setup(COMM_INVALID_ARGUMENT, args, "nccl needs a unique id of 128 bytes");
    if (open_nccl(path.empty() ? nullptr : path.c_str(), &group.nccl, &problem)) return COMM_OK;
    return refuse_setup(
        COMM_UNSUPPORTED, args,
        "NCCL cannot be used" + (path.empty() ? "" : " from " + path) + ": " + problem);
}

// Says through the Coordinator that this rank enters, or why not: it knows who never came, and who
// stays out keeps nobody waiting inside NCCL.
comm_result enter(const comm_init_args* args, comm_result mine) {
    if (args->bootstrap == nullptr || args->nranks == 1) return mine;
    std::vector<comm_result> everyones(args->nranks, COMM_OK);
    comm_result code =
        args->bootstrap->allgather(args->bootstrap->ctx, &mine, everyones.data(), sizeof mine);
    if (code != COMM_OK || mine != COMM_OK) return code != COMM_OK ? code : mine;
    for (int rank = 0; rank < args->nranks; ++rank)
        if (everyones[rank] != COMM_OK)
            return refuse_setup(
                COMM_REMOTE_ERROR, args,
                "rank " + std::to_string(rank) + " cannot start NCCL; its own error says why");
    return COMM_OK;
}

comm_result connect(const Shared& group, const comm_init_args* args) {
    NcclId id;
    std::memcpy(&id, args->unique_id, sizeof id);
    NcclConfig config = config_of(*group);
    CurrentDevice device(group->device, group->ordinal);
    comm_result code = settle(
        *group, "ncclCommInitRankConfig",
        group->nccl.CommInitRankConfig(&group->comm, group->nranks, id, group->rank, &config));
    if (code == COMM_OK && group->device.allocate != nullptr &&
        group->device.allocate(&group->word, sizeof(int32_t)) != 0)
        code = fail(*group, COMM_DEVICE_ERROR, "cudaMalloc of 4 bytes for the barrier failed");
    if (code == COMM_OK) return COMM_OK;
    setup_error = group->error;
    abort_aside(group);
    return code;
}

comm_result do_init(comm_t* comm, const comm_init_args* args) {
    auto group = std::make_shared<Group>();
    comm_result code = enter(args, prepare(*group, args));
    if (code != COMM_OK) return code;
    take_places(*group, args);
    code = connect(group, args);
    if (code == COMM_OK) *comm = new comm_s{group};
    return code;
}

comm_result do_get_unique_id(void* id) {
    NcclLibrary library;
    if (!open_nccl(nullptr, &library, &setup_error)) return COMM_UNSUPPORTED;
    NcclResult code = library.GetUniqueId(static_cast<NcclId*>(id));
    if (code != COMM_OK) setup_error = library.GetLastError(nullptr);
    return code;
}

comm_result do_probe(int32_t* score) {
    NcclLibrary library;
    if (!open_nccl(nullptr, &library, &setup_error)) return COMM_UNSUPPORTED;
    *score = 200;
    return COMM_OK;
}

// ---- calls ----

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
    return COMM_OK;
}

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

// Runs `body` under the communicator's lock.
template <class Body>
comm_result locked(comm_t comm, const char* call, Body body) {
    Group& group = *comm->group;
    std::lock_guard<std::timed_mutex> lock(group.inside);
    if (group.aborting.load(std::memory_order_acquire)) return fail_aborted(group);
    CurrentDevice device(group.device, group.ordinal);
    return settle(group, call, body(group));
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

// ---- reductions that scale ----

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

// ---- memory ----

// Symmetric where the library has windows, registered where it has that, plain otherwise.
NcclResult register_window(Group& group, Window* window, size_t nbytes) {
    if (group.nccl.CommWindowRegister != nullptr)
        return group.nccl.CommWindowRegister(group.comm, window->pointer, nbytes, &window->window,
                                             NCCL_WINDOW_SYMMETRIC);
    if (group.nccl.CommRegister != nullptr)
        return group.nccl.CommRegister(group.comm, window->pointer, nbytes, &window->registration);
    return COMM_OK;
}

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

// ---- split and end ----

comm_result take_child(Group& parent, NcclComm made, comm_t* child) {
    auto group = std::make_shared<Group>();
    group->nccl = parent.nccl;
    group->device = parent.device;
    group->comm = made;
    group->ordinal = parent.ordinal;
    group->chip = parent.chip;
    group->timeout = parent.timeout;
    group->blocking = parent.blocking;
    group->stream = parent.stream;
    group->max_ctas = parent.max_ctas;
    CurrentDevice device(group->device, group->ordinal);
    bool whole = group->nccl.CommCount(made, &group->nranks) == COMM_OK &&
                 group->nccl.CommUserRank(made, &group->rank) == COMM_OK;
    if (whole && group->device.allocate != nullptr)
        whole = group->device.allocate(&group->word, sizeof(int32_t)) == 0;
    if (!whole) {
        abort_aside(group);
        return fail(parent, COMM_DEVICE_ERROR, "the subgroup was made but cannot be used");
    }
    *child = new comm_s{group};
    return COMM_OK;
}

comm_result do_split(comm_t comm, int32_t color, int32_t key, comm_t* child) {
    *child = nullptr;
    auto made = std::make_unique<NcclComm>(nullptr);  // NCCL fills it in later
    comm_result code = locked(comm, "ncclCommSplit", [&](Group& group) {
        NcclConfig config = config_of(group);
        return group.nccl.CommSplit(group.comm, color, key, made.get(), &config);
    });
    if (code != COMM_OK) made.release();
    if (code != COMM_OK || color < 0) return code;
    return take_child(*comm->group, *made, child);
}

bool wait_for_graphs(Group& group) {
    auto deadline = Clock::now() + GRAPH_WAIT;
    while (group.graphs.live() > 0 && Clock::now() < deadline)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return group.graphs.live() == 0;
}

comm_result finalize_and_destroy(Group& group) {
    CurrentDevice device(group.device, group.ordinal);
    for (const Window& window : group.windows) deregister_window(group, window);
    group.windows.clear();  // the memory itself belongs to the tensors in it
    for (const ScaledSum& sum : group.scaled_sums) group.nccl.RedOpDestroy(sum.op, group.comm);
    group.scaled_sums.clear();
    comm_result code = settle(group, "ncclCommFinalize", group.nccl.CommFinalize(group.comm));
    if (code != COMM_OK) return code;
    if (group.word != nullptr) group.device.release(group.word);
    group.word = nullptr;
    NcclComm comm = group.comm;
    group.comm = nullptr;
    NcclResult result = group.nccl.CommDestroy(comm);
    return result == COMM_OK ? COMM_OK : fail_nccl(group, "ncclCommDestroy", result);
}

comm_result refuse_end(Group& group) {
    return fail(group, COMM_INVALID_USAGE,
                "close() while " + std::to_string(group.graphs.live()) +
                    " CUDA graph(s) that captured this communicator are alive: NCCL would wait for "
                    "them for ever. Delete or reset() the graphs first, or call abort()");
}

comm_result do_finalize(comm_t comm) {
    Shared group = comm->group;
    std::lock_guard<std::timed_mutex> lock(group->inside);
    if (group->ended || group->aborting.load(std::memory_order_acquire)) return COMM_OK;
    if (!wait_for_graphs(*group)) return refuse_end(*group);
    group->ended = true;
    auto code = std::make_shared<comm_result>(COMM_OK);
    auto margin = group->timeout + std::chrono::milliseconds(500);
    bool done =
        run_bounded(Clock::now() + margin, [group, code] { *code = finalize_and_destroy(*group); });
    if (done && *code == COMM_OK) return COMM_OK;
    group->aborting.store(true, std::memory_order_release);
    if (done) {
        abort_aside(group);
        return *code;
    }
    return fail(*group, COMM_TIMEOUT,
                "NCCL did not end the communicator within its deadline. It is left as it is");
}

comm_result do_abort(comm_t comm) {
    Shared group = comm->group;
    if (group->aborting.exchange(true, std::memory_order_acq_rel)) return COMM_OK;
    // Calls that wait leave at once; one that NCCL keeps inside is ended by the abort itself.
    std::unique_lock<std::timed_mutex> lock(group->inside, std::defer_lock);
    lock.try_lock_for(ABORT_WAIT / 5);
    if (!group->ended) abort_aside(group);
    return COMM_OK;
}

// Not collective, so a communicator that was not finalized is left to the end of the process.
comm_result do_destroy(comm_t comm) {
    delete comm;
    return COMM_OK;
}

const char* do_last_error(comm_t comm) {
    return comm == nullptr ? setup_error.c_str() : comm->group->error.c_str();
}

comm_plugin make_table() {
    comm_plugin table = {};
    table.struct_size = sizeof table;
    table.abi_major = COMM_ABI_MAJOR;
    table.abi_minor = COMM_ABI_MINOR;
    table.name = "nccl";
    table.version = "1";  // of this file; NCCL's own is compared by those who open it
    table.device_type = is_rocm_loaded() ? COMM_ROCM : COMM_CUDA;
    table.unique_id_bytes = sizeof(NcclId);
    table.caps = COMM_CAP_GRAPH_CAPTURE | COMM_CAP_THREADS;
    table.probe = do_probe;
    table.init = do_init;
    table.destroy = do_destroy;
    table.allreduce = do_allreduce;
    table.last_error = do_last_error;
    table.get_unique_id = do_get_unique_id;
    table.broadcast = do_broadcast;
    table.reduce = do_reduce;
    table.allgather = do_allgather;
    table.reduce_scatter = do_reduce_scatter;
    table.alltoall = do_alltoall;
    table.send = do_send;
    table.recv = do_recv;
    table.barrier = do_barrier;
    table.group_start = do_group_start;
    table.group_end = do_group_end;
    table.abort = do_abort;
    table.async_error = do_async_error;
    table.mem_alloc = do_mem_alloc;
    table.mem_free = do_mem_free;
    table.premul_sum_create = do_premul_sum_create;
    table.op_destroy = do_op_destroy;
    table.split = do_split;
    table.finalize = do_finalize;
    return table;
}

}  // namespace

extern "C" COMM_EXPORT const comm_plugin* comm_plugin_entry_v1(void) {
    static const comm_plugin table = make_table();
    return &table;
}
